#!/usr/bin/env bash
# Surprise: a call such as tokenizer(texts, truncation=True, max_length=4) changes what save_pretrained writes afterwards: the
#   saved tokenizer.json has this truncation (and the padding of the call). Tools that open the file with `tokenizers`, as
#   datatrove does, cut every document to 4 tokens, without a message. transformers itself ignores both settings.
# Likely guess: truncation belongs to the call. The saved folder is that of the tokenizer that was opened, and it gives
#   the same ids in each tool.
# Why it matters: a training script saves its tokenizer next to the checkpoint. Whoever tokenizes a corpus with that
#   folder loses all of it but the beginnings of its documents, and a test with transformers finds nothing.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" \
    'transformers==5.24.0' 'tokenizers==0.23.3' 'datatrove==0.10.1' orjson
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

print(*(f"{name} {version(name)}" for name in ("transformers", "tokenizers", "datatrove")))
folder = Path(sys.argv[1])
text = "one two three four five six seven eight"
words = [*text.split(), "<eos>"]
model = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<eos>"))
model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def tokenize(name, call):
    """Save a tokenizer after this call. Return the tokens of the text by transformers, and the
    number of tokens that datatrove writes."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")
    tokenizer(text, **call)
    tokenizer.save_pretrained(folder / name)
    path = folder / name / "tokenizer.json"
    step = DocumentTokenizer(
        str(folder / f"{name}-tokens"), tokenizer_name_or_path=str(path), eos_token=None
    )
    step.run([Document(text=text, id="0")])
    (written,) = (folder / f"{name}-tokens").glob("*.ds")
    own = AutoTokenizer.from_pretrained(folder / name)(text)["input_ids"]
    tokens = written.stat().st_size // 2  # ids of 2 bytes
    print(f"saved after {call or 'a plain call'}: truncation {json.loads(path.read_text())['truncation']}")
    print(f"  the same 8 words: {len(own)} tokens by transformers, {tokens} by datatrove")
    return len(own), tokens


assert tokenize("plain", {}) == (8, 8)
assert tokenize("cut", {"truncation": True, "max_length": 4}) == (8, 4)
print("as found: datatrove writes the first 4 tokens of each document")
PY
