#!/usr/bin/env bash
# Surprise: `Dataset.to_json` of datasets 5.2 writes numbers with at most ten digits after the point, as pandas does: 1e-11 is
#   0.0, and a weight of 1/3 is 0.3333333333. In a list or an object too. Nothing is logged.
# Likely guess: JSON Lines keep a float: `json.dumps` writes as many digits as give the same number back.
# Why it matters: probabilities and scores of rare events are small numbers, and a zero is another
#   statement. Records that went through to_json are no longer equal to those that did not, so they are not found as
#   duplicates of them. `to_parquet` keeps all numbers.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'datasets==5.2.0' 'pandas==3.1.1'
export HF_HOME="$folder/home"
"$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import pandas
from datasets import Dataset, load_dataset

print(*(f"{name} {version(name)}" for name in ("datasets", "pandas")))
folder = Path(sys.argv[1])
record = {"rare": 1e-11, "weight": 1 / 3, "message": {"probabilities": [2.5e-12]}}
assert json.loads(json.dumps(record)) == record

Dataset.from_list([record]).to_json(folder / "datasets.jsonl")
pandas.DataFrame([record]).to_json(folder / "pandas.jsonl", orient="records", lines=True)
for name in ("datasets.jsonl", "pandas.jsonl"):
    written = json.loads((folder / name).read_text())
    print(f"{name}: {written}")
    assert written == {"rare": 0, "weight": 0.3333333333, "message": {"probabilities": [0]}}

Dataset.from_list([record]).to_parquet(folder / "kept.parquet")
(kept,) = load_dataset("parquet", data_files=str(folder / "kept.parquet"), split="train")
print("parquet:", kept)
assert kept == record
PY
