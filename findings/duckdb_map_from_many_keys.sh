#!/usr/bin/env bash
# Surprise: DuckDB's read_json makes a MAP of an object column once its rows have many different keys, and a STRUCT
#   before, so two files of the same tool have two types; pyarrow gives a map as a list of pairs, not as an object.
# Likely guess: an object is a STRUCT however many keys there are, and to_pylist gives a dict.
# Why it matters: the `properties` of tool schemas print as `[["city", {...}]]` in a prompt once a file has enough tools.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet 'duckdb==2.0.1' 'pyarrow==26.0.1'
"$folder/env/bin/python" - "$folder" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import duckdb
import pyarrow.parquet as pq

print(*(f"{name} {version(name)}" for name in ("duckdb", "pyarrow")))
folder = Path(sys.argv[1])
types = {}
for keys in (2, 30):
    rows = [{"properties": {f"key{number}": {"type": "string"}}} for number in range(keys)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    duckdb.sql(f"copy (select * from read_json('{folder}/a.jsonl')) to '{folder}/a.parquet'")
    table = pq.read_table(folder / "a.parquet")
    types[keys] = str(table.schema.field("properties").type)
    print(keys, "keys:", types[keys][:60], table["properties"][0].as_py())
assert types[2].startswith("struct<") and types[30].startswith("map<")
assert table["properties"][0].as_py() == [("key0", {"type": "string"})]
PY
