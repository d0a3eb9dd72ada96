#!/usr/bin/env bash
# Surprise: OLMo-core's NumpyFSLDataset cuts each file of token ids into rows for itself. The ids after the last full row of a
#   file are never trained, and a file that is shorter than a row gives nothing, without a warning.
# Likely guess: "the token IDs from all arrays are concatenated together and then chunked into contiguous blocks", as the
#   first sentence of its docstring says, so that less than one row is lost in all. (A later one says that the
#   remainder of "an array" is ignored.)
# Why it matters: whoever writes a file for each source, or for each of many workers, loses half a row of each on average.
#   With rows of 32,768 tokens, small sources (a hand-made set, a rare language) vanish from the mix.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet uv
"$folder/tools/bin/uv" venv --quiet --python 3.11 "$folder/env"
"$folder/tools/bin/uv" pip install --quiet --python "$folder/env" \
    'ai2-olmo-core==3.0.0' 'torch==2.13.0' 'numpy==2.1.3'
HOME="$folder" "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from olmo_core.data import NumpyFSLDataset

print(*(f"{name} {version(name)}" for name in ("ai2-olmo-core", "numpy")))
folder = Path(sys.argv[1])
ROW = 1024


def trained(sizes: list[int]) -> int:
    """Write a file for each size, with ids that count on. Return how many of them rows have."""
    paths = [folder / f"{number}-{size}.npy" for number, size in enumerate(sizes)]
    first = 1
    for path, size in zip(paths, sizes, strict=True):
        np.arange(first, first + size, dtype=np.uint16).tofile(path)
        first += size
    dataset = NumpyFSLDataset(
        *paths, sequence_length=ROW, pad_token_id=0, eos_token_id=0, vocab_size=2**16, dtype=np.uint16
    )
    dataset.prepare()
    ids = [number for row in range(len(dataset)) for number in dataset[row]["input_ids"].tolist()]
    assert len(set(ids)) == len(ids)
    print(f"files of {sizes} ids: {len(ids)} of {sum(sizes)} in rows of {ROW}")
    return len(ids)


assert trained([8192]) == 8192
assert trained([2000, 2000, 2000, 2192]) == (1 + 1 + 1 + 2) * ROW
assert trained([1000] * 8 + [192]) == 0
PY
