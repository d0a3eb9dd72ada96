"""A plan as data: a tree of frozen dataclasses, which a terminal, JSON and a page show alike.

Every number is a `Figure`, which says how far it can be trusted. Nothing that was estimated can be shown as certain, since
whoever adds or multiplies figures gets the weakest of their grounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mdsmix.table import Estimate

Basis = Literal["exact", "counted", "estimated", "unknown"]
BASES: tuple[Basis, ...] = ("exact", "counted", "estimated", "unknown")
"The firmest first."


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and what it rests on."""

    value: float | None
    basis: Basis = "exact"
    """`exact`: follows from indexes and settings as Streaming computes it; `counted`: from the counts of a manifest;
    `estimated`: a mean, a draw or a survey of some records; `unknown`: nothing tells."""
    error: float | None = None
    "One standard error (or deviation, of what is drawn at random) of an estimate, where it is known."

    @property
    def shown(self) -> float | None:
        """For a table: an estimate is marked as one."""
        estimated = self.basis == "estimated" and self.value is not None
        return Estimate(self.value or 0.0) if estimated else self.value

    @property
    def known(self) -> float:
        """The value where there is one, else 0."""
        return self.value or 0.0

    def times(self, factor: float, basis: Basis = "exact") -> Figure:
        """So many times as much; `basis`: what the factor rests on."""
        if self.value is None:
            return self
        error = None if self.error is None else self.error * abs(factor)
        return Figure(self.value * factor, weakest((self.basis, basis)), error)

    def rounded(self) -> Figure:
        """Of what is whole."""
        return self if self.value is None else Figure(round(self.value), self.basis, self.error)


UNKNOWN = Figure(None, "unknown")


def weakest(bases: Iterable[Basis]) -> Basis:
    return max(bases, key=BASES.index, default="exact")


def total(figures: Iterable[Figure]) -> Figure:
    """The sum; unknown where one of them is. Errors are of different streams, so they add as squares."""
    found = list(figures)
    basis = weakest(figure.basis for figure in found)
    if basis == "unknown":
        return UNKNOWN
    errors = [figure.error for figure in found if figure.basis == "estimated"]
    known = [error for error in errors if error is not None]
    error = math.hypot(*known) if known and len(known) == len(errors) else None
    return Figure(sum(figure.known for figure in found), basis, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """One stream, an epoch of it and the run."""

    stream: str
    state: Literal["published", "looked at"]
    "Whether it is converted, or known from a survey of some of its records."
    samples: Figure
    "In the stream."
    shards: Figure
    epoch_samples: Figure
    "That reach the training loop."
    epoch_tokens: Figure
    "Of these, without what the loader cuts off and without padding."
    epoch_trained: Figure
    "Positions that give a loss."
    share: Figure
    "Of the epoch's tokens."
    cut_tokens: Figure
    "An epoch, that the loader cuts off at max_seq_len."
    padding: Figure
    "Share of the positions of its rows that is padding; unknown where rows are packed with those of other streams."
    passes: Figure
    "How often each of its samples is seen in the run, on average."
    unseen: Figure
    "Share of its samples that the run never sees: partial epochs are drawn anew."
    run_tokens: Figure
    run_trained: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, and an epoch of them."""

    global_batch: int
    "Rows."
    device_batch: int
    drawn: Figure
    "Samples that a step draws: more than rows where they are packed."
    positions: Figure
    "Of a step: rows times their padded length."
    tokens: Figure
    "Of a step, without padding, on average."
    is_even: bool
    "All rows hold as many tokens, and as many that are trained."
    trained: Figure
    padding: Figure
    "Share of the positions."
    how_padded: str
    steps: Figure
    "An epoch."
    samples: Figure
    "An epoch, of all streams."
    epoch_tokens: Figure
    epoch_trained: Figure
    dropped: Figure
    "Samples an epoch that fill no batch."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The whole run."""

    budget: str
    "What decides its length, and who says so."
    steps: Figure
    epochs: Figure
    firmness: Basis
    "What the number of tokens a step rests on, times the steps: estimated where the run ends within an epoch of unequal rows."
    samples: Figure
    tokens: Figure
    trained: Figure
    hours: Figure
    "At the tokens per second that were given."


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What one node reads; the node that reads most where they differ."""

    remote_streams: int
    "Streams that are fetched; the others lie on the node's own disk."
    epoch_shards: Figure
    "Different shards that it reads in the first epoch."
    epoch_bytes: Figure
    "Their bytes as they are stored and fetched."
    run_shards: Figure
    run_bytes: Figure
    "The same over the run, where nothing is evicted: what is kept is not fetched again."
    kept_bytes: Figure
    "On its disk at the end of the run, unpacked."
    mean_kept_bytes: Figure
    "The same of the mean node."
    refetched_bytes: Figure
    "Fetched over the run under a cache_limit below what is kept; else equal to run_bytes."
    largest_shard: Figure
    "Packed and unpacked together."
    working_set: Figure
    "Bytes of the shards among which samples are shuffled at a time: with less cache, shards are fetched more than once an epoch."


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of train_loader that decides speed or disk, never what is trained on."""

    key: str
    now: str | None
    "What the config says."
    use: str | None
    "What to write; None: leave it out."
    rests_on: Literal["Streaming's rule", "Streaming's default", "rule of thumb"]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All of it."""

    origin: str
    loader: str
    nodes: int
    gpus: int
    max_seq_len: int
    streams: tuple[StreamPlan, ...]
    step: StepPlan
    run: RunPlan
    node: NodePlan
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    "What is guessed, was not looked at, or should be seen before the run."
