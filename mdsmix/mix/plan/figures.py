"""A plan as data: a tree of frozen dataclasses, which a terminal, JSON and a page show alike.

A figure is a plain number where it is exact: it follows from indexes, manifests and settings, as Streaming computes it. Else it is an
`Estimate`, and what is worked out from one is one too; NaN is not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mdsmix.mix.epoch import StreamInEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInRun(StreamInEpoch):
    """One stream, an epoch of it and the run."""

    share: float
    "Of the epoch's tokens."
    padding: float
    "Share of the positions of its rows that is padding; not known where rows are packed with those of other streams."
    passes: float
    "How often each of its samples is seen in the run, on average."
    run_tokens: float
    run_trained: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """All steps of an epoch."""

    steps: float
    samples: float
    "In these steps, with those that come twice."
    tokens: float
    trained: float
    dropped: float
    "Samples that fill no last batch."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, on average of an epoch."""

    global_batch: int
    "Rows that are asked for."
    device_batch: int
    rows: float
    "Those that it has, a last step that is not full among them."
    drawn: float
    "Samples that a full step draws: more than rows where they are packed."
    positions: float
    "Rows times their padded length."
    tokens: float
    "Without padding."
    trained: float
    padding: float
    "Share of the positions."
    how_padded: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The whole run."""

    budget: str
    "What decides its length, and who says so."
    steps: float
    epochs: float
    tokens: float
    trained: float
    hours: float
    "At the positions per second that were given."


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What the mean node fetches and keeps."""

    remote_streams: int
    "Streams that are fetched; the others lie on the node's own disk."
    run_bytes: float
    "Fetched over the run, where the disk holds what is kept."
    kept_bytes: float
    "On its disk at the end of the run, unpacked."
    largest_shard: float
    "Packed and unpacked together."


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of train_loader that decides speed or disk, never what is trained on."""

    key: str
    use: str | None
    "What to write; None: leave it out."
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All of it."""

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
    "What is guessed, was not looked at, or should be seen before the run."


def figures(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in the tree of a plan by its path, such as `streams.0.tokens`."""
    if isinstance(tree, float | int):
        yield path[1:], tree
    elif isinstance(tree, dict | tuple):
        for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from figures(part, f"{path}.{name}")
