#!/usr/bin/env bash
# Surprise: transformers' Trainer resumes an IterableDataset without a length at its start, if the checkpoint is of its second
#   pass or a later one. Passes of 5 batches, checkpoint after batch 7: the run goes on with batch 1 of the stream, not with
#   batch 3. Trainer skips all 7 batches in one pass, finds none left, and begins the next pass. Nothing is logged. With `__len__`
#   it is right.
# Likely guess: without `ignore_data_skip` a resumed run gets the batches that the run without a break gets; the text of that
#   setting says so: "skip the epochs and batches to get the data loading at the same stage as in the previous training".
# Why it matters: streams with `max_steps` are the usual form of large data. A run that is stopped often trains the
#   beginning of its data more often than the end, and the count of steps and epochs looks right. A checkpoint in the first
#   pass resumes exactly, so a short trial does not show it.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'transformers==5.24.0' 'accelerate==1.15.0' 'torch==2.15.0' \
    'numpy==2.1.3'
cat >"$folder/resume.py" <<'PY'
import sys

import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

SEEN = []


class Stream(IterableDataset):
    """Yield the numbers 0 to 4: one pass of five batches of one sample."""

    def __iter__(self):
        return ({"x": torch.tensor([float(number)])} for number in range(5))


class StreamWithLength(Stream):
    """Yield the same, and say how many there are."""

    def __len__(self):
        return 5


class Model(torch.nn.Module):
    """Note the samples that come."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        SEEN.append(int(x))
        return {"loss": (self.weight * x).mean()}


def train(data, folder, checkpoint=None):
    """Return the samples of a run of twelve steps, whole or from the checkpoint on."""
    SEEN.clear()
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
    settings |= {"max_steps": 12, "per_device_train_batch_size": 1, "save_steps": 1, "logging_steps": 100}
    Trainer(Model(), TrainingArguments(folder, **settings), train_dataset=data).train(resume_from_checkpoint=checkpoint)
    return list(SEEN)


print("transformers", transformers.__version__)
resumed = {}
for data in (Stream(), StreamWithLength()):
    name = type(data).__name__
    folder = f"{sys.argv[1]}/{name}"
    whole = train(data, folder)
    assert whole == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    for step in (3, 7):
        resumed[name, step] = train(data, folder, f"{folder}/checkpoint-{step}")
        print(f"{name}, after {step}: expected {whole[step:]}, resumed {resumed[name, step]}")
assert resumed["Stream", 3] == whole[3:]
assert resumed["Stream", 7] == [0, 1, 2, 3, 4] != whole[7:]
assert resumed["StreamWithLength", 3] == whole[3:]
assert resumed["StreamWithLength", 7] == whole[7:]
PY
"$folder/env/bin/python" "$folder/resume.py" "$folder" 2>/dev/null
