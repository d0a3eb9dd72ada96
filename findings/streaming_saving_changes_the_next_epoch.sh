#!/usr/bin/env bash
# Surprise: after a resume on another number of nodes, saving a state changes the order of a StreamingDataset's next epochs on
#   the node that saves it. Streaming takes the canonical nodes from the loaded state in each process that reads that epoch or
#   calls state_dict(). DataLoader workers that are not persistent end with the epoch; the next ones have what their own
#   rank's process has. If rank 0 alone saves, as documented, the nodes read different orders: of 90 samples, some come
#   twice and as many never. If no rank saves, or all do, each comes once. No line is logged that the other runs lack.
# Likely guess: state_dict() only reads, and a resume on other nodes is exact for the whole run ("elastic determinism").
# Why it matters: runs of several epochs on clusters whose size changes. The epoch of the checkpoint is exact, so that a
#   comparison of the first batches after a resume shows nothing. num_canonical_nodes in the constructor, the same in
#   every run, or persistent workers avoid it.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0' 'torch==2.15.0'
cat >"$folder/nodes.py" <<'PY'
import itertools
import os
import sys
from importlib.metadata import version

import torch.distributed
import torch.multiprocessing
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.shared import prefix

# What a run on one node saves after 20 of the 90 samples.
STATE = {"epoch": 0, "sample_in_epoch": 20, "num_canonical_nodes": 1, "shuffle_seed": 9176, "initial_physical_nodes": 1}


def train(node, folder, saving):
    """Resume on this node, one of two with one rank each, and write the samples of both epochs to files."""
    os.environ |= {"RANK": str(node), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    # Here both nodes are one machine: each counts its shared memory from a number of its own.
    prefix._each_prefix_int = lambda: itertools.count(1000 * os.getppid() + 100 * node)
    torch.distributed.init_process_group("gloo")
    dataset = StreamingDataset(remote=f"{folder}/rows", local=f"{folder}/{saving}{node}", batch_size=2, shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=2, num_workers=1)
    loader.load_state_dict(STATE)
    for epoch in range(2):
        samples = []
        for batch in loader:
            samples += batch["n"].tolist()
            if node in saving and epoch == 0 and len(samples) == 10:
                loader.state_dict()
        with open(f"{folder}/node{node}-epoch{epoch}", "w") as file:
            file.write(repr(samples))
    torch.distributed.barrier()


if __name__ == "__main__":
    print("mosaicml-streaming", version("mosaicml-streaming"), "2 nodes, resumed from a state of 1 node, 90 samples")
    folder = sys.argv[1]
    with MDSWriter(out=f"{folder}/rows", columns={"n": "int"}, size_limit=200) as writer:
        for number in range(90):
            writer.write({"n": number})
    distinct = {}
    for number, saving in enumerate(((), (0,), (0, 1))):
        os.environ["MASTER_PORT"] = str(29500 + os.getpid() % 1000 + number)
        torch.multiprocessing.spawn(train, (folder, saving), nprocs=2)
        for epoch in range(2):
            samples = sum((eval(open(f"{folder}/node{node}-epoch{epoch}").read()) for node in range(2)), [])
            distinct[saving, epoch] = len(set(samples))
            print(f"ranks that save: {saving}, epoch {epoch}: {len(samples)} samples read, {len(set(samples))} distinct")
    assert [distinct[saving, 0] for saving in ((), (0,), (0, 1))] == [70, 70, 70]
    assert distinct[(), 1] == distinct[(0, 1), 1] == 90
    assert distinct[(0,), 1] < 80
PY
"$folder/env/bin/python" "$folder/nodes.py" "$folder" 2>/dev/null
