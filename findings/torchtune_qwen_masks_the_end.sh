#!/usr/bin/env bash
# Surprise: torchtune's tokenizer of Qwen 2.5 leaves the `<|im_end|>` of the last answer out of the loss as soon as max_seq_len
#   is set, even if the conversation is much shorter. Without max_seq_len it is trained.
# Likely guess: a length that cuts nothing changes nothing.
# Why it matters: configs set max_seq_len, to bound memory. A model that is trained on single answers then never learns to stop.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" \
    'torchtune==0.6.1' 'torchao==0.10.0' 'torch==2.7.0'
HOME="$folder" "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from torchtune.data import Message
from torchtune.models.qwen2_5._tokenizer import Qwen2_5Tokenizer

print("torchtune", version("torchtune"))
folder = Path(sys.argv[1])
# Each ASCII character is a token; the tokenizer adds the special tokens of Qwen 2.5.
letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
vocabulary = {letter: number for number, letter in enumerate(letters)}
(folder / "vocab.json").write_text(json.dumps(vocabulary))
(folder / "merges.txt").write_text("#version: 0.2\n")
messages = [
    Message("user", "Where is Oslo?", masked=True),
    Message("assistant", "In Norway."),
]
trained = {}
for length in (None, 1000):
    tokenizer = Qwen2_5Tokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), max_seq_len=length
    )
    tokens, mask = tokenizer.tokenize_messages(messages)
    kept = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    trained[length] = tokenizer.decode(kept, skip_special_tokens=False)
    print(f"max_seq_len {length}: {len(tokens)} tokens, trained {trained[length]!r}")
assert trained[None].endswith("In Norway.<|im_end|>")
assert trained[1000] == trained[None].removesuffix("<|im_end|>")
PY
