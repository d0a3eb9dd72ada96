"""A sample becomes the row that LLM-Foundry's collators would make of it; expectations are worked by hand."""

import warnings
from typing import Any

import numpy as np
import pytest

from mdsmix.errors import MixRefused
from mdsmix.load.training_rows import RowRules, TokenIds, TrainingRow, row_of

EOS, PAD, X = 0, 1, -100
CHAT = {
    "turns": [
        {"input_ids": [10, 11, 12], "labels": [20, 21]},
        {"input_ids": [13], "labels": [22, 23]},
    ]
}
IDS_OF_CHAT = [10, 11, 12, 20, 21, 13, 22, 23, EOS]


def rules(max_seq_len: int = 16, ids: TokenIds | None = None, **settings: Any) -> RowRules:
    return RowRules(ids=ids or TokenIds(eos=EOS, pad=PAD), max_seq_len=max_seq_len, **settings)


def row(sample: dict[str, Any], **settings: Any) -> tuple[list[int], list[int]]:
    made = row_of(sample, rules(**settings))
    assert made.input_ids.dtype == made.labels.dtype == np.int64
    return made.input_ids.tolist(), made.labels.tolist()


def pair(context: list[int], target: list[int], dtype: Any = np.uint16) -> dict[str, Any]:
    return {"input_ids": np.array(context, dtype), "labels": np.array(target, dtype)}


def test_the_policies_say_what_is_trained_on() -> None:
    for prompts, responses, labels in (
        ("none", "last", [X, X, X, X, X, X, 22, 23, EOS]),
        ("none", "all", [X, X, X, 20, 21, X, 22, 23, EOS]),
        ("all", "last", [10, 11, 12, X, X, 13, 22, 23, EOS]),
        ("all", "all", IDS_OF_CHAT),
        ("length>=3", "last", [10, 11, 12, X, X, X, 22, 23, EOS]),
        ("length>=4", "last", [X, X, X, X, X, X, 22, 23, EOS]),
        ("length>=1", "all", IDS_OF_CHAT),
    ):
        found = row(CHAT, target_prompts=prompts, target_responses=responses)
        assert found == (IDS_OF_CHAT, labels), (prompts, responses)


def test_only_the_last_response_is_ended_and_only_where_it_is_not() -> None:
    assert row(pair([10], [20])) == ([10, 20, EOS], [X, 20, EOS])
    assert row(pair([10], [20, EOS])) == ([10, 20, EOS], [X, 20, EOS])
    assert row(pair([10], [20]), ids=TokenIds(eos=None, pad=PAD)) == ([10, 20], [X, 20])


def test_a_chunk_loses_only_the_eos_that_was_added_and_that_is_no_news() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row(pair([10], [11, 12, 13]), max_seq_len=4)
    with pytest.warns(UserWarning, match="max_seq_len 4 are cut"):
        assert row(pair([10], [11, 12, 13, 14]), max_seq_len=4)[0] == [10, 11, 12, 13]


def test_every_integer_dtype_is_read_and_bytes_as_the_encoding_that_the_config_names() -> None:
    for dtype in (np.uint8, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        assert row({"tokens": np.array([10, 11], dtype)}) == ([10, 11], [10, 11])
        assert row(pair([10], [20, EOS], dtype)) == ([10, 20, EOS], [X, 20, EOS])
    assert row({"tokens": np.array([10, 11], np.int64).tobytes()}) == ([10, 11], [10, 11])
    columns = {k: v.tobytes() for k, v in pair([10], [20, EOS]).items()}
    assert row(columns, token_encoding_type="uint16") == ([10, 20, EOS], [X, 20, EOS])


def test_a_pretraining_row_trains_every_token_but_the_tokenizers_own_padding() -> None:
    tokens = {"tokens": np.array([10, EOS, 11, PAD], np.uint16)}
    ids = [10, EOS, 11, PAD]
    assert row(tokens) == (ids, [10, EOS, 11, X])
    assert row(tokens, ids=TokenIds(eos=EOS, pad=EOS)) == (ids, [10, X, 11, PAD])
    assert row(tokens, ids=TokenIds(eos=EOS)) == (ids, ids)
    assert row(tokens, max_seq_len=2) == ([10, EOS], [10, EOS])


def test_an_encoder_gets_all_but_the_last_response_and_cut_sides_end_in_eos() -> None:
    made: TrainingRow = row_of(CHAT, rules(decoder_only_format=False))
    assert made.input_ids.tolist() == [10, 11, 12, 20, 21, 13]
    assert made.labels.tolist() == [22, 23, EOS]
    long = {"turns": [{"input_ids": [10, 11, 12, 13], "labels": [20, 21, 22]}]}
    with pytest.warns(UserWarning, match="are cut"):
        sides = row(long, max_seq_len=3, decoder_only_format=False)
    assert sides == ([10, 11, EOS], [20, 21, EOS])


def test_what_cannot_be_trained_on_is_refused_in_a_sentence() -> None:
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"text": "hello"}, {}, "its columns text hold no tokens"),
        ({"turns": []}, {}, "holds no turns"),
        ({"turns": [{"input_ids": [1]}]}, {}, "lacks input_ids or labels"),
        ({"turns": [{"input_ids": [10], "labels": []}]}, {}, "last response is empty"),
        ({"tokens": np.array([1.5])}, {}, "not bytes or a row of integers"),
        ({"tokens": np.array([10])}, {"decoder_only_format": False}, "no encoder input"),
    ]
    for sample, settings, why in refused:
        with pytest.raises(MixRefused, match=why):
            row(sample, **settings)
