"""How the records of a window are worked on, and what became of them: in pieces that memory allows, counted batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from heapq import merge
from typing import TYPE_CHECKING

from mdsmix.convert.image_stamps import cut_by_images
from mdsmix.convert.quarantine import PackedRecords, described
from mdsmix.encode.encoded import Encoded
from mdsmix.engines.tasks import CRASHED, Attempt, Reporter, in_work, pieces
from mdsmix.kinds.membership import RecordSample
from mdsmix.shards.counts import NOT_SAMPLED, Records
from mdsmix.sources import BadRecord, RecordBatch

if TYPE_CHECKING:
    from mdsmix.images.reader import ImageReader

MOST_SHRUNK = 6
"Halve a batch of 8 MB at most six times for want of memory: below 128 KB the worker's fixed memory dominates."


class Pace:
    """How many records are in work at once: a batch, or fewer where memory is tight or workers have died of them."""

    def __init__(self, attempt: Attempt, reporter: Reporter, pictures: ImageReader | None) -> None:
        self._attempt, self._reporter, self._shrunk = attempt, reporter, 0
        self._pictures = pictures

    def pieces(self, batch: RecordBatch, without: set[int]) -> Iterator[range]:
        """The positions to work on next. Reports them to the engine, which may make this worker wait."""
        halvings = self._attempt.halvings + self._shrunk
        found = pieces(len(batch.records), halvings, without)
        for piece in cut_by_images(found, self._pictures) if self._pictures else found:
            self._reporter.wait_for_room()
            self._reporter.on_records(in_work(batch, piece))
            yield piece
        self._reporter.on_records(None)
        if self._reporter.is_tight() and self._shrunk < MOST_SHRUNK:
            self._shrunk += 1


class Tally:
    """Counts what became of the records, batch by batch. Written records are counted by their rows, so that the counts do not add up where one is lost."""

    def __init__(
        self, has_many_rows: bool, sample: RecordSample | None = None, has_images: bool = False
    ) -> None:
        self._has_many_rows, self._sample, self._has_images = has_many_rows, sample, has_images
        "A long document is split, any other record is one row."
        self.records, self.bad = Records(), PackedRecords()
        self.size = self.lines = 0
        self._rejected: list[BadRecord] = []
        "Of the batch, in its order."

    def add(self, batch: RecordBatch, piece: range, encoded: Encoded) -> None:
        """Counts what became of the records of a piece."""
        dropped = Counter(r.reason for r in encoded.rejected if r.filtered)
        self._rejected += [
            batch.reject(piece[r.position], r.reason, r.detail)
            for r in encoded.rejected
            if not r.filtered
        ]
        rows, left = len(encoded.lengths), len(piece) - len(encoded.rejected)
        written = min(rows, left) if self._has_many_rows else rows
        self.records += Records(
            read=len(piece),
            written=written,
            filtered=dict(dropped),
        )

    def end(self, batch: RecordBatch, without: Collection[int]) -> None:
        """Keeps the batch's bad records in their order, counts them by reason, and counts as read those that were in no piece."""
        late = [*self._rejected, *(batch.reject(position, CRASHED) for position in without)]
        found = merge(self._of_sample(batch), sorted(late)) if late else self._of_sample(batch)
        reasons = Counter[str]()
        for bad in found:
            reasons[bad.reason] += 1
            self.bad.add(described(bad, self._has_images))
        read = reasons.total() - len(self._rejected)
        self.records += Records(read=read, quarantined=dict(reasons))
        self.size += batch.size
        self.lines += batch.count
        self._rejected = []

    def _of_sample(self, batch: RecordBatch) -> Iterator[BadRecord]:
        """The items that hold no record; those that are not in the sample are counted."""
        for bad in batch.bad:
            if self._sample is None or self._sample.has_raw(bad.origin.raw):
                yield bad
            else:
                self.records += Records(read=1, filtered={NOT_SAMPLED: 1})
