#!/usr/bin/env bash
# Surprise: `dolma tokens` drops each record whose id is a number, or that has none, and ends with exit code 0. The id is not
#   needed for the tokens. One log line is printed for each; the summary counts the files as done.
# Likely guess: only the text is read (`--fields.text_field_name`), and a record that cannot be read ends the command, or
#   makes it end with an error.
# Why it matters: many corpora count their records (`"id": 17`) or have no ids. Of a mix of such sources one is missing
#   in the arrays, and OLMo trains on the others in other shares than written.
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

print("dolma", version("dolma"))
found = {}
for name, ids in {
    "strings": ["0", "1", "2"],
    "numbers": [0, 1, 2],
    "none": [None] * 3,
    "one number": ["0", 1, "2"],
}.items():
    source = folder / name / "documents" / "part.json"
    source.parent.mkdir(parents=True)
    with source.open("w") as file:
        for number, record in enumerate(ids):
            fields = {} if record is None else {"id": record}
            file.write(json.dumps(fields | {"text": f"record {number}"}) + "\n")
    argv = [Path(sys.executable).with_name("dolma"), "tokens", "--documents", source]
    argv += ["--destination", folder / name / "out", "--processes", "1", "--max_size", "1000"]
    argv += ["--tokenizer.name_or_path", folder / "tokenizer.json", "--dtype", "uint16"]
    argv += ["--tokenizer.eos_token_id", str(end), "--tokenizer.pad_token_id", str(end)]
    environment = os.environ | {"TMPDIR": str(folder / name)}
    run = subprocess.run([*map(str, argv)], capture_output=True, text=True, env=environment)
    texts = []
    for array in sorted((folder / name / "out").glob("*.npy")):
        text = tokenizer.decode(np.memmap(array, dtype=np.uint16).tolist(), skip_special_tokens=False)
        texts += [part for part in text.split("<eos>") if "record" in part]
    found[name] = (run.returncode, sorted(texts))
    print(f"ids {name}: exit code {run.returncode}, documents in the arrays: {sorted(texts)}")
every = ["record 0", "record 1", "record 2"]
assert found == {
    "strings": (0, every),
    "numbers": (0, []),
    "none": (0, []),
    "one number": (0, ["record 0", "record 2"]),
}
PY
