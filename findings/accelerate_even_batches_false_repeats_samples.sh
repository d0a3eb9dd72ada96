#!/usr/bin/env bash
# Surprise: accelerate's even_batches=False does nothing for an IterableDataset that each rank reads (dispatch_batches=False).
#   Ten samples in batches of 4 on two ranks come as sixteen: the last batches are filled with the first six samples
#   again. Of a map-style dataset the same setting gives every sample once.
# Likely guess: `even_batches=False` means that no sample is repeated, for every kind of dataset: "If set to True, ... samples
#   at the start of the dataset will be duplicated".
# Why it matters: streamed evaluations. Their mean loss weighs the first samples twice, and perplexities on another number
#   of ranks differ. With a small set and many ranks most of what is counted is a repeat.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'accelerate==1.15.0' 'torch==2.15.0' 'numpy==2.1.3'
cat >"$folder/ranks.py" <<'PY'
import os
import sys

import accelerate
import torch.multiprocessing
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset

SAMPLES = list(range(10))


class Stream(IterableDataset):
    """Yield the samples in order."""

    def __iter__(self):
        return iter(SAMPLES)


def read(rank, data, even, folder):
    """Write the batches that this rank gets of `data` to a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "1"}
    settings = DataLoaderConfiguration(dispatch_batches=False, even_batches=even)
    prepare = accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare
    batches = [batch.tolist() for batch in prepare(DataLoader(data, batch_size=4))]
    with open(f"{folder}/rank{rank}", "w") as file:
        file.write(repr(batches))


if __name__ == "__main__":
    print("accelerate", accelerate.__version__, "2 ranks, 10 samples, batches of 4")
    found = {}
    for name, data in (("iterable", Stream()), ("map-style", SAMPLES)):
        for even in (True, False):
            os.environ["MASTER_PORT"] = str(29500 + os.getpid() % 1000 + len(found))
            torch.multiprocessing.spawn(read, (data, even, sys.argv[1]), nprocs=2)
            ranks = [eval(open(f"{sys.argv[1]}/rank{rank}").read()) for rank in (0, 1)]
            found[name, even] = sorted(sum(ranks[0] + ranks[1], []))
            print(f"{name} even_batches={even}", ranks)
    assert found["map-style", False] == SAMPLES
    repeated = sorted(SAMPLES + SAMPLES[:6])
    assert found["iterable", True] == found["iterable", False] == repeated
PY
"$folder/env/bin/python" "$folder/ranks.py" "$folder" 2>/dev/null
