#!/usr/bin/env bash
# Surprise: one column of polars' Int128 closes a whole parquet file to pyarrow: neither the other columns nor the footer
#   (read_metadata) can be read.
# Likely guess: pyarrow reads the other columns, and fails at most when that column is asked for.
# Why it matters: readers report such a file as damaged, and `copy it again` does not help; large ids need more
#   than Int64.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet 'polars==2.1.0' 'pyarrow==26.0.1'
"$folder/env/bin/python" - "$folder" <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

print(*(f"{name} {version(name)}" for name in ("polars", "pyarrow")))
path = Path(sys.argv[1], "a.parquet")
schema = {"text": pl.String, "wide": pl.Int128}
pl.DataFrame({"text": ["a"], "wide": [2**100]}, schema=schema).write_parquet(path)
assert pl.read_parquet(path)["text"].to_list() == ["a"]
for read in (pq.read_metadata, lambda at: pq.read_table(at, columns=["text"])):
    try:
        read(path)
    except pa.ArrowNotImplementedError as error:
        print(error)
    else:
        sys.exit("pyarrow reads the file")
PY
