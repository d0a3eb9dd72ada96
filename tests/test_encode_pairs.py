"""What is cut from a row could not train; what is kept trains as the whole row would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdsmix.encode.base import Encoded
from mdsmix.encode.pairs import cut, encode_pairs
from mdsmix.encode.targets import Targets
from mdsmix.ragged import Ragged
from tests.styles import EOS, letters


@pytest.fixture
def encode(tmp_path: Path) -> Any:
    def run(contexts: list[list[int]], targets: list[list[int]], **policy: Any) -> Encoded:
        rows = (Ragged.of(part, "uint16") for part in (contexts, targets))
        return encode_pairs(*rows, Targets(**policy), letters(tmp_path), [], 0)

    return run


def columns(encoded: Encoded) -> list[tuple[list[int], list[int]]]:
    ids, labels = encoded.columns["input_ids"], encoded.columns["labels"]
    return [(ids[i].tolist(), labels[i].tolist()) for i in range(len(ids))]


def test_rows_that_fit_are_kept_as_they_are(encode: Any) -> None:
    found = encode([[5, 6], [7]], [[8], [9, EOS]], max_seq_len=3)
    assert columns(found) == [([5, 6], [8]), ([7], [9, EOS])]
    assert (found.tokens, found.lost_tokens, found.largest_id) == (6, 0, 9)
    # 8 trains, the EOS that the collator adds to it is cut off; 9 and its own EOS train.
    assert found.loss_tokens == 1 + 2
    assert found.lengths.tolist() == [3, 3]


def test_a_long_response_is_cut_where_the_row_ends(encode: Any) -> None:
    found = encode([[5, 6]], [[7, 8, 9, EOS]], max_seq_len=4)
    assert columns(found) == [([5, 6], [7, 8])]
    assert (found.loss_tokens, found.lost_tokens) == (2, 2)


def test_a_long_trained_prompt_leaves_one_token_to_the_response(encode: Any) -> None:
    """Foundry's collator reads the last token of the target, and cuts it off afterwards."""
    found = encode([[5, 6, 7, 8]], [[9, EOS]], max_seq_len=3, target_prompts="all")
    assert columns(found) == [([5, 6, 7], [9])]
    assert (found.loss_tokens, found.lost_tokens) == (2, 2)


def test_an_encoder_context_ends_in_eos_where_it_is_cut(encode: Any) -> None:
    policy = {"max_seq_len": 3, "decoder_only_format": False}
    found = encode([[5, 6, 7, 8], [5, 6, 7]], [[9], [9, 8, 7, 6]], **policy)
    assert columns(found) == [([5, 6, EOS], [9]), ([5, 6, 7], [9, 8, 7])]
    assert found.loss_tokens == 2 + 3


def test_no_rows_give_empty_columns(encode: Any) -> None:
    found = encode([], [], max_seq_len=3)
    assert columns(found) == []
    assert (found.tokens, found.loss_tokens, found.largest_id) == (0, 0, -1)


def test_cut_takes_a_stretch_of_each_row() -> None:
    rows = Ragged.of([[1, 2, 3], [], [4, 5]], "uint16")
    found = cut(rows, np.array([1, 0, 0]), np.array([2, 0, 1]))
    assert [found[i].tolist() for i in range(3)] == [[2, 3], [], [4]]
    assert cut(rows, np.zeros(3, int), rows.lengths) is rows
