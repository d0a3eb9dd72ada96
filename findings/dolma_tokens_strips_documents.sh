#!/usr/bin/env bash
# Surprise: `dolma tokens` cuts the white space off both ends of each text before it tokenizes it, without a word or setting:
#   the first line of a piece of code loses its indentation, and no document ends with a line end.
# Likely guess: the tokens of a document decode to its text, as in datatrove, Megatron and LLM-Foundry.
# Why it matters: code models never see the last line end before the end token, so they do not learn to end a file with one;
#   rows of functions or diffs that begin indented become wrong Python. Counts of tokens differ from other tools' too.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'dolma==1.2.1' 'numpy==1.26.4' 'tokenizers==0.19.1' 'smart-open==7.0.4'
"$folder/env/bin/python" - "$folder" <<'PY'
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

folder = Path(sys.argv[1])
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
tokenizer.train_from_iterator(["a record of text that gives some merges " * 20], trainer)
tokenizer.save(str(folder / "tokenizer.json"))
(end,) = tokenizer.encode("<eos>").ids

TEXTS = {
    "method": "    def area(self):\n        return self.width * self.height\n",
    "list": "\n- one\n- two\n\n",
    "plain": "a record of text",
}
source = folder / "documents" / "part.json"
source.parent.mkdir(parents=True)
with source.open("w") as file:
    for name, text in TEXTS.items():
        file.write(json.dumps({"id": name, "text": text}) + "\n")
argv = [Path(sys.executable).with_name("dolma"), "tokens", "--documents", source]
argv += ["--destination", folder / "out", "--processes", "1", "--max_size", "1000"]
argv += ["--tokenizer.name_or_path", folder / "tokenizer.json", "--dtype", "uint16"]
argv += ["--tokenizer.eos_token_id", str(end), "--tokenizer.pad_token_id", str(end)]
environment = os.environ | {"TMPDIR": str(folder)}
subprocess.run([*map(str, argv)], check=True, capture_output=True, env=environment)
decoded = ""
for array in (folder / "out").glob("*.npy"):
    ids = np.memmap(array, dtype=np.uint16).tolist()
    decoded += tokenizer.decode(ids, skip_special_tokens=False)
documents = decoded.split("<eos>")[:-1]
print("dolma", version("dolma"))
print("texts:    ", sorted(TEXTS.values()))
print("documents:", sorted(documents))
assert tokenizer.decode(tokenizer.encode(TEXTS["method"]).ids) == TEXTS["method"]
assert sorted(documents) == sorted(text.strip() for text in TEXTS.values())
PY
