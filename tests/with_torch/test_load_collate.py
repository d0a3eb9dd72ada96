"""Rows become one padded batch; where nothing is padded, cut or packed, nothing changes."""

from typing import Any

import numpy as np
import pytest
import torch

from mdsmix.load.collate import Collate, Packer
from mdsmix.load.training_rows import RowRules, TokenIds, TrainingRow, row_of

EOS, PAD, X = 2, 1, -100
RIGHT, LEFT = TokenIds(eos=EOS, pad=PAD), TokenIds(eos=EOS, pad=PAD, padding_side="left")


def made(ids: list[int], labels: list[int] | None = None) -> TrainingRow:
    return TrainingRow(np.array(ids), np.array(ids if labels is None else labels))


def collate(width: int = 6, ids: TokenIds = RIGHT, two_sided: bool = False, **more: Any) -> Collate:
    rules = RowRules(ids=ids, max_seq_len=width, decoder_only_format=not two_sided)
    return Collate(rules=rules, **more)


def lists(batch: dict[str, torch.Tensor]) -> dict[str, list[list[int]]]:
    return {key: value.tolist() for key, value in batch.items()}


def test_rows_are_padded_on_the_right() -> None:
    batch = collate()([made([5, 6, 7], [X, 6, 7]), made([8] * 6)])
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert lists(batch) == {
        "input_ids": [[5, 6, 7, PAD, PAD, PAD], [8] * 6],
        "labels": [[X, 6, 7, X, X, X], [8] * 6],
        "attention_mask": [[1, 1, 1, 0, 0, 0], [1] * 6],
        "sequence_id": [[0, 0, 0, -1, -1, -1], [0] * 6],
    }


def test_eos_pads_where_there_is_no_padding_token() -> None:
    batch = collate(3, TokenIds(eos=EOS))([made([5, EOS], [5, EOS])])
    assert lists(batch) == {
        "input_ids": [[5, EOS, EOS]],
        "labels": [[5, EOS, X]],
        "attention_mask": [[1, 1, 0]],
        "sequence_id": [[0, 0, -1]],
    }
    assert collate(2, TokenIds(eos=EOS, pad=0))([made([5])])["input_ids"].tolist() == [[5, 0]]


def test_padding_is_trimmed_from_the_second_batch_on_or_is_as_wide_as_the_longest_row() -> None:
    rows = [made([5, 6, 7]), made([8])]
    for ids, kept in ((RIGHT, slice(0, 8)), (LEFT, slice(12, 20))):
        trimming, expected = collate(20, ids, allow_pad_trimming=True), collate(20, ids)(rows)
        assert torch.equal(trimming(rows)["input_ids"], expected["input_ids"])
        assert torch.equal(trimming(rows)["input_ids"], expected["input_ids"][:, kept])
    longest = collate(20, pad_to_longest=True, with_sequence_id=False)(rows)
    assert longest["labels"].tolist() == [[5, 6, 7], [8, X, X]]
    assert "sequence_id" not in longest


def test_an_encoder_decoder_batch_shifts_its_targets() -> None:
    batch = collate(4, LEFT, two_sided=True)([made([5, 6], [7, 8, EOS])])
    assert lists(batch) == {
        "input_ids": [[PAD, PAD, 5, 6]],
        "attention_mask": [[0, 0, 1, 1]],
        "labels": [[7, 8, EOS, X]],
        "decoder_input_ids": [[PAD, 7, 8, EOS]],
        "decoder_attention_mask": [[True, True, True, False]],
    }


def test_an_encoder_decoder_batch_is_trimmed_on_each_side() -> None:
    trimming = collate(32, two_sided=True, allow_pad_trimming=True)
    rows = [made(list(range(5, 17)), [7, 8, EOS])]
    assert {v.shape[1] for v in trimming(rows).values()} == {32}
    widths = {key: value.shape[1] for key, value in trimming(rows).items()}
    assert (widths["input_ids"], widths["labels"]) == (16, 8)


def test_packed_rows_do_not_predict_each_others_first_token() -> None:
    packing = collate(6, packer=Packer(bins=1, max_seq_len=6))
    assert lists(packing([made([8, 9]), made([5, 6, 7])])) == {
        "input_ids": [[5, 6, 7, 8, 9, PAD]],
        "labels": [[5, 6, 7, X, 9, X]],
        "attention_mask": [[1, 1, 1, 1, 1, 0]],
        "sequence_id": [[0, 0, 0, 1, 1, -1]],
    }


@pytest.mark.parametrize(
    ("starts", "documents", "places"),
    [
        (False, [0, 0, 1, 1], [0, 0, 1, 1, 2, 2, 2, -1]),
        (True, [0, 1, 1, 2], [0, 1, 1, 2, 3, 3, 3, -1]),
    ],
)
def test_separators_tell_documents_of_pretraining_rows_apart_and_none_of_a_chat(
    starts: bool, documents: list[int], places: list[int]
) -> None:
    rules = RowRules(ids=RIGHT, max_seq_len=8, separator=EOS, separator_starts=starts)
    text = row_of({"tokens": np.array([4, EOS, 5, EOS])}, rules)
    chat = row_of({"input_ids": np.array([7, EOS]), "labels": np.array([8])}, rules)
    batch = Collate(rules=rules)([text, chat])
    assert batch["sequence_id"].tolist() == [documents + [-1] * 4, [0] * 4 + [-1] * 4]
    batch = Collate(rules=rules, packer=Packer(bins=1, max_seq_len=8))([made([7, EOS, 8]), text])
    assert batch["input_ids"].tolist() == [[4, EOS, 5, EOS, 7, EOS, 8, PAD]]
    assert batch["sequence_id"].tolist() == [places]
    assert row_of({"tokens": np.array([3, 5, EOS, 6])}, rules).documents.tolist() == (
        [0, 0, 1, 1] if starts else [0, 0, 0, 1]
    )
