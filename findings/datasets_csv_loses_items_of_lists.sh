#!/usr/bin/env bash
# Surprise: `Dataset.to_csv` of datasets 5.2 writes a list as numpy prints an array. Of 1,200 numbers it writes six and
#   "...", without a warning. Items have no commas, so Python's `literal_eval` reads ['a' 'b'] as ['ab'].
# Likely guess: a csv cell has the list as JSON or as Python's `str` prints it, so that `json.loads` or `literal_eval`
#   gives it back.
# Why it matters: input_ids, messages and tools that went through a csv file are lost or changed, and `load_dataset`
#   reads them back as text without an error. A reader that uses `literal_eval` joins strings without an error too.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'datasets==5.2.0' 'pandas==3.1.1'
export HF_HOME="$folder/home"
"$folder/env/bin/python" - "$folder/a.csv" 2>/dev/null <<'PY'
import csv
import sys
from ast import literal_eval

from datasets import Dataset, load_dataset

path = sys.argv[1]
messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
record = {"input_ids": list(range(1200)), "stop": ["a", "b"], "messages": messages}
Dataset.from_list([record]).to_csv(path)
with open(path, newline="") as file:
    (cells,) = csv.DictReader(file)
for name, cell in cells.items():
    print(f"{name}: {cell!r}")
assert len(cells["input_ids"].split()) < 10 and "..." in cells["input_ids"]
assert literal_eval(cells["stop"]) == ["ab"]
try:
    literal_eval(cells["messages"])
except SyntaxError:
    print("messages: literal_eval refuses them, since the objects have no comma between them")
else:
    raise AssertionError
read = load_dataset("csv", data_files=path, split="train")[0]
assert read == cells, "datasets reads the same strings back"
PY
