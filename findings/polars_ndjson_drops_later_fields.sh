#!/usr/bin/env bash
# Surprise: polars' read_ndjson and scan_ndjson drop every field that no record has among the first 100 (infer_schema_length),
#   at any depth: of chats whose first tool call is in record 101, all `tool_calls` are gone. No error and no warning.
# Likely guess: the sample decides about types, and an unknown field is an error, as a value of another type is; or it
#   becomes a column with nulls, as in pandas, DuckDB and datasets.
# Why it matters: a file of chats that is cleaned with polars and written again trains a model without calls of tools.
#   infer_schema_length=None reads all records first.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet 'polars==2.1.0'
"$folder/env/bin/python" -W error - "$folder" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import polars as pl

print("polars", version("polars"))
answer = {"role": "assistant", "content": "It rains."}
call = {"role": "assistant", "content": "", "tool_calls": [{"name": "weather"}]}
plain = {"messages": [answer]}
with_call = {"messages": [call, answer], "source": "agents"}
path = Path(sys.argv[1], "chats.jsonl")


def read_last(count_before, read):
    """Return the last record of a file: the one with a call, after plain ones."""
    records = [plain] * count_before + [with_call]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read(path).to_dicts()[-1]


readers = {
    "read_ndjson": pl.read_ndjson,
    "scan_ndjson": lambda file: pl.scan_ndjson(file).collect(),
    "infer_schema_length=None": lambda file: pl.read_ndjson(file, infer_schema_length=None),
}
for name, read in readers.items():
    kept = []
    for count in (99, 100):
        last = read_last(count, read)
        kept.append("source" in last and bool(last["messages"][0].get("tool_calls")))
        print(f"{name}, {count} records before: {json.dumps(last)}")
    assert kept == [True, name == "infer_schema_length=None"], (name, kept)
PY
