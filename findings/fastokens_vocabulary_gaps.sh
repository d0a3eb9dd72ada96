#!/usr/bin/env bash
# Surprise: fastokens refuses a BPE tokenizer.json whose vocabulary skips an id, and gives the model's type
#   as the reason: "unsupported model type: Other".
# Likely guess: the file's `model.type` is wrong or missing. It is "BPE", and tokenizers opens the same file;
#   if `type` is taken out, the true reason is shown: "non-contiguous tokens".
# Why it matters: GPT-4o's published tokenizer.json skips 199,998 and 200,000 to 200,017, so a program that falls back
#   to tokenizers for such a file loses the speed, and the message sends its user to the wrong place.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet 'fastokens==0.3.5' 'tokenizers==0.22.2'
"$folder/env/bin/python" - "$folder" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import fastokens
import tokenizers

print("fastokens", version("fastokens"), "tokenizers", version("tokenizers"))
path = Path(sys.argv[1], "tokenizer.json")


def answer(vocabulary, **model):
    tree = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    tree |= {"pre_tokenizer": None, "post_processor": None, "decoder": None}
    tree["model"] = model | {"vocab": vocabulary, "merges": ["a b"]}
    path.write_text(json.dumps(tree))
    ids = tokenizers.Tokenizer.from_file(str(path)).encode("abb").ids
    try:
        fastokens.Tokenizer.from_file(str(path))
        said = "opened"
    except ValueError as error:
        said = str(error)
    print(vocabulary, model, "tokenizers:", ids, "fastokens:", said)
    return said


whole = answer({"a": 0, "b": 1, "ab": 2}, type="BPE")
skipping = answer({"a": 0, "b": 1, "ab": 5}, type="BPE")
untyped = answer({"a": 0, "b": 1, "ab": 5})
assert whole == "opened", whole
assert "unsupported model type: Other" in skipping, skipping
assert "non-contiguous" in untyped, untyped
print("as found: the gap is reported as an unsupported model type")
PY
