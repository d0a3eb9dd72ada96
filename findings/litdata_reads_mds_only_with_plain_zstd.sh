#!/usr/bin/env bash
# Surprise: litData's StreamingDataset reads MDS shards only if they are compressed, and by `zstd` without a level: without
#   compression it fails with a TypeError, and with `zstd:3` with a MemoryError. A column `ndarray:uint16` is a KeyError.
# Likely guess: "litData reads MDS" means MDSWriter's defaults, which compress nothing, and the columns of token ids.
# Why it matters: a published stream of token ids cannot be handed to litData; its rows must be written as litData's chunks.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0' 'litdata==0.2.76'
HOME="$folder" "$folder/env/bin/python" - "$folder" <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from litdata import StreamingDataset
from streaming import MDSWriter

print("litdata", version("litdata"), "mosaicml-streaming", version("mosaicml-streaming"))
TEXT = ({"text": "str"}, {"text": "x"})
TOKENS = ({"tokens": "ndarray:uint16"}, {"tokens": np.arange(3, dtype=np.uint16)})
outcomes = []
for number, ((columns, row), compression) in enumerate(
    [(TEXT, None), (TEXT, "zstd"), (TEXT, "zstd:3"), (TOKENS, "zstd")]
):
    stream = Path(sys.argv[1], str(number))
    with MDSWriter(out=str(stream), columns=columns, compression=compression) as writer:
        writer.write(row)
    try:
        outcome = str(StreamingDataset(str(stream))[0])
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(columns, compression, "->", outcome)
    outcomes.append(outcome.partition(":")[0])
assert outcomes == ["TypeError", "{'text'", "MemoryError", "KeyError"], outcomes
PY
