"""Raw records behind a shape: what cannot be read is told by its place among all, and moves no one else's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.encode.base import Encoded, Rejected
from mdsmix.kinds.reading import Reading
from mdsmix.ragged import Ragged
from mdsmix.record import Document
from mdsmix.shapes import SHAPES

BAD: dict[str, Any] = {
    "missing_field": {"t": "x"},
    "not_an_object": ["text"],
    "field_not_text": {"text": None},
    "lone_surrogate": {"text": "\ud800"},
}


class Refusing:
    """An encoder that refuses every text with a `!`, and gives a row of one token, the text's length, for the others."""

    def encode(self, records: Sequence[Document]) -> Encoded:
        kept = [len(r.text) for r in records if "!" not in r.text]
        return Encoded(
            columns={"tokens": Ragged.of([[n] for n in kept], np.uint16)},
            tokens=len(kept),
            loss_tokens=0,
            lengths=np.ones(len(kept), np.int64),
            largest_id=max(kept, default=-1),
            rejected=[Rejected(i, "shouts", True) for i, r in enumerate(records) if "!" in r.text],
        )


@given(st.lists(st.sampled_from(["ab", "c!", "", *BAD])))
def test_every_record_is_a_row_or_has_its_reason_at_its_place(drawn: list[str]) -> None:
    records = [BAD.get(word, {"text": word}) for word in drawn]
    encoded = Reading(SHAPES["text"], {"text": "text"}, Refusing()).encode(records)
    expected = {
        i: (word, False) if word in BAD else ("shouts", True)
        for i, word in enumerate(drawn)
        if word in BAD or "!" in word
    }
    assert {r.position: (r.reason, r.filtered) for r in encoded.rejected} == expected
    assert len(encoded.rejected) == len(expected)
    lengths = [len(word) for i, word in enumerate(drawn) if i not in expected]
    assert encoded.columns["tokens"].values.tolist() == lengths
