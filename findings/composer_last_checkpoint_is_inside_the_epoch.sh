#!/usr/bin/env bash
# Surprise: the last checkpoint of a Composer run of one epoch says that the epoch has not ended, if save_interval counts
#   batches and divides their number: `ep0-ba10`, and no `ep1-ba10` follows. A run that begins with it, with more data
#   and `max_duration="2ep"`, passes over its first 10 batches, trains the rest of them as epoch 0, and then an epoch.
# Likely guess: Composer always saves at the end of training, so the latest checkpoint of a finished run is at the end of
#   its epoch, as it is with every other interval, and the next run of "2ep" trains one epoch.
# Why it matters: phases of one run (warm-up, main), each with its own data and `load_path` of the phase before. With
#   phases of 10 and 20 batches the second trains 30. Use an interval of epochs, or one that divides no phase's end.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" \
    'mosaicml==0.32.1' 'torch==2.7.0' 'transformers==4.51.3' 'setuptools<81'
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - 2>/dev/null <<'PY'
import os
from importlib.metadata import version

import torch
from composer import Trainer
from composer.models import ComposerClassifier
from torch.utils.data import DataLoader

print(*(f"{name} {version(name)}" for name in ("mosaicml", "torch")))


def train(batches, epochs, save_folder, save_interval, load_path=None):
    """Train up to this number of epochs. Return how many batches were trained here."""
    rows = [(torch.full((2,), float(n)), n % 2) for n in range(4 * batches)]
    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration=f"{epochs}ep",
        save_folder=save_folder,
        save_interval=save_interval,
        load_path=load_path,
        load_ignore_keys=["state/dataset_state"],
        device="cpu",
        progress_bar=False,
    )
    before = trainer.state.timestamp.batch.value
    trainer.fit()
    return trainer.state.timestamp.batch.value - before


trained = {}
for interval in ("3ba", "2ba", "1ep"):
    train(10, 1, f"first-{interval}", interval)
    latest = os.path.realpath(f"first-{interval}/latest-rank0.pt")
    trained[interval] = train(20, 2, f"second-{interval}", "1ep", latest)
    print(f"save_interval {interval}: the last checkpoint is {os.path.basename(latest)}, and the"
          f" next run, of 20 batches, trains {trained[interval]}")
assert trained == {"3ba": 20, "2ba": 30, "1ep": 20}
print("as found: a checkpoint of the last batch is inside the epoch")
PY
