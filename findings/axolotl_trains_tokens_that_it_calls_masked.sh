#!/usr/bin/env bash
# Surprise: axolotl's parts of a content with `train: false` and `true` train the token that both parts share. Its own
#   warning says that this token "will be MASKED (not trained)". The token is masked only if one of its characters is
#   in the trained part.
# Likely guess: as the warning and the docstring of `_convert_content_parts` say, a token with characters of both parts
#   is never trained.
# Why it matters: whoever masks a wrong sentence, and ends it with a space as the warning describes, expects a lost
#   token. Another tool that follows the words, and not the code, trains other tokens than axolotl.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" tokenizers
# Only the source is read: axolotl needs a newer Python, and the packages of a GPU.
"$folder/env/bin/uv" pip install --quiet --no-deps --python-version 3.13 --target "$folder/axolotl" 'axolotl==0.21.0'
"$folder/env/bin/python" - "$folder/axolotl" <<'PY'
import ast
import logging
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

# The three methods of axolotl, without its imports.
path = Path(sys.argv[1]) / "axolotl/prompt_strategies/chat_template.py"
names = {"get_offsets_for_train_detail", "adjust_train_details", "_convert_content_parts"}
methods = [
    node
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef) and node.name in names
]
warnings = []
LOG = logging.getLogger("axolotl")
LOG.warning = lambda text, *values: warnings.append(text % values if values else text)
scope = {"LOG": LOG, "IGNORE_TOKEN_ID": -100, "List": list, "Dict": dict}
future = ast.parse("from __future__ import annotations").body
tree = ast.Module([*future, ast.ClassDef("Axolotl", [], [], methods, [])], [])
exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), scope)

# A tokenizer whose words begin with their space, as those of byte-level BPE do.
texts = ("Let me see. It is four.", "One two three.")
pieces = {piece for text in texts for piece in __import__("re").findall(r" ?\w+|[^\w]", text)}
model = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(sorted(pieces))}, "?"))
model.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|[^\w]"), "isolated")


class Encoded(dict):
    def tokens(self):
        return self["tokens"]


def tokenize(text, **_):
    encoding = model.encode(text)
    return Encoded(offset_mapping=[*encoding.offsets], tokens=encoding.tokens)


axolotl = scope["Axolotl"]()
axolotl.tokenizer = tokenize


def show(untrained, trained):
    warnings.clear()
    parts = [{"type": "text", "text": untrained, "train": False}, {"type": "text", "text": trained, "train": True}]
    text, detail = axolotl._convert_content_parts(parts)
    offsets = axolotl.get_offsets_for_train_detail(text, detail)
    tokens = tokenize(text)["tokens"]
    found = [token for token, offset in zip(tokens, offsets, strict=True) if offset != -100]
    print(f"{untrained!r} (train: false) + {trained!r} (train: true): trained {found}")
    return found, " ".join(warnings)


found, said = show("Let me see. ", "It is four.")
print("  warned:", said.partition("BPE")[0] + "..." + said[said.index("will be MASKED") - 40 :][:72])
assert "the resulting token will be MASKED (not trained)" in said
assert found[0] == " It"
assert show("One two th", "ree.")[0] == [" three", "."]
assert show("One two thre", "e.")[0] == ["."]
PY
