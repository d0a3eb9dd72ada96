#!/usr/bin/env bash
# Surprise: DuckDB writes whole numbers of its type HUGEINT to parquet as floats of 53 bits. Both of these are HUGEINT: a
#   column of JSON Lines in which one number is above 2^63, and the sum() of a column of integers. Of three ids that
#   differ in their last digits one is left. Nothing warns, and DuckDB itself still shows the exact numbers.
# Likely guess: a whole number comes back as it was, or COPY refuses a type that parquet does not have. It has a decimal of
#   38 digits, and an unsigned integer of 64 bits, which these ids are.
# Why it matters: hashes of 64 bits (xxhash, SimHash, MinHash) are the ids of documents in many corpora, and half of them are
#   above 2^63. After a pass through DuckDB ids of different documents are equal, a join or a list of ids to remove finds
#   others or none, and counts of tokens are floats. `id::UBIGINT` and `sum(n)::BIGINT` keep them.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet 'duckdb==2.0.1' 'pyarrow==26.0.1'
"$folder/env/bin/python" - "$folder" <<'PY'
import json
import sys
from pathlib import Path

import duckdb
import pyarrow.parquet as pq

source, target = (str(Path(sys.argv[1]) / name) for name in ("in.jsonl", "out.parquet"))
ids = [16045690984833335023, 16045690984833335024, 16045690984833335025]
lines = [json.dumps({"id": number, "tokens": 1000}) for number in ids]
Path(source).write_text("\n".join(lines))


def written(query):
    """Return the type and the values of the first column of the parquet file of `query`."""
    duckdb.sql(f"COPY ({query}) TO '{target}' (FORMAT parquet)")
    table = pq.read_table(target)
    return str(table.schema.types[0]), table.column(0).to_pylist()


print("duckdb", duckdb.__version__)
seen = [row[0] for row in duckdb.connect().execute(f"SELECT id FROM '{source}'").fetchall()]
read = f"read_json('{source}')"
found = {
    "id": written(f"SELECT id FROM {read}"),
    "id::UBIGINT": written(f"SELECT id::UBIGINT FROM {read}"),
    "sum(tokens)": written(f"SELECT sum(tokens) FROM {read}"),
    "sum(tokens)::BIGINT": written(f"SELECT sum(tokens)::BIGINT FROM {read}"),
}
print("in DuckDB", seen)
for query, (kind, values) in found.items():
    print(f"{query} in parquet: {kind}", values)
assert seen == ids
assert found["id"][0] == "double" and len(set(found["id"][1])) == 1
assert found["id::UBIGINT"] == ("uint64", ids)
assert found["sum(tokens)"] == ("double", [3000.0])
assert found["sum(tokens)::BIGINT"] == ("int64", [3000])
PY
