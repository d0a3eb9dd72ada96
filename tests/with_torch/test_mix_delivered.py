"""What an epoch draws and delivers is what Streaming draws and delivers, for all weights, methods and worlds: shares, and mixes that were made offline, too."""

import json
from collections import Counter
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

from mdsmix.mix.draws import World as Machines
from mdsmix.mix.draws import delivered, draws, parts
from tests.converting import mdsmix
from tests.mixtures import LENGTH, write_three
from tests.published import write_mix
from tests.test_mix_offline import mix
from tests.with_torch.load_streams import write_tokens

METHODS = ("random", "stratified", "per_stream", "device_per_stream")
SIZES = ((223, 101, 37), (64,), (150, 16, 5, 101), (37, 38))
SCHEMES = ("proportion", "repeat", "choose", "none", "mixed")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Streams named by their samples, in shards of sixty or so."""
    home = tmp_path_factory.mktemp("sized")
    for n in {n for sizes in SIZES for n in sizes}:
        write_tokens(home / str(n), n, length=4, shard_bytes=1000)
    return home


@pytest.fixture(scope="module")
def datasets(home: Path) -> list[StreamingDataset]:
    """Of every set of sizes one: each holds a dozen descriptors until the process ends."""
    return [
        StreamingDataset(streams=[Stream(local=str(home / str(n))) for n in sizes], batch_size=1)
        for sizes in SIZES
    ]


def _weight(scheme: str, rng: np.random.Generator, kinds: tuple[str, ...] = SCHEMES[1:4]) -> Any:
    kind = kinds[rng.integers(len(kinds))] if scheme == "mixed" else scheme
    number = int(rng.integers(8, 300)) if kind == "choose" else round(rng.random() * 2 + 0.2, 3)
    return {} if kind == "none" else {kind: number}


def test_an_epoch_draws_what_streaming_draws() -> None:
    """3,000 cases that do not change: schemes x sizes x epoch sizes x seeds, odd on purpose. None: the weights are refused."""
    rng, refused = np.random.default_rng(3), 0
    for number in range(3000):
        samples = [int(x) for x in rng.integers(1, 1000, int(rng.integers(1, 6)))]
        weights = [_weight(SCHEMES[number % 5], rng, SCHEMES[:4]) for _ in samples]
        epoch_size = int(rng.integers(1, 5000)) if rng.random() < 0.4 else None
        case = (weights, samples, epoch_size, int(rng.integers(0, 10000)))
        ours: list[int] | None
        theirs: list[int] | None
        try:
            streams = [Stream(local="x", **weight) for weight in weights]
            Stream.apply_weights(streams, np.array(samples, np.int64), *case[2:])
            theirs = [int(stream.choose) for stream in streams]
        except ValueError:
            theirs = None
        try:
            ours = draws(*case)
        except ValueError:
            ours = None
        assert ours == theirs, case
        refused += theirs is None
    assert 500 < refused < 1500, "both kinds of answer are compared"


def _theirs(dataset: StreamingDataset, world: World) -> list[int]:
    """Samples of each stream in the epoch that Streaming lays out, 0 everywhere where it refuses."""
    try:
        found = generate_work(dataset.batching_method, dataset, world, 0, 0).ravel()
    except ValueError:
        return [0] * len(dataset.streams)
    ends = [*dataset.sample_offset_per_stream[1:], dataset.num_samples]
    return [int(n) for n in np.histogram(found[found >= 0], bins=[0, *ends])[0]]


def test_what_is_delivered_is_what_streaming_lays_out(datasets: list[StreamingDataset]) -> None:
    for method in METHODS[1:]:
        rng, refused, cases = np.random.default_rng(METHODS.index(method)), 0, 100
        for _ in range(cases):
            at, scheme = int(rng.integers(len(SIZES))), SCHEMES[rng.integers(5)]
            weights = [_weight(scheme, rng) for _ in SIZES[at]]
            ours, theirs = _both(method, datasets[at], SIZES[at], weights, rng)
            refused += 0 in ours
            assert theirs == ([0] * len(ours) if 0 in ours else ours), (method, weights)
        assert 0 < refused < cases / 2, "both kinds of answer are compared"


def _both(
    method: str, dataset: StreamingDataset, sizes: tuple[int, ...], weights: list[Any], rng: Any
) -> tuple[list[int], list[int]]:
    nodes, ranks, workers = (int(rng.choice(of)) for of in ([1, 2, 4], [1, 2, 3], [1, 2, 3]))
    canonical = int(rng.choice([nodes, 2 * nodes, 8 * nodes, 1]))
    relative = "proportion" in weights[0] or not any(weights)
    epoch_size = int(rng.integers(100, 600)) if relative and rng.random() < 0.5 else None
    streams = [Stream(local="x", **weight) for weight in weights]
    Stream.apply_weights(streams, np.array(sizes), epoch_size, dataset.shuffle_seed)
    for own, weighted in zip(dataset.streams, streams, strict=True):
        own.proportion, own.choose = weighted.proportion, weighted.choose
    dataset.batching_method, dataset.num_canonical_nodes = method, canonical
    dataset.batch_size, dataset.shuffle = int(rng.integers(1, 9)), bool(rng.integers(2))
    dataset.shuffle_block_size = 1 << 18
    devices = Machines(
        batch=dataset.batch_size * nodes * ranks,
        nodes=nodes,
        gpus=ranks,
        num_canonical_nodes=canonical,
        algo="py1e" if dataset.shuffle else "none",
    )
    drawn, shares = draws(weights, sizes, epoch_size), parts(weights, sizes, epoch_size)
    theirs = _theirs(dataset, World(nodes, ranks, workers, 0))
    return delivered(method, drawn, shares, devices), theirs


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


def test_streaming_reads_what_was_mixed_from_streams_that_it_wrote(tmp_path: Path) -> None:
    from streaming import MDSWriter, StreamingDataset

    columns = {"id": "int", "text": "str", "tokens": "ndarray:int32"}
    for name, compression in (("a", None), ("b", "zstd"), ("c", "gz")):
        with MDSWriter(
            out=str(tmp_path / name / "train"),
            columns=columns,
            compression=compression,
            hashes=["sha1", "xxh64"],
            size_limit=4096,
        ) as writer:
            for i in range(100):
                row = np.arange(1 + i % 9, dtype=np.int32)
                writer.write({"id": i, "text": f"{name}{i}", "tokens": row})
    recipe = write_mix(tmp_path, "a", "b", "c", train_loader={"name": "text"})
    folder = mix(recipe, "mix.b.repeat=2")
    read = list(StreamingDataset(local=str(folder), shuffle=False, batch_size=1))
    texts = Counter(sample["text"] for sample in read)
    assert texts == Counter({f"{n}{i}": 1 + (n == "b") for n in "abc" for i in range(100)})
    for sample in read:
        assert sample["text"][1:] == str(sample["id"])
        assert sample["tokens"].tolist() == list(range(1 + sample["id"] % 9))
