"""What a preview shows: steps, what each device draws in them, their rows, and the epoch in windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdsmix.preview.asked import Asked, State
from mdsmix.preview.batches import Made, Placed
from mdsmix.preview.layout import Ids, Layout, Place
from mdsmix.preview.lengths import Floats, Lengths
from mdsmix.preview.shares import Windows


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one device draws in a step."""

    rank: int
    node: int
    worker: int
    "Of its DataLoader."
    ids: Sequence[int]
    "Streaming's sample ids, in the order in which they are drawn."
    places: Sequence[Place]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A row of a step, decoded for a person."""

    rank: int
    row: Placed


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
    made: Made | None
    "None where a batch cannot be packed, since a sample of it was not read."
    waiting: int
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
    state: State
    "As it was entered: what a state_dict of this moment would hold."
    ratio: float
    positions: int
    "Of a step: its rows times max_seq_len."
    epochs: Sequence[Epoch]
    "Those that the steps lie in."
    steps: Sequence[Step]
    lengths: Sequence[Lengths | None]
    windows: Windows
    "Of the first epoch."
    tokens: Floats | None
    "float64 [streams]: of that epoch; None where a stream's are not known."
    planned: Sequence[float]
    "The streams' shares of the samples that the weights draw."
    read: int
    "Bytes."
