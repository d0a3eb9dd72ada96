#!/usr/bin/env bash
# Surprise: one number among the texts of a JSON Lines field makes `datasets` 5 write the WHOLE column to parquet as
#   JSON source text, quotes and escapes included, of the Arrow type arrow.json; pyarrow's to_pylist gives that source text.
# Likely guess: the number becomes a text, or loading fails, as before datasets 4.7; other rows keep their plain texts.
# Why it matters: a reader that takes the column for texts trains `"Ann \"A\"\nLee"` with its quotes, in every row.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet 'datasets==5.2.0' 'pyarrow==26.0.1'
"$folder/env/bin/python" - "$folder" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import pyarrow.parquet as pq
from datasets import load_dataset

print(*(f"{name} {version(name)}" for name in ("datasets", "pyarrow")))
folder = Path(sys.argv[1])
answers = ['Ann "A"\nLee', 5, *(f"text {number}" for number in range(500))]
lines = [json.dumps({"response": answer}) for answer in answers]
(folder / "a.jsonl").write_text("\n".join(lines))
data = load_dataset("json", data_files=str(folder / "a.jsonl"), split="train", cache_dir=str(folder))
data.to_parquet(folder / "a.parquet")
table = pq.read_table(folder / "a.parquet")
found = table["response"].to_pylist()
print(table.schema.field("response").type, found[:3])
assert str(table.schema.field("response").type) == "extension<arrow.json>"
assert found == [json.dumps(answer) for answer in answers]
PY
