#!/usr/bin/env bash
# Surprise: MDSWriter's column `ndarray` stores an array of big-endian numbers (numpy's ">u2", ">i4", ">f4") under the name of
#   the native type and with the bytes as they are: the ids 1, 2, 300 come back as 256, 512, 11265. Nothing warns. The column
#   `ndarray:uint16` refuses the same array, with the words "expected uint16, got uint16".
# Likely guess: an array that comes back equals the one that was written, whatever its byte order, as with np.save and
#   safetensors. The longer name with a type is only a smaller header.
# Why it matters: np.frombuffer and np.memmap with ">u2" are the way to read ids that Java, Go's and other network formats,
#   FITS or IDX files have. Swapped ids of 16 bits are valid tokens of a large vocabulary, so training starts. Call
#   `ids.astype("uint16")` first.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0' 'numpy==2.1.3'
"$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version

import numpy as np
from streaming import MDSWriter, StreamingDataset


def read_back(name, column, array):
    """Return the array that a stream of this column gives for `array`."""
    out = f"{sys.argv[1]}/{name}"
    with MDSWriter(out=out, columns={"ids": column}) as writer:
        writer.write({"ids": array})
    return StreamingDataset(local=out, batch_size=1, shuffle=False)[0]["ids"]


print("mosaicml-streaming", version("mosaicml-streaming"), "numpy", np.__version__)
ids = np.array([1, 2, 300], dtype=">u2")
swapped = read_back("swapped", "ndarray", ids)
native = read_back("native", "ndarray", ids.astype("uint16"))
print("written", ids.dtype.str, ids.tolist(), "read", swapped.dtype.str, swapped.tolist())
print("written as native uint16, read", native.dtype.str, native.tolist())
try:
    read_back("typed", "ndarray:uint16", ids)
    error = None
except ValueError as raised:
    error = str(raised)
print("ndarray:uint16:", error)
assert swapped.tolist() == [256, 512, 11265]
assert native.tolist() == [1, 2, 300]
assert "expected uint16, got uint16" in error
PY
