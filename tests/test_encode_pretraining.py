"""Documents as rows, worked by hand: one id per character, <s> is 0 and </s> is 1."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.encode.encoded import Encoded, add_special_tokens, as_targets, split_rows
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.kinds.read_records import Reading
from mdsmix.ragged import Ragged
from mdsmix.record import FILTERED
from mdsmix.shapes import SHAPES
from tests.encoders import opened
from tests.styles import BOS, EOS, START, letters


@pytest.fixture
def encode(tmp_path: Path) -> Any:
    """records, settings of the encoder, changes of the tokenizer -> Encoded."""

    def run(records: list[Any], tokenizer: dict[str, Any] | None = None, **changes: Any) -> Encoded:
        snapshot = letters(tmp_path, **tokenizer or {})
        common: dict[str, Any] = {
            "max_seq_len": 4,
            "layout": "document",
            "loader": "text",
            "add_bos": False,
            "add_eos": True,
        }
        encoder = opened(Pretraining, snapshot, **common | changes)
        return Reading(SHAPES["text"], {"text": "text"}, encoder).encode(records)

    return run


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def rows(encoded: Encoded, column: str = "tokens") -> list[list[int]]:
    column_rows = encoded.columns[column]
    return [column_rows[i].tolist() for i in range(len(column_rows))]


def texts(*given: str) -> list[dict[str, str]]:
    return [{"text": text} for text in given]


def test_a_document_ends_with_eos_and_is_split_never_cut_off(encode: Any) -> None:
    """But for a rest of one token, which is lost and counted."""
    for said, expected, sums in (
        (("ab", "abcdef"), [[*ids("ab"), EOS], ids("abcd"), [*ids("ef"), EOS]], (10, 7, 0)),
        (("abcd", "abcdefgh"), [ids("abcd"), ids("abcd"), ids("efgh")], (12, 9, 2)),
    ):
        found = encode(texts(*said))
        assert rows(found) == expected
        assert found.lengths.tolist() == [len(row) for row in expected]
        totals = found.totals
        assert (totals.tokens, totals.loss_tokens, totals.lost_tokens) == sums
        assert totals.largest_id == max(map(max, expected))


def test_every_record_becomes_rows_or_has_one_reason(encode: Any) -> None:
    records = [*texts("", "a", "ab", "abcdefgh"), {}, {"text": 1}, 7, {"text": "\ud800"}]
    reasons = ["empty", "min_tokens", "max_tokens", "missing_field", "field_not_text"]
    reasons += ["not_an_object", "lone_surrogate"]
    for layout in ("document", "concat"):
        encoded = encode(records, layout=layout, add_eos=False, min_tokens=2, max_tokens=6)
        assert [encoded.rejected[at] for at in sorted(encoded.rejected)] == reasons
        assert {*reasons} & FILTERED.keys() == {"empty", "min_tokens", "max_tokens"}
        assert rows(encoded) == [ids("ab")]
        for none in ([], [7], texts("")):
            encoded = encode(none, layout=layout)
            assert (rows(encoded), encoded.totals.tokens, encoded.totals.largest_id) == ([], 0, -1)
    # One token alone has no loss, and is filtered from samples but not from joined rows.
    assert [*encode(texts("a"), add_eos=False).rejected.values()] == ["one_token"]
    assert rows(encode(texts("a"), add_eos=False, layout="concat")) == [ids("a")]


def test_min_and_max_count_the_special_tokens_too(encode: Any) -> None:
    for limits, kept in (
        ({"min_tokens": 3}, ["ab", "abc"]),
        ({"max_tokens": 3}, ["a", "ab"]),
        ({"min_tokens": 3, "max_tokens": 3}, ["ab"]),
    ):
        found = encode(texts("a", "ab", "abc"), **limits)
        assert rows(found) == [[*ids(text), EOS] for text in kept]
        assert len(found.rejected) == 3 - len(kept)


def test_bos_and_eos_are_added_where_the_tokenizer_adds_none(encode: Any) -> None:
    for prefix, suffix, wanted, head, tail in (
        ([], [], False, [], []),
        ([], [], True, [BOS], [EOS]),
        ([BOS], [], False, [BOS], []),
        ([BOS], [], True, [BOS], [EOS]),
        ([BOS], [EOS], True, [BOS], [EOS]),
        ([], [EOS], True, [BOS], [EOS]),
        ([START], [START], True, [BOS, START], [START, EOS]),
        ([BOS, START], [START, EOS], True, [BOS, START], [START, EOS]),
    ):
        around = {"prefix_ids": prefix, "suffix_ids": suffix}
        added = {"add_bos": wanted, "add_eos": wanted, "max_seq_len": 99}
        for layout in ("document", "concat"):
            encoded = encode(texts("abc"), around, layout=layout, **added)
            assert rows(encoded) == [[*head, *ids("abc"), *tail]], (prefix, suffix, wanted)


Rows = st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=9)


@settings(max_examples=60, deadline=None)
@given(
    given=Rows,
    head=st.lists(st.integers(0, 9), max_size=2),
    tail=st.lists(st.integers(0, 9), max_size=2),
)
def test_framed_rows_are_the_lists_joined(
    given: list[list[int]], head: list[int], tail: list[int]
) -> None:
    framed = add_special_tokens(Ragged.of(given, np.uint32), head, tail, "uint16")
    assert [framed[i].tolist() for i in range(len(framed))] == [[*head, *r, *tail] for r in given]
    assert framed.values.dtype == np.uint16


@settings(max_examples=60, deadline=None)
@given(given=Rows, longest=st.integers(2, 5))
def test_split_rows_are_the_slices_longer_than_one(given: list[list[int]], longest: int) -> None:
    given = [row for row in given if len(row) > 1]
    parts, sources = split_rows(Ragged.of(given, np.uint16), longest)
    slices = [row[i : i + longest] for row in given for i in range(0, len(row), longest)]
    assert [parts[i].tolist() for i in range(len(parts))] == [s for s in slices if len(s) > 1]
    assert sources.tolist() == [i for i, row in enumerate(given) for at in range(0, len(row), longest) if len(row) > at + 1]  # fmt: skip
    columns = as_targets(parts)
    firsts, rests = columns["input_ids"], columns["labels"]
    joined = [[*firsts[i].tolist(), *rests[i].tolist()] for i in range(len(parts))]
    assert joined == [s for s in slices if len(s) > 1]
