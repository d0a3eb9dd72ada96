"""Marks: of a work unit's samples, and of a whole stream, in one file.

A mark of a unit holds each kept gram of its samples once. Grams that stand in many of the unit's samples are left out, and
counted: what a chat template or a licence puts into every sample says nothing about two streams. A stream's mark holds those of
its units one behind the other, so that one unit that was converted anew changes one piece of it; whoever reads it
takes them together. A long stream's mark keeps fewer grams: those below a bound that is halved until the file has about 32 MiB at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from mdsmix import typed
from mdsmix.encode.base import Encoded
from mdsmix.overlap.grams import BASE, GRAM, RATE, Hashes, kept
from mdsmix.ragged import Ragged

KIND = "grams"
COMMON, COMMON_SHARE = 10, 0.01
"A gram in more samples of a unit than both the number and the share is left out."
MOST = 1 << 22
"Hashes of a stream's mark: 32 MiB, all that are kept of a billion different grams."


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMark:
    """The mark of one work unit."""

    key: str
    samples: int
    grams: int
    "Of its samples, each as often as it stands there."
    left_out: int
    "Kept grams that stand in too many of its samples."
    count: int
    "Of the hashes, before any bound was halved."
    hashes: Hashes
    "Ascending, each once."

    def below(self, halvings: int) -> UnitMark:
        """Its part below a bound that was halved so often."""
        found = below(self.hashes, halvings)
        return self if len(found) == len(self.hashes) else replace(self, hashes=found)


@dataclass(slots=True)
class Marking:
    """The mark of a unit while its samples are made."""

    images: tuple[int, ...] = ()
    "Ids that stand for an image. No gram with one is kept, though it is counted."
    samples: int = 0
    grams: int = 0
    _hashes: list[Hashes] = field(default_factory=lambda: [np.empty(0, np.uint64)])
    _samples: list[NDArray[np.int64]] = field(default_factory=lambda: [np.empty(0, np.int64)])
    is_known: bool = True
    "Whether all of the samples were of columns that hold ids."

    def add(self, *columns: Ragged) -> None:
        """Takes samples that have a row in each of the columns. No gram reaches from one column into another: laying prompts and
        responses side by side would cost a twentieth of their conversion, for 7 grams a sample."""
        for rows in columns:
            found = kept(rows, self.images)
            self._hashes.append(found.hashes)
            self._samples.append(found.rows + self.samples)
            self.grams += int(np.maximum(rows.lengths - GRAM + 1, 0).sum())
        self.samples += len(columns[0])

    def add_encoded(self, encoded: Encoded) -> None:
        """Takes a batch of samples as an encoder gives them."""
        columns = encoded.columns
        if encoded.whole is not None:
            self.add(encoded.whole)
        elif columns.keys() >= {"input_ids", "labels"}:
            self.add(columns["input_ids"], columns["labels"])
        elif only := columns.get("tokens", columns.get("input_ids")):
            self.add(only)
        else:
            self.is_known = False

    def finish(self, key: str) -> UnitMark | None:
        """None where what the samples hold is not known."""
        if not self.is_known:
            return None
        hashes, samples = np.concatenate(self._hashes), np.concatenate(self._samples)
        most = max(COMMON, int(COMMON_SHARE * self.samples))
        different, times = np.unique(hashes, return_counts=True)
        is_common = times > most
        often = np.isin(hashes, different[is_common])  # of one sample, or of many
        is_common[is_common] = _samples_of_each(hashes[often], samples[often]) > most
        return UnitMark(
            key=key,
            samples=self.samples,
            grams=self.grams,
            left_out=int(is_common.sum()),
            count=int((~is_common).sum()),
            hashes=different[~is_common],
        )


def _samples_of_each(hashes: Hashes, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """In how many samples each of the different hashes stands, in ascending order."""
    order = np.lexsort((samples, hashes))
    hashes, samples = hashes[order], samples[order]
    is_new = np.ones(len(hashes), bool)
    is_new[1:] = (hashes[1:] != hashes[:-1]) | (samples[1:] != samples[:-1])
    return np.asarray(np.unique(hashes[is_new], return_counts=True)[1])


@dataclass(frozen=True, slots=True)
class Mark:
    """The marks of units, in their order: of one as it is kept beside its record, or of all of a stream's."""

    units: tuple[UnitMark, ...]
    halvings: int = 0
    "How often the bound was halved: one gram of 256 * 2^halvings is kept."

    @property
    def left_out(self) -> int:
        return sum(unit.left_out for unit in self.units)

    @property
    def merged(self) -> Merged:
        """All units together."""
        found = [np.empty(0, np.uint64), *(unit.hashes for unit in self.units)]
        return Merged(np.unique(np.concatenate(found)), self.halvings)

    def to_bytes(self) -> bytes:
        """A line of JSON, then the hashes of all units, 8 bytes each."""
        body = b"".join(unit.hashes.astype("<u8").tobytes() for unit in self.units)
        said = [[getattr(unit, name) for name in SAID] + [len(unit.hashes)] for unit in self.units]
        head = {"gram": GRAM, "rate": RATE, "base": BASE, "halvings": self.halvings, "units": said}
        return orjson.dumps({**head, "xxh3_64": _digest(body)}) + b"\n" + body


@dataclass(frozen=True, slots=True)
class Merged:
    """The different grams that a mark keeps."""

    hashes: Hashes
    "Ascending, each once."
    halvings: int

    def below(self, halvings: int) -> Hashes:
        """What is below a bound that was halved so often, no less often than the mark's own."""
        return below(self.hashes, halvings)


SAID = ("key", "samples", "grams", "left_out", "count")
"What a mark's first line says of each unit, before the number of its hashes that follow."


def below(hashes: Hashes, halvings: int) -> Hashes:
    """Those below the bound, of hashes in ascending order."""
    bound = np.uint64((1 << (64 - halvings)) - 1)
    return hashes[: np.searchsorted(hashes, bound, "right")]


def halvings_for(count: int) -> int:
    """How often the bound is halved for so many hashes."""
    return max(0, (max(count, 1) - 1).bit_length() - (MOST - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Head:
    gram: int
    rate: int
    base: int
    halvings: int
    units: list[list[Any]]
    xxh3_64: str


def parse(content: bytes) -> Mark | None:
    """None where the bytes are no mark of such grams, or damaged."""
    line, _, body = content.partition(b"\n")
    try:
        head = typed.load(_Head, line)
        hashes = np.frombuffer(body, "<u8")
        cuts = [0, *accumulate(int(said[-1]) for said in head.units)]
        units = tuple(
            UnitMark(**dict(zip(SAID, said, strict=False)), hashes=hashes[start:stop])
            for said, (start, stop) in zip(head.units, pairwise(cuts), strict=True)
        )
    except (typed.Misfit, ValueError, TypeError, IndexError):
        return None
    is_whole = head.xxh3_64 == _digest(body) and cuts[-1] == len(hashes)
    is_ours = (head.gram, head.rate, head.base) == (GRAM, RATE, BASE)
    fits = is_ours and 0 <= head.halvings < 64
    return Mark(units, head.halvings) if is_whole and fits else None


def _digest(body: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(body)
