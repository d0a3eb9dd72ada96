#!/usr/bin/env bash
# Surprise: if the first sample is larger than `size_limit`, MDSWriter begins the stream with a shard of 0 samples.
# Likely guess: a shard always has a sample; one that is too large gets a shard of its own.
# Why it matters: a tool that looks at the first shard of a stream to learn what its rows are, or divides by its number of
#   samples, sees an empty stream. StreamingDataset itself reads on.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0'
"$folder/env/bin/python" - "$folder" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from streaming import MDSWriter, StreamingDataset

print("mosaicml-streaming", version("mosaicml-streaming"))
local = Path(sys.argv[1], "rows")
with MDSWriter(out=str(local), columns={"text": "str"}, size_limit=1000) as writer:
    for _ in range(3):
        writer.write({"text": "x" * 1500})
shards = json.loads((local / "index.json").read_text())["shards"]
samples = [shard["samples"] for shard in shards]
rows = sum(1 for _ in StreamingDataset(local=str(local), batch_size=1))
print("samples of the shards:", samples, "| rows that StreamingDataset reads:", rows)
assert samples == [0, 1, 1, 1], samples
assert rows == 3
PY
