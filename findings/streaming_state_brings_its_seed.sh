#!/usr/bin/env bash
# Surprise: a StreamingDataset that loads a state takes the shuffle_seed from it, not from its own constructor, and at
#   the end of an epoch Composer saves that epoch again (sample 0 of it), not the next. A second run with another seed,
#   that begins with the checkpoint of a finished run, draws the very samples that the first run trained.
# Likely guess: shuffle_seed of the new YAML decides, and a checkpoint of the end of an epoch leads on to the next one.
# Why it matters: phases of one run (main, anneal), each with its own YAML and mix. An anneal that draws a part of a
#   stream draws the part that the main phase drew, unless the checkpoint's dataset_state is ignored.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0'
"$folder/env/bin/python" - "$folder" <<'PY'
import sys
from importlib.metadata import version

from streaming import MDSWriter, Stream, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

print("mosaicml-streaming", version("mosaicml-streaming"))
local = f"{sys.argv[1]}/rows"
with MDSWriter(out=local, columns={"n": "int"}) as writer:
    for number in range(100):
        writer.write({"n": number})


def train(seed, state=None):
    """Return the samples of one epoch of 30 of the 100 rows, and the state after it."""
    clean_stale_shared_memory()
    dataset = StreamingDataset(streams=[Stream(local=local, choose=30)], batch_size=1, shuffle=True, shuffle_seed=seed)
    if state:
        dataset.load_state_dict(state)
    rows = {sample["n"] for sample in dataset}
    # Composer calls this after the epoch has ended: 0 samples of the next epoch were trained.
    return rows, dataset.state_dict(0, True)


first, state = train(seed=1)
fresh, _ = train(seed=2)
resumed, _ = train(seed=2, state=state)
print("the state after the epoch:", state)
print("seed 2, fresh:", len(first & fresh), "of 30 samples were drawn before; with the state:", len(first & resumed))
assert state["epoch"] == 0 and state["shuffle_seed"] == 1
assert len(first & fresh) < 20
assert resumed == first
PY
