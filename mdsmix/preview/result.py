"""What a preview shows: steps, what each device draws in them, their rows, and the epoch in windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdsmix.load.layout import Ids, Layout, SampleAt
from mdsmix.preview.asked import Asked
from mdsmix.preview.epoch import Floats, SampleTokens, Windows
from mdsmix.preview.rows import SampleRow, StepContent


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one device draws in a step."""

    rank: int
    node: int
    worker: int
    "Of its DataLoader."
    ids: Sequence[int]
    "Streaming's sample ids, in the order in which they are drawn."
    places: Sequence[SampleAt]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A row of a step, decoded for a person."""

    rank: int
    row: SampleRow


@dataclass(frozen=True, kw_only=True)
class Step:
    """A global batch."""

    epoch: int
    step: int
    "Of the epoch, the first is 0."
    ranks: Sequence[Rank]
    drawn: int
    "Samples that all devices draw."
    looked: int
    "Of which so many were read."
    content: StepContent | None
    "None where a batch cannot be packed, since a sample of it was not read."
    waiting: int
    "Samples that were drawn and wait to be packed."
    shown: Sequence[Shown]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch, or what is left of it."""

    epoch: int
    first: int
    "The step that it is entered at."
    ids: Ids
    "int64 [steps, ranks, drawn]."


@dataclass(frozen=True, kw_only=True)
class Preview:
    """All that is shown."""

    asked: Asked
    layout: Layout
    streams: Sequence[str]
    shards: Sequence[Sequence[str]]
    "Their files, by stream."
    ratio: float
    positions: int
    "Of a step: its rows times max_seq_len."
    epochs: Sequence[Epoch]
    "Those that the steps lie in."
    steps: Sequence[Step]
    lengths: Sequence[SampleTokens | None]
    windows: Windows
    "Of the first epoch."
    tokens: Floats | None
    "float64 [streams]: of that epoch; None where a stream's are not known."
    planned: Sequence[float]
    "The streams' shares of the samples that the weights draw."
    read: int
    "Bytes."
