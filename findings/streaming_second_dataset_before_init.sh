#!/usr/bin/env bash
# Surprise: two StreamingDatasets that ranks open one after the other, before init_process_group, may fail or hang. For
#   each of them Streaming opens a process group and closes it again, under torch's one default name. If a rank closes
#   its first group half a second late, the other rank's second group finds the address of the closing one: it fails
#   with "Connection reset by peer", and the late rank waits for it, half an hour by default.
# Likely guess: a dataset needs no process group (Streaming's pages name none), or opening two is as safe as one.
# Why it matters: a training loop of one's own that builds the data of training and evaluation first. It works on most
#   days, and not when one rank reads its index late. Calling init_process_group before the first dataset is safe.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0' 'torch==2.15.0'
cat > "$folder/rank.py" <<'PY'
import sys
import time

import torch.distributed as dist
from streaming import StreamingDataset

folder, rank, how = sys.argv[1:]
close = dist.destroy_process_group


def close_late():
    if rank == "0":
        time.sleep(0.5)
    close()


dist.destroy_process_group = close_late
if how == "with init":
    dist.init_process_group("gloo")
for name in ("train", "eval"):
    StreamingDataset(local=f"{folder}/{name}", batch_size=1)
print("both datasets are open")
PY
"$folder/env/bin/python" - "$folder" <<'PY'
import os
import socket
import subprocess
import sys
from importlib.metadata import version

from streaming import MDSWriter

print("mosaicml-streaming", version("mosaicml-streaming"), "torch", version("torch"))
folder = sys.argv[1]
for name in ("train", "eval"):
    with MDSWriter(out=f"{folder}/{name}", columns={"n": "int"}) as writer:
        for number in range(8):
            writer.write({"n": number})


def run(how):
    """Run two ranks. Return the last line of each; None for one that still waits after a minute."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in "01":
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, f"{folder}/rank.py", folder, rank, how]
        out = open(f"{folder}/{how}-{rank}", "w+")
        ranks.append((subprocess.Popen(command, env=os.environ | place, stdout=out, stderr=out), out))
    ends = []
    for process, out in reversed(ranks):
        try:
            process.wait(60)
            out.seek(0)
            ends.insert(0, out.read().strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ends.insert(0, None)
    return ends


print("with init_process_group first:", *run("with init"), sep="\n  ")
late, early = run("without init")
print("without: rank 1:", early, "\n  rank 0:", late or "still waits after a minute")
assert "Connection reset by peer" in early
assert late is None
PY
