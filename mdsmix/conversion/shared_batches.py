"""Shares the batches of a work unit among its worker and the worker's assistants.

The worker reads the batches (about 4 MB of records each). It sends some to assistants, encodes the
others itself, and gets all back in their order. All that depends on the order of records happens in
the worker. So the stored bytes do not depend on who has encoded a batch.

Each assistant has two batches, so that it need not wait until the worker has finished one of its
own. If an assistant leaves or dies, the worker encodes that assistant's batches itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from mdsmix.engines.tasks import SIGN_OF_LIFE, ActiveRecords, Assistant, Part, Reporter
from mdsmix.kinds.membership import Membership
from mdsmix.kinds.read_records import EncodedPart, RecordReader
from mdsmix.sources import RecordBatch
from mdsmix.sources.format import Item
from mdsmix.sources.record_batches import BatchContent

MOST_UNANSWERED = 2
"How many batches an assistant has at a time."


class EncodedPiece(NamedTuple):
    """Some records of a batch, encoded."""

    positions: range
    "The positions of the records in the batch."
    part: EncodedPart


class BatchToEncode(NamedTuple):
    """A batch in the form that an assistant gets."""

    content: BatchContent
    membership: Membership
    "Decides which records of the batch are in the stream."


class EncodedBatch(NamedTuple):
    """The answer of an assistant."""

    part: EncodedPart
    faults: list[dict[int, str]]
    "The faults of each block, as `BatchContent.decode` returns them."


def encode_batch(reading: RecordReader, batch: BatchToEncode) -> EncodedBatch:
    """Encode a batch in an assistant.

    Args:
        reading: reads and encodes the records of the stream.
        batch: the batch.
    """
    records, faults = batch.content.decode()
    part = reading.encode_part(records, batch.membership)
    return EncodedBatch(part, faults)


def describe_records(batch: RecordBatch, first: Item, count: int) -> ActiveRecords:
    """Describe some records of a batch for messages.

    Args:
        batch: the batch.
        first: the first of the records.
        count: how many records there are.
    """
    return ActiveRecords(
        file=first.file,
        ordinal=first.ordinal,
        where=first.where,
        length=first.length,
        records=count,
        size=batch.size,
    )


def find_free_assistant(assistants: Iterable[Assistant]) -> Assistant | None:
    """Return the assistant with the fewest batches; None if each has MOST_UNANSWERED."""
    fewest = min(assistants, key=attrgetter("unanswered"), default=None)
    return fewest if fewest and fewest.unanswered < MOST_UNANSWERED else None


@dataclass(slots=True)
class _Pending:
    """A batch that is not returned yet, since it or an earlier one is with an assistant."""

    batch: RecordBatch
    membership: Membership
    assistant: Assistant | None = None
    "The assistant that encodes the batch; None: the worker has encoded it."
    pieces: Sequence[EncodedPiece] = ()
    "The result, if the worker has encoded the batch."


class SharedBatches:
    """Encodes the batches of one window (a slice of a work unit), with the help of assistants."""

    def __init__(
        self,
        membership: Membership,
        encode_here: Callable[[RecordBatch, Membership], Iterator[EncodedPiece]],
        reporter: Reporter,
    ) -> None:
        """Start at the first batch of the window.

        Args:
            membership: decides which records of the window are in the stream.
            encode_here: encodes a batch in this process, piece by piece. Its second argument is the
                part of `membership` for the records of this batch.
            reporter: the connection to the engine, which sends assistants.
        """
        self._membership = membership
        self._encode_here = encode_here
        self._reporter = reporter
        self._pending = deque[_Pending]()
        self._records_begun = 0
        "The number of records in the batches so far, if duplicates are dropped."

    def encode(
        self, batches: Iterable[RecordBatch]
    ) -> Iterator[tuple[RecordBatch, Iterable[EncodedPiece]]]:
        """Yield each batch with its encoded pieces, in the order of the batches. The pieces may be
        encoded while they are iterated, so they must be taken before the next batch.
        """
        for batch in batches:
            self._reporter.wait_for_room()
            assistants = self._reporter.list_assistants()
            membership = self._select_records(batch)
            assistant = find_free_assistant(assistants)
            if assistant and self._send_batch(assistant, batch, membership):
                self._pending.append(_Pending(batch, membership, assistant))
            elif self._pending:
                pieces = [*self._encode_here(batch, membership)]
                self._pending.append(_Pending(batch, membership, pieces=pieces))
            else:
                yield batch, self._encode_here(batch, membership)
            del batch  # otherwise it stays in memory while the next one is read
            # Each pending batch keeps its source in memory: wait if an assistant is very slow.
            # All workers have MOST_UNANSWERED batches each; twice as many may be pending.
            most_pending = 2 * MOST_UNANSWERED * (1 + len(assistants))
            while self._pending and (self._is_first_done() or len(self._pending) > most_pending):
                yield self._take_first()
        while self._pending:
            if not self._is_first_done():
                self._encode_last()
            yield self._take_first()

    def _send_batch(self, assistant: Assistant, batch: RecordBatch, membership: Membership) -> bool:
        """Send a batch to an assistant. Return False if this process must encode it."""
        # The lines or rows of the batch count as its records, since it need not be decoded.
        records = describe_records(batch, batch.first_item, batch.count)
        content = BatchToEncode(batch.content(), membership)
        return assistant.send(Part(records, content))

    def _select_records(self, batch: RecordBatch) -> Membership:
        """Return the part of `membership` that decides about the records of the next batch.

        The flags of duplicates are those of the batch, so its first record must be known. Then this
        process decodes all batches, to count their records.
        """
        if not len(self._membership.duplicates):
            return self._membership.for_part(0, 0)
        first = self._records_begun
        self._records_begun += batch.length
        return self._membership.for_part(first, batch.length)

    def _is_first_done(self) -> bool:
        """Return whether the first pending batch can be taken without waiting."""
        assistant = self._pending[0].assistant
        return assistant is None or assistant.has_answer()

    def _take_first(self) -> tuple[RecordBatch, Iterable[EncodedPiece]]:
        """Remove the first pending batch, and return it with its encoded pieces. If an assistant
        encodes it, wait for the answer.

        Raises the exception that the batch has raised in the assistant.
        """
        first = self._pending.popleft()
        batch = first.batch
        if not first.assistant:
            return batch, first.pieces
        while not first.assistant.has_answer(SIGN_OF_LIFE):
            self._reporter.on_records(None)
        answer: EncodedBatch | None = first.assistant.receive()
        if answer is None:
            return batch, self._encode_here(batch, first.membership)
        batch.note_faults(answer.faults)
        if not batch.length:
            return batch, []
        return batch, [EncodedPiece(range(batch.length), answer.part)]

    def _encode_last(self) -> None:
        """Encode a batch that an assistant has not begun yet, since the worker has no other batch:
        take back the last batch of an assistant that has several. If none has, do nothing.
        """
        for pending in reversed(self._pending):
            assistant = pending.assistant
            if assistant and assistant.unanswered > 1:
                assistant.take_back()
                pending.assistant = None
                pending.pieces = [*self._encode_here(pending.batch, pending.membership)]
                return
