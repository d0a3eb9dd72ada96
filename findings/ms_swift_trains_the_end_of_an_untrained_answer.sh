#!/usr/bin/env bash
# Surprise: ms-swift leaves a last answer with `"loss": false` untrained, but trains the end of turn after it. Of an earlier
#   answer with this mark the end is not trained either.
# Likely guess: the mark of a message is for all that the template prints for it, as in axolotl and LLM-Foundry; or for no
#   message's end.
# Why it matters: such a mark is set on wrong answers. The model learns to stop after one, from a row that should teach it
#   nothing, and a record whose only answer is marked is still trained.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
# Only the source is read: ms-swift needs torch, and the packages of a GPU.
"$folder/env/bin/uv" pip install --quiet --no-deps --target "$folder/swift" 'ms-swift==4.6.0'
"$folder/env/bin/python" - "$folder/swift" <<'PY'
import ast
import sys
from enum import Enum
from pathlib import Path

# The class, and the names that it uses, without the imports of their files.
source = Path(sys.argv[1], "swift")


def read_nodes(name, wanted):
    nodes = ast.parse((source / name).read_text()).body
    return [node for node in nodes if getattr(node, "name", "") in wanted]


nodes = [
    *ast.parse("from __future__ import annotations").body,
    *read_nodes("template/utils.py", {"ContextType", "get_last_user_round"}),
    *read_nodes("loss_scale/base.py", {"LossScale"}),
]
scope = {"Enum": Enum, "ALL_BASE_STRATEGY": ["default", "last_round", "all"]}
exec(compile(ast.Module(nodes, []), "swift", "exec"), scope)
kind = scope["ContextType"]


def trained(answer):
    """Return the texts of a conversation's last round that get loss."""
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", **answer}]
    # What the template gives to the class for its last round (`Template._swift_encode`).
    contexts = ["<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", answer["content"], "<|im_end|>\n"]
    kinds = [kind.OTHER, kind.RESPONSE, kind.SUFFIX]
    texts, weights = scope["LossScale"]()(contexts, kinds, messages)
    found = [text for text, weight in zip(texts, weights, strict=True) if weight]
    print(f"{answer}: trained {found}")
    return found


# The template makes these contexts: the end of the last round is a SUFFIX, that of others is not.
template = (source / "template/base.py").read_text()
assert "extra_context_list = template_meta.suffix\n                    extra_context_type = ContextType.SUFFIX" in template
assert trained({"content": "Four."}) == ["Four.", "<|im_end|>\n"]
assert trained({"content": "Five.", "loss": False}) == ["<|im_end|>\n"]
print("as found: the answer is not trained, and its end is")
PY
