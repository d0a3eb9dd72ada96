#!/usr/bin/env bash
# Surprise: runs that open a StreamingDataset at the same moment on one machine may fail with FileExistsError, although
#   each has streams and folders of its own. Streaming gives every dataset of a machine a number, takes the first one
#   without files in /dev/shm, and makes the file later: two runs that look at the same time find the same number.
# Likely guess: runs with nothing in common cannot disturb each other, as with any other reader of files.
# Why it matters: sweeps, and several evaluations of one checkpoint, which a script starts in one line.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0'
mkdir "$folder/tmp"
TMPDIR="$folder/tmp" "$folder/env/bin/python" -W ignore - "$folder" <<'PY'
import multiprocessing
import sys
import time
from collections import Counter
from importlib.metadata import version

from streaming import MDSWriter, StreamingDataset

RUNS = 4
ROUNDS = 50
folder = sys.argv[1]
print("mosaicml-streaming", version("mosaicml-streaming"))


def open_dataset(local, moment, ends):
    time.sleep(max(0, moment - time.time()))
    try:
        StreamingDataset(local=local, batch_size=1)
        ends.put("open")
    except Exception as error:
        ends.put(type(error).__name__)


locals = [f"{folder}/{run}" for run in range(RUNS)]
for local in locals:
    with MDSWriter(out=local, columns={"n": "int"}) as writer:
        writer.write({"n": 0})
fork = multiprocessing.get_context("fork")
ends = fork.SimpleQueue()
for _ in range(ROUNDS):
    moment = time.time() + 0.1
    runs = [fork.Process(target=open_dataset, args=(local, moment, ends)) for local in locals]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
counts = Counter(ends.get() for _ in range(ROUNDS * RUNS))
print(f"{ROUNDS} times {RUNS} runs at the same moment:", dict(counts))
assert counts["FileExistsError"]
PY
