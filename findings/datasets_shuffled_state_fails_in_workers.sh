#!/usr/bin/env bash
# Surprise: a checkpoint of a shuffled stream of `datasets`, read by torchdata's StatefulDataLoader with two workers, is
#   written without a complaint and cannot be loaded: IndexError. Without shuffle() the same loader goes on exactly.
#   With one worker the shuffled stream resumes, but samples that waited in the shuffle buffer never come.
# Likely guess: a state that state_dict() gives is one that load_state_dict() takes, on the same data with the same
#   settings. A buffer is refilled, or saved, and no sample is lost.
# Why it matters: the fault shows when a run of days is resumed, and not in a trial without workers. Whoever turns to one
#   worker then trains on with a part of the data left out.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" \
    'datasets==5.2.0' 'torchdata==0.11.0' 'torch==2.15.0'
cat > "$folder/resume.py" <<'PY'
from importlib.metadata import version

from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES = 40
TRAINED = 12


def get_number(batch):
    return batch[0]["n"]


def make_loader(shuffled, workers):
    stream = Dataset.from_dict({"n": list(range(SAMPLES))}).to_iterable_dataset(num_shards=4)
    if shuffled:
        stream = stream.shuffle(seed=1, buffer_size=10)
    return StatefulDataLoader(stream, batch_size=1, num_workers=workers, collate_fn=get_number)


def resume(shuffled, workers):
    """Return the number of different samples of an epoch that is resumed after TRAINED samples,
    or the name of the error."""
    assert len(set(make_loader(shuffled, workers))) == SAMPLES
    loader = make_loader(shuffled, workers)
    samples = iter(loader)
    trained = {next(samples) for _ in range(TRAINED)}
    state = loader.state_dict()
    resumed = make_loader(shuffled, workers)
    resumed.load_state_dict(state)
    try:
        return len(trained | set(resumed))
    except IndexError as error:
        return type(error).__name__


if __name__ == "__main__":
    print(*(f"{name} {version(name)}" for name in ("datasets", "torchdata", "torch")))
    found = {}
    for shuffled in (False, True):
        for workers in (1, 2):
            found[shuffled, workers] = resume(shuffled, workers)
            print(f"shuffled {shuffled}, {workers} worker(s), different samples: {found[shuffled, workers]}")
    assert found[False, 1] == found[False, 2] == SAMPLES
    assert found[True, 1] < SAMPLES
    assert found[True, 2] == "IndexError"
PY
HF_HUB_OFFLINE=1 "$folder/env/bin/python" "$folder/resume.py" 2>/dev/null
