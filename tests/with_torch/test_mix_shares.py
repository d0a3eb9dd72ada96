"""What a real StreamingDataset draws of a mix by shares: the shares that were planned.

The measure is independent of mdsmix's counts: samples are read by Streaming, and their tokens and trained tokens are counted from
the decoded columns, by the rule of LLM-Foundry's loader written out here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml
from streaming import Stream, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from tests.converting import mdsmix
from tests.mixtures import LENGTH, write_three

EOS = 0
SEEDS = range(12)
THIRDS = {"web": {"share": 0.5}, "docs": {"share": "20%"}, "chat": {"share": 0.3}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return write_three(tmp_path_factory.mktemp("three"), tokenizer_folder)


def planned(recipe: Path, **keys: Any) -> tuple[dict[str, Any], Any]:
    """The rendered YAML's dataset, and what `--json` says of its shares, by stream."""
    changed = recipe.with_name("mixed.yaml")
    changed.write_text(json.dumps(json.loads(recipe.read_text()) | keys))
    done = mdsmix("render-yaml", changed, "--json")
    assert done.code == 0, done.err
    told = orjson.loads(done.out)
    dataset = yaml.safe_load(told["yaml"])["train_loader"]["dataset"]
    return dataset, {row["stream"]: row for row in told["shares"]["rows"]}


class Drawn:
    """The streams of a rendered YAML as Streaming reads them, and what each of their samples holds."""

    def __init__(self, dataset: Mapping[str, Any]) -> None:
        self.names = list(dataset["streams"])
        streams = [Stream(**keys) for keys in dataset["streams"].values()]
        self.data = StreamingDataset(
            streams=streams,
            batch_size=1,
            shuffle=dataset["shuffle"],
            num_canonical_nodes=1,
            shuffle_block_size=1 << 18,
        )
        held = np.array([_holds(self.data[i]) for i in range(self.data.num_samples)])
        self.held = {"tokens": held[:, 0], "loss_tokens": held[:, 1]}
        ends = [*self.data.sample_offset_per_stream[1:], self.data.num_samples]
        self.stream_of = np.searchsorted(ends, np.arange(self.data.num_samples), side="right")

    def shares(self, seed: int, epoch: int, unit: str) -> dict[str, float]:
        """Of an epoch: the part of each stream in all that is yielded."""
        self.data.shuffle_seed = seed
        ids = generate_work("random", self.data, World(1, 1, 1, 0), epoch, 0).ravel()
        ids = ids[ids >= 0]
        sums = np.bincount(self.stream_of[ids], self.held[unit][ids], len(self.names))
        return dict(zip(self.names, sums / sums.sum(), strict=True))


def _holds(sample: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens that the model sees of a sample, and those with a loss, as LLM-Foundry's collator makes them: an answer without EOS
    gets one, what is beyond a row is cut, and position 0 has no loss."""
    if "turns" not in sample:
        length = len(sample["input_ids"]) + len(sample["labels"])
        return length, length - 1
    *before, last = sample["turns"]
    start = sum(len(t["input_ids"]) + len(t["labels"]) for t in before) + len(last["input_ids"])
    end = min(LENGTH, start + len(last["labels"]) + (last["labels"][-1] != EOS))
    return end, end - min(start, LENGTH)


def test_epochs_hold_on_average_what_was_planned(recipe: Path) -> None:
    wanted = {"web": 0.5, "docs": 0.2, "chat": 0.3}
    for keys, unit in (
        ({"budget": "100k tokens"}, "tokens"),
        ({"budget": "45k loss_tokens"}, "loss_tokens"),
        ({"budget": "5k samples", "count": "loss_tokens"}, "loss_tokens"),
        ({}, "tokens"),
    ):
        dataset, told = planned(recipe, mix=THIRDS, **keys)
        drawn = Drawn(dataset)
        found = [drawn.shares(seed, epoch, unit) for seed in SEEDS for epoch in (0, 1)]
        for name, row in told.items():
            seen = np.array([shares[name] for shares in found])
            assert abs(row["reached"] - wanted[name]) <= 0.001
            # Rows of unequal length are drawn at random.
            assert np.abs(seen - row["reached"]).max() <= 0.02
            assert abs(seen.mean() - row["reached"]) <= 4 * seen.std() / len(found) ** 0.5 + 1e-9
