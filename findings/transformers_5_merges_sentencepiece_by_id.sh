#!/usr/bin/env bash
# Surprise: transformers 5 opens a folder with Mistral's SentencePiece model (tokenizer.model and no tokenizer.json), and
#   gives other tokens than the model for text with two spaces, so for all code. Nothing is logged.
# Likely guess: LlamaTokenizer gives the ids of its tokenizer.model, as under transformers 4. (transformers 5 orders the
#   merges by the ids of the tokens that they make. SentencePiece merges by scores, and Mistral's `▁▁` has a small id and
#   the lowest score of all.)
# Why it matters: a model is trained or asked with tokens that it has not seen in such places; the tokenizer that is
#   saved keeps the wrong order, for all programs that read it.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/uv"
"$folder/uv/bin/pip" install --quiet uv
for version in 4.57.6 5.24.0; do
    "$folder/uv/bin/uv" venv --quiet "$folder/$version"
    "$folder/uv/bin/uv" pip install --quiet --python "$folder/$version" \
        "transformers==$version" 'sentencepiece==0.2.1' 'protobuf==6.33.4'
    "$folder/uv/bin/uv" pip install --quiet --python "$folder/$version" --no-deps 'mistral-common==1.13.1'
    HF_HUB_OFFLINE=1 "$folder/$version/bin/python" - "$folder/model" "$version" 2>/dev/null <<'PY'
import importlib.util
import json
import shutil
import sys
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

folder, version = Path(sys.argv[1]), sys.argv[2]
folder.mkdir(exist_ok=True)
package = Path(importlib.util.find_spec("mistral_common").origin).parent
[file] = package.glob("data/*.model.v3")
shutil.copyfile(file, folder / "tokenizer.model")
config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
(folder / "tokenizer_config.json").write_text(json.dumps(config))
tokenizer = AutoTokenizer.from_pretrained(folder)
model = SentencePieceProcessor(model_file=str(file))
code = Path(json.__file__).with_name("decoder.py").read_text()
print("transformers", version, type(tokenizer).__name__)
for text in ("x  y", "a b"):
    print(f"  {text!r}: {tokenizer.tokenize(text)}, by SentencePiece {model.encode(text, out_type=str)}")
ids = tokenizer(code, add_special_tokens=False)["input_ids"]
print("  json/decoder.py:", len(ids), "tokens, by SentencePiece", len(model.encode(code)))
assert tokenizer.tokenize("a b") == model.encode("a b", out_type=str)
if version.startswith("4"):
    assert ids == model.encode(code)
else:
    assert tokenizer.tokenize("x  y") == ["▁x", "▁▁", "y"]
    assert model.encode("x  y", out_type=str) == ["▁x", "▁", "▁y"]
    assert ids != model.encode(code)
PY
done
echo "as found: transformers 5 merges two spaces before all else"
