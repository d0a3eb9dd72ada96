#!/usr/bin/env bash
# Surprise: with dispatch_batches=False, accelerate's `prepare` divides a StreamingDataset among the ranks a second time. Each
#   rank of Streaming reads its own half of the samples, and accelerate gives it every second batch of that: 8 of 20
#   samples are never read. Nothing is logged. (With the default for an IterableDataset, dispatch_batches=True,
#   only rank 0 reads the dataset, and the run waits for ever, since Streaming waits for all ranks of a node. That is not
#   run here.)
# Likely guess: dispatch_batches=False means "each rank reads its own data", as the dataset does.
# Why it matters: this setting is what ends the wait, and then the run looks right, with a part of its data. The larger the
#   number of ranks, the smaller that part. transformers' Trainer prepares its loader too, and has the same setting. Leave
#   such a loader out of `prepare`.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'accelerate==1.15.0' 'mosaicml-streaming==0.13.0' 'torch==2.15.0'
cat >"$folder/ranks.py" <<'PY'
import os
import sys
from importlib.metadata import version

import accelerate
import torch.multiprocessing
from accelerate.utils import DataLoaderConfiguration
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader


def read(rank, folder, is_prepared):
    """Write the samples that this rank gets to a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "1"}
    settings = DataLoaderConfiguration(dispatch_batches=False)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    loader = DataLoader(StreamingDataset(local=f"{folder}/rows", batch_size=2), batch_size=2)
    if is_prepared:
        loader = accelerator.prepare(loader)
    samples = [number for batch in loader for number in batch["n"].tolist()]
    with open(f"{folder}/rank{rank}", "w") as file:
        file.write(repr(samples))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    print("accelerate", accelerate.__version__, "mosaicml-streaming", version("mosaicml-streaming"))
    folder = sys.argv[1]
    with MDSWriter(out=f"{folder}/rows", columns={"n": "int"}) as writer:
        for number in range(20):
            writer.write({"n": number})
    found = {}
    for is_prepared in (False, True):
        os.environ["MASTER_PORT"] = str(29500 + os.getpid() % 1000 + is_prepared)
        torch.multiprocessing.spawn(read, (folder, is_prepared), nprocs=2)
        ranks = [eval(open(f"{folder}/rank{rank}").read()) for rank in (0, 1)]
        found[is_prepared] = {*ranks[0], *ranks[1]}
        assert len(ranks[0] + ranks[1]) == (12 if is_prepared else 20)
        print("prepared" if is_prepared else "not prepared", ranks, "never read:", 20 - len(found[is_prepared]))
    assert found[False] == {*range(20)}
    assert len(found[True]) == 12
PY
"$folder/env/bin/python" "$folder/ranks.py" "$folder" 2>/dev/null
