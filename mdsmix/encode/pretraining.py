"""Documents -> token rows, for plain language modelling.

`concat` joins documents and cuts rows of exactly max_seq_len: no padding, and documents that begin and end inside rows.
`document` makes one sample of each document and splits longer ones, so nothing is cut off: documents stay whole, at the
price of padding (or of packing in the loader). Under the finetuning loader a row is written as its first token and the rest, for which
LLM-Foundry's collator computes exactly the language-modelling loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.backends import Backend
from mdsmix.encode.base import Encoded, Rejected
from mdsmix.encode.special import encode_texts
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.ragged import Ragged
from mdsmix.record import Document

SPECIAL = "special_token_in_text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The encoder of both layouts."""

    tokenizer: Tokenizer
    backend: Backend
    max_seq_len: int
    is_concat: bool
    has_targets: bool
    "Columns input_ids (the first token) and labels (the rest), instead of tokens."
    is_packed: bool = False
    "Column input_ids, of documents to be packed."
    add_bos: bool
    add_eos: bool
    min_tokens: int
    max_tokens: int | None
    special_tokens_in_text: str

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """Concat: one row per document, under `tokens`, to be joined and cut by the caller. Document: finished rows."""
        texts = [document.text for document in documents]
        ids, marked, stopped = encode_texts(
            self.backend, texts, self.special_tokens_in_text, self.tokenizer
        )
        rows = add_special_tokens(ids, *self._special_tokens, self.tokenizer.dtype)
        refused = np.zeros(len(rows), bool)
        refused[stopped] = True
        keep, dropped = self._keep(ids.lengths, rows.lengths, refused)
        rejected = [Rejected(position, why, why != SPECIAL) for position, why in dropped]
        return self._encoded(rows.take(keep), rejected, len(marked))

    @property
    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """What stands around every document: the tokenizer's own tokens, BOS and EOS added where they are not there."""
        head, tail = self.tokenizer.prefix_ids, self.tokenizer.suffix_ids
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        if self.add_bos and bos is not None and head[:1] != [bos]:
            head = [bos, *head]
        if self.add_eos and eos is not None and tail[-1:] != [eos]:
            tail = [*tail, eos]
        return head, tail

    def _keep(
        self, bare: NDArray[np.int64], whole: NDArray[np.int64], refused: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], list[tuple[int, str]]]:
        """Which documents stay, and why the others go: a reason code for each, the first that fits."""
        most = np.iinfo(np.int64).max if self.max_tokens is None else self.max_tokens
        rules = {
            SPECIAL: refused,
            "empty": bare == 0,
            "min_tokens": whole < self.min_tokens,
            "max_tokens": whole > most,
            "one_token": (whole < 2) & (not self.is_concat),
        }
        keep = ~np.logical_or.reduce(list(rules.values()))
        reasons = {int(i): r for r, hit in reversed(rules.items()) for i in np.flatnonzero(hit)}
        return keep, sorted(reasons.items())

    def _columns(self, rows: Ragged) -> Mapping[str, Ragged]:
        if self.is_packed:
            return {"input_ids": rows}
        return as_targets(rows) if self.has_targets and not self.is_concat else {"tokens": rows}

    def _encoded(self, rows: Ragged, rejected: list[Rejected], specials: int) -> Encoded:
        lost, rows_of = 0, None
        if not self.is_concat:
            rows_of = rows_in(rows.lengths, self.max_seq_len)
            rows, lost = split_rows(rows, self.max_seq_len)
        lengths = rows.lengths
        return Encoded(
            columns=self._columns(rows),
            tokens=len(rows.values),
            loss_tokens=int(np.maximum(lengths - 1, 0).sum()),
            lengths=lengths,
            largest_id=int(rows.values.max()) if len(rows.values) else -1,
            rejected=rejected,
            specials=specials,
            lost_tokens=lost,
            rows_of=rows_of,
        )


def add_special_tokens(ids: Ragged, head: list[int], tail: list[int], dtype: str) -> Ragged:
    """Every row with `head` before and `tail` behind it, in `dtype`.

    Slices of bytes are joined, which costs 0.3 us a row and a copy; masks over tokens cost ten times the copy.
    """
    values = ids.values.astype(dtype)
    if not head and not tail:
        return Ragged(values, ids.offsets)
    data, width = memoryview(values).cast("B"), values.itemsize
    before, behind = (np.array(part, dtype).tobytes() for part in (head, tail))
    bounds = (ids.offsets * width).tolist()
    pieces: list[bytes | memoryview] = []
    for row in range(len(ids)):
        pieces += (before, data[bounds[row] : bounds[row + 1]], behind)
    whole = np.frombuffer(b"".join(pieces), dtype)
    return Ragged.from_lengths(whole, ids.lengths + len(head) + len(tail))


def split_rows(rows: Ragged, longest: int) -> tuple[Ragged, int]:
    """Rows of more than `longest` tokens cut into full ones and a rest; a rest of one token has no loss and is lost.

    Returns the rows and the number of lost tokens.
    """
    lengths = rows.lengths
    if not len(lengths) or lengths.max() <= longest:
        return rows, 0
    pieces = -(-lengths // longest)
    cut = np.full(int(pieces.sum()), longest, np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * longest
    parts = Ragged.from_lengths(rows.values, cut)
    lone = cut == 1
    return parts.take(~lone), int(lone.sum())


def rows_in(lengths: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    """How many rows `split_rows` makes of rows of these lengths."""
    lone = (lengths > longest) & (lengths % longest == 1)
    return np.asarray(-(-lengths // longest) - lone)


def as_targets(rows: Ragged) -> Mapping[str, Ragged]:
    """The columns of the finetuning loader: the first token is context, the rest is trained."""
    starts = rows.offsets[:-1]
    rest = np.ones(len(rows.values), bool)
    rest[starts] = False
    first = Ragged(rows.values[starts], np.arange(len(rows) + 1, dtype=np.int64))
    return {"input_ids": first, "labels": Ragged.from_lengths(rows.values[rest], rows.lengths - 1)}
