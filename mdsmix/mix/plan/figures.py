"""A plan as data: a tree of frozen dataclasses, which a terminal, JSON and a page show alike.

A figure is a plain number where it is exact: it follows from indexes, manifests and settings, as Streaming computes it. Otherwise it is
an `Estimate`, as is every figure computed from one. NaN means not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mdsmix.mix.epoch import StreamInEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInRun(StreamInEpoch):
    """The figures of one stream, in an epoch and in the run."""

    share: float
    "The stream's share of the epoch's tokens, 0 to 1."
    padding: float
    "The share of padding in the positions of its rows; not known where rows are packed, since streams share rows."
    passes: float
    "How often the run sees each sample of the stream, on average."
    run_tokens: float
    run_trained: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The figures of all steps of an epoch."""

    steps: float
    samples: float
    "Samples in these steps; a sample that comes twice counts twice."
    tokens: float
    trained: float
    dropped: float
    "Samples that are left over because they do not fill a last batch."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The figures of the mean step of an epoch."""

    global_batch: int
    "Rows that a full step has, of all devices together."
    device_batch: int
    rows: float
    "Rows that a step has on average; a last step may have fewer."
    drawn: float
    "Samples that a full step draws: more than its rows where samples are packed."
    positions: float
    "Rows times their padded length, in tokens."
    tokens: float
    "Tokens without padding."
    trained: float
    padding: float
    "The share of padding in the positions, 0 to 1."
    how_padded: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The figures of the whole run."""

    budget: str
    "The length of the run and where it is set, such as `--tokens 100B`."
    steps: float
    epochs: float
    tokens: float
    trained: float
    hours: float
    "Hours at the given positions per second; not known without them."


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The bytes that a node fetches and keeps, on average."""

    remote_streams: int
    "Streams that are fetched. All others lie on the node's own disk."
    run_bytes: float
    "Bytes fetched over the run, if the disk has room for `kept_bytes`."
    kept_bytes: float
    "Bytes on the node's disk at the end of the run: shards unpacked, and packed ones too under keep_zip."
    largest_shard: float
    "Bytes of the largest shard, packed and unpacked together."


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of train_loader that decides speed or use of the disk, and never the samples that are trained on."""

    key: str
    use: str | None
    "The value to write; None: leave the key out."
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a run."""

    origin: str
    loader: str
    nodes: int
    gpus: int
    max_seq_len: int
    streams: tuple[StreamInRun, ...]
    step: StepPlan
    epoch: EpochPlan
    run: RunPlan
    node: NodePlan
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    "Sentences on guesses, on data that was not looked at, and on dropped samples."


def figures(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in the tree of a plan by its path, such as `streams.0.tokens`."""
    if isinstance(tree, float | int):
        yield path[1:], tree
    elif isinstance(tree, dict | tuple):
        for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from figures(part, f"{path}.{name}")
