#!/usr/bin/env bash
# Surprise: with `num_canonical_nodes` above the number of samples, an epoch of StreamingDataset gives more samples than
#   len() says: 20 samples under 32 canonical nodes come as 32, twelve of them a second time. A warning says that samples
#   are repeated, and len() stays 20. The default shuffle, py1e, raises instead.
# Likely guess: the number only decides how the order is laid out, so every sample comes once, and len() counts them.
# Why it matters: a small evaluation that inherits training's num_canonical_nodes: 64 weighs some samples twice, and a
#   step count worked out from len() is too small.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0'
"$folder/env/bin/python" - "$folder" <<'PY'
import sys
from importlib.metadata import version

from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

print("mosaicml-streaming", version("mosaicml-streaming"))
local = f"{sys.argv[1]}/rows"
with MDSWriter(out=local, columns={"n": "int"}) as writer:
    for number in range(20):
        writer.write({"n": number})


def epoch(**settings):
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=local, batch_size=1, num_canonical_nodes=32, **settings)
    return len(dataset), [sample["n"] for sample in dataset]


for settings in ({"shuffle": False}, {"shuffle": True, "shuffle_algo": "py1s"}):
    length, rows = epoch(**settings)
    print(settings, "len() says", length, "and", len(rows), "samples come,", len(set(rows)), "of them different")
    assert (length, len(rows), len(set(rows))) == (20, 32, 20)
try:
    epoch(shuffle=True)
except ValueError as error:
    print("py1e raises:", str(error)[:80])
else:
    sys.exit("py1e raises no longer")
PY
