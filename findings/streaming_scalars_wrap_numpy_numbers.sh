#!/usr/bin/env bash
# Surprise: MDSWriter's column `uint16` stores numpy's 70,000 as 4,464, and `uint8` its 300 as 44, without a warning. The
#   same number as a Python int raises OverflowError. A fraction is cut (3.7 is 3), the text "5" is 5, and `float16` makes
#   70,000 infinite. The columns `int` and `ndarray:uint16` refuse all of these.
# Likely guess: a value that does not fit into its column is refused, wherever it comes from, as `int` refuses a float.
# Why it matters: numbers mostly come from numpy, pandas or Arrow: counts of tokens, ids, labels, positions. A test with
#   Python's ints shows an error, so the type looks guarded, and shards of a long conversion have wrong numbers.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0' 'numpy==2.1.3'
HOME="$folder" "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import math
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from streaming import LocalDataset, MDSWriter

print(*(f"{name} {version(name)}" for name in ("mosaicml-streaming", "numpy")))
folder = Path(sys.argv[1])
streams = iter(range(100))


def store(column: str, value: object) -> object:
    """Return what a column gives back, or the name of the error with which it refuses the value."""
    stream = str(folder / f"stream-{next(streams)}")
    try:
        with MDSWriter(out=stream, columns={"x": column}) as writer:
            writer.write({"x": value})
    except (AttributeError, OverflowError, ValueError) as error:
        stored = type(error).__name__
    else:
        stored = LocalDataset(stream)[0]["x"]
    print(f"{column}: {value!r} -> {stored}")
    return stored


assert store("uint16", 70_000) == "OverflowError"
assert store("uint16", np.int64(70_000)) == 70_000 - 2**16
assert store("uint8", np.int64(300)) == 300 - 2**8
assert store("uint8", 3.7) == 3
assert store("uint8", "5") == 5
assert store("float16", 70_000.0) == math.inf
assert store("int", 3.7) == "AttributeError"
assert store("ndarray:uint16", np.array([70_000])) == "ValueError"
PY
