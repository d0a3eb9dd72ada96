"""Rows and batches, compared with values written by hand: a sample becomes the row that
LLM-Foundry's collators make of it, and rows are packed and padded to a batch.
"""

from __future__ import annotations

import warnings
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch

from mdsmix.errors import MixRefused
from mdsmix.load import document_mask, training_rows
from mdsmix.load.collate import Collate, Packer, find_best_ratio
from mdsmix.load.training_rows import RowRules, TokenIds, TrainingRow, make_training_row
from tests.with_torch.load_streams import EOS, IDS, PAD

X = -100
NO_EOS = TokenIds(eos=None, pad=PAD)
LEFT = TokenIds(eos=EOS, pad=PAD, padding_side="left")
FIRST = {"input_ids": [10, 11, 12], "labels": [20, 21]}
CHAT = {"turns": [FIRST, {"input_ids": [13], "labels": [22, 23]}]}
IDS_OF_CHAT = [10, 11, 12, 20, 21, 13, 22, 23, EOS]


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test warn of cut rows as a new run does."""
    nothing = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(training_rows, "last_warned", nothing)


def rules(max_seq_len: int = 16, ids: TokenIds = IDS, **settings: Any) -> RowRules:
    return RowRules(ids=ids, max_seq_len=max_seq_len, **settings)


def row(sample: dict[str, Any], **settings: Any) -> tuple[list[int], list[int]]:
    """Return ids and labels of a sample's row."""
    training_row = make_training_row(sample, rules(**settings))
    assert training_row.input_ids.dtype == training_row.labels.dtype == np.int64
    return training_row.input_ids.tolist(), training_row.labels.tolist()


def pair(context: list[int], target: list[int], dtype: Any = np.uint16) -> dict[str, Any]:
    return {"input_ids": np.array(context, dtype), "labels": np.array(target, dtype)}


def packed(*documents: list[int], trained: list[int] | None = None) -> dict[str, Any]:
    starts = np.cumsum([0, *map(len, documents[:-1])]).astype(np.int32)
    sample = {"input_ids": np.concatenate(documents).astype(np.int32), "starts": starts}
    if trained is not None:
        sample["loss_mask"] = np.array(trained, np.uint8)
    return sample


def test_the_target_policies_decide_which_tokens_are_trained() -> None:
    for prompts, responses, labels in (
        ("none", "last", [X, X, X, X, X, X, 22, 23, EOS]),
        ("none", "all", [X, X, X, 20, 21, X, 22, 23, EOS]),
        ("all", "last", [10, 11, 12, X, X, 13, 22, 23, EOS]),
        ("all", "all", IDS_OF_CHAT),
        ("length>=3", "last", [10, 11, 12, X, X, X, 22, 23, EOS]),
        ("length>=4", "last", [X, X, X, X, X, X, 22, 23, EOS]),
    ):
        actual = row(CHAT, target_prompts=prompts, target_responses=responses)
        assert actual == (IDS_OF_CHAT, labels), (prompts, responses)


def test_only_the_last_response_gets_an_eos_which_is_cut_without_a_warning() -> None:
    for target in ([20], [20, EOS]):
        assert row(pair([10], target)) == ([10, 20, EOS], [X, 20, EOS])
    assert row(pair([10], [20]), ids=NO_EOS) == ([10, 20], [X, 20])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert row(pair([10], [11, 12, 13]), max_seq_len=4)[1] == [X, 11, 12, 13]
    with pytest.warns(UserWarning, match="longer than max_seq_len 4:"):
        assert row(pair([10], [11, 12, 13, 14]), max_seq_len=4)[0] == [10, 11, 12, 13]
    with pytest.raises(MixRefused, match="nothing left to train on"):
        row(pair([10, 11, 12, 13, 14], [20]), max_seq_len=4)


def _warnings_of_cuts(max_seq_len: int) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            row(pair([10], [11, 12, 13, 14, 15]), max_seq_len=max_seq_len)
    return len(caught)


def _send_warnings_of_cuts(counts: Any) -> None:
    counts.put(_warnings_of_cuts(3))


def test_one_process_of_many_warns_that_rows_are_cut() -> None:
    """Workers of a loader are forks, and so are the passes of a bench, each with its own workers.

    Four forks at once. A Pool with `maxtasksperchild=1` cannot be used here: it may start another
    worker while it is closed, and then waits for that worker forever.
    """
    fork = get_context("fork")
    counts = fork.SimpleQueue()
    workers = [fork.Process(target=_send_warnings_of_cuts, args=(counts,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(counts.get() for _ in workers) == [0, 0, 0, 1]
    assert (_warnings_of_cuts(3), _warnings_of_cuts(4)) == (0, 1)


def test_every_integer_dtype_is_read_and_bytes_by_the_dtype_that_the_config_names() -> None:
    for dtype in (np.uint8, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        assert row({"tokens": np.array([10, 11], dtype)}) == ([10, 11], [10, 11])
        assert row(pair([10], [20, EOS], dtype)) == ([10, 20, EOS], [X, 20, EOS])
    assert row({"tokens": np.array([10, 11], np.int64).tobytes()}) == ([10, 11], [10, 11])
    columns = {k: v.tobytes() for k, v in pair([10], [20, EOS]).items()}
    assert row(columns, token_encoding_type="uint16") == ([10, 20, EOS], [X, 20, EOS])


def test_a_pretraining_row_trains_every_token_except_the_tokenizers_own_padding() -> None:
    ids = [10, EOS, 11, PAD]
    tokens = {"tokens": np.array(ids, np.uint16), "id": 7}
    assert row(tokens) == (ids, [10, EOS, 11, X])
    assert row(tokens, ids=TokenIds(eos=EOS, pad=EOS)) == (ids, [10, X, 11, PAD])
    assert row(tokens, ids=TokenIds(eos=EOS)) == (ids, ids)
    assert row(tokens, max_seq_len=2) == ([10, EOS], [10, EOS])


def test_an_encoder_gets_everything_before_the_last_response_and_cut_sides_end_in_eos() -> None:
    sides = row(CHAT, decoder_only_format=False)
    assert sides == ([10, 11, 12, 20, 21, 13], [22, 23, EOS])
    long = {"turns": [{"input_ids": [10, 11, 12, 13], "labels": [20, 21, 22]}]}
    with pytest.warns(UserWarning, match="cuts rows"):
        sides = row(long, max_seq_len=3, decoder_only_format=False)
    assert sides == ([10, 11, EOS], [20, 21, EOS])


def test_the_target_policies_do_not_change_the_labels_of_a_packed_row() -> None:
    sample = packed([5, 6], [7, 8, 9], trained=[1, 1, 1, 0, 1])
    for policies in ({}, {"target_prompts": "all", "target_responses": "all"}):
        training_row = make_training_row(sample, rules(**policies))
        assert training_row.labels.tolist() == [X, 6, X, X, 9]
        assert training_row.documents.tolist() == [0, 0, 1, 1, 1]
    assert row(packed([5, 6], [7, 8]))[1] == [X, 6, X, 8]
    with pytest.warns(UserWarning, match="longer than max_seq_len 3"):
        training_row = make_training_row(packed([5, 6], [7, 8], [9, 10]), rules(3))
    assert training_row.input_ids.tolist() == [5, 6, 7]
    assert training_row.documents.tolist() == [0, 0, 1]


PACKED = packed([5, 6], [7, 8])
WRONG_STARTS = ([1], [0, 2, 2], [0, 4], [])
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"text": "hello"}, {}, "the columns of this sample are text, but the loader"),
    ({"turns": []}, {}, "has no turns"),
    ({"turns": [{"input_ids": [1]}]}, {}, "lacks input_ids or labels"),
    ({"turns": [{"input_ids": [10], "labels": []}]}, {}, "last response is empty"),
    # The same without EOS, which is not appended then.
    ({"turns": [{"input_ids": [10], "labels": []}]}, {"ids": NO_EOS}, "last response is empty"),
    (pair([10], []), {"ids": NO_EOS}, "last response is empty"),
    (pair([10], []), {"ids": NO_EOS, "decoder_only_format": False}, "last response is empty"),
    (packed([5, 6], [-100, 8]), {}, "contains the token id -100"),
    ({"tokens": np.array([1.5])}, {}, "must contain bytes or a row of integers"),
    ({"tokens": np.array([10])}, {"decoder_only_format": False}, "no input for an encoder"),
    (PACKED, {"decoder_only_format": False}, "decoder_only_format: true"),
    (packed([5, 6], trained=[0, 1]), {"max_seq_len": 1}, "nothing left to train on"),
    (packed([5, 6], trained=[0, 0]), {}, "nothing left to train on"),
    *(
        (PACKED | {"starts": np.int32(starts)}, {}, "the column `starts` of this packed row")
        for starts in WRONG_STARTS
    ),
    (PACKED | {"loss_mask": np.uint8([1])}, {}, "loss_mask has 1 values for a packed row of"),
]


def test_a_sample_that_cannot_be_trained_is_refused_in_one_sentence() -> None:
    for sample, settings, message in REFUSED:
        with pytest.raises(MixRefused, match=message):
            print(sample, row(sample, **settings))


def training_row_of(ids: Any, labels: list[int] | None = None) -> TrainingRow:
    return TrainingRow(np.array(ids), np.array(ids if labels is None else labels))


def rows_of_sizes(*sizes: int) -> list[TrainingRow]:
    return [training_row_of([size] * size) for size in sizes]


def list_sizes(bins: list[list[TrainingRow]]) -> list[list[int]]:
    return [[row.input_ids.size for row in packed] for packed in bins]


def test_the_longest_rows_are_packed_first_and_rows_that_do_not_fit_wait_for_the_next_batch() -> (
    None
):
    assert list_sizes(Packer(bins=2, max_seq_len=10).pack(rows_of_sizes(3, 7, 2, 5))) == [
        [7, 3],
        [5, 2],
    ]
    assert list_sizes(Packer(bins=3, max_seq_len=10).pack(rows_of_sizes(1, 2, 3))) == [
        [3],
        [2],
        [1],
    ]
    for keep, waiting in {None: [[8], [7]], 0: [], 1: [[8]], 5: [[8], [7]]}.items():
        packer = Packer(bins=1, max_seq_len=10, keep=keep)
        assert list_sizes(packer.pack(rows_of_sizes(9, 8, 7))) == [[9]]
        assert list_sizes(packer.waiting) == waiting
    assert list_sizes(packer.pack(rows_of_sizes(2))) == [[8, 2]]
    assert list_sizes(packer.waiting) == [[7]]


def test_the_best_ratio_is_the_last_that_leaves_no_row_waiting() -> None:
    ratios = {4: 1.0, 8: 2.0, 12: 3.0}
    for length, best in ((5, 2), (3, 3), (6, 1)):
        assert find_best_ratio(rows_of_sizes(*[length] * 24), ratios, 4, 10) == best
    assert find_best_ratio(rows_of_sizes(1, 1, 1), ratios, 4, 10) == 1, "there is no full batch"


def collate(
    width: int = 6, ids: TokenIds = IDS, is_encoder_decoder: bool = False, **settings: Any
) -> Collate:
    return Collate(rules=rules(width, ids, decoder_only_format=not is_encoder_decoder), **settings)


def as_lists(batch: dict[str, torch.Tensor]) -> dict[str, list[list[int]]]:
    assert {tensor.dtype for tensor in batch.values()} <= {torch.int64, torch.bool}
    return {key: value.tolist() for key, value in batch.items()}


def test_rows_are_padded_on_the_tokenizers_side_by_its_padding_token_or_eos() -> None:
    assert as_lists(
        collate()([training_row_of([5, 6, 7], [X, 6, 7]), training_row_of([8] * 6)])
    ) == {
        "input_ids": [[5, 6, 7, PAD, PAD, PAD], [8] * 6],
        "labels": [[X, 6, 7, X, X, X], [8] * 6],
        "attention_mask": [[1, 1, 1, 0, 0, 0], [1] * 6],
        "sequence_id": [[0, 0, 0, -1, -1, -1], [0] * 6],
    }
    left = collate(4, LEFT, with_sequence_id=False)([training_row_of([5, 6])])
    padded = {"input_ids": [[PAD, PAD, 5, 6]], "labels": [[X, X, 5, 6]]}
    assert as_lists(left) == padded | {"attention_mask": [[0, 0, 1, 1]]}
    batch = collate(3, TokenIds(eos=2))([training_row_of([5, 2], [5, 2])])
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[5, 2, 2]], [[5, 2, X]])
    assert collate(2, TokenIds(eos=2, pad=0))([training_row_of([5])])["input_ids"].tolist() == [
        [5, 0]
    ]


def test_padding_is_trimmed_from_the_second_batch_on_or_ends_with_the_longest_row() -> None:
    rows = [training_row_of([5, 6, 7]), training_row_of([8])]
    for ids, columns in ((IDS, slice(0, 8)), (LEFT, slice(12, 20))):
        trimming = collate(20, ids, allow_pad_trimming=True)
        expected = collate(20, ids)(rows)
        assert torch.equal(trimming(rows)["input_ids"], expected["input_ids"])
        assert torch.equal(trimming(rows)["input_ids"], expected["input_ids"][:, columns])
    longest = collate(20, pad_to_longest=True, with_sequence_id=False)(rows)
    assert longest["labels"].tolist() == [[5, 6, 7], [8, X, X]]
    assert "sequence_id" not in longest


def test_an_encoder_decoder_batch_shifts_its_targets_and_is_trimmed_on_each_side() -> None:
    assert as_lists(
        collate(4, LEFT, is_encoder_decoder=True)([training_row_of([5, 6], [7, 8, EOS])])
    ) == {
        "input_ids": [[PAD, PAD, 5, 6]],
        "attention_mask": [[0, 0, 1, 1]],
        "labels": [[7, 8, EOS, X]],
        "decoder_input_ids": [[PAD, 7, 8, EOS]],
        "decoder_attention_mask": [[True, True, True, False]],
    }
    trimming = collate(32, is_encoder_decoder=True, allow_pad_trimming=True)
    rows = [training_row_of(list(range(5, 17)), [7, 8, EOS])]
    assert {v.shape[1] for v in trimming(rows).values()} == {32}
    widths = {key: value.shape[1] for key, value in trimming(rows).items()}
    assert (widths["input_ids"], widths["labels"]) == (16, 8)


def of_documents(*lengths: int) -> TrainingRow:
    row = training_row_of(np.arange(10, 10 + sum(lengths)))
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return row._replace(documents=documents if len(lengths) > 1 else None)


def test_packed_rows_are_packed_further_and_padded_on_either_side() -> None:
    """The first token of a document is never a target."""
    for ids, documents, positions in (
        (IDS, [0, 0, 1, 2, 2, -1], [0, 1, 0, 0, 1, 0]),
        (LEFT, [-1, 0, 0, 1, 2, 2], [0, 0, 1, 0, 0, 1]),
    ):
        packing = collate(6, ids, packer=Packer(bins=1, max_seq_len=6), with_position_ids=True)
        batch = packing([of_documents(2), of_documents(2, 1)])
        assert batch["sequence_id"].tolist() == [documents]
        assert batch["position_ids"].tolist() == [positions]
        is_token = batch["attention_mask"].bool()
        assert batch["input_ids"][is_token].tolist() == [10, 11, 12, 10, 11]
        assert batch["labels"][is_token].tolist() == [10, 11, 12, X, 11]
        assert (batch["labels"][~is_token], batch["input_ids"][~is_token]) == (X, PAD)
    batch = collate(4, with_sequence_id=False, with_position_ids=True)([of_documents(3)])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0]]
    assert "sequence_id" not in batch


def test_a_model_computes_each_document_of_a_row_as_if_it_were_alone() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=99, num_hidden_layers=2, intermediate_size=64, **shape)
    model = LlamaForCausalLM(config).eval()
    rows = [of_documents(9, 5, 12), of_documents(6, 20)]
    batch = collate(32, with_position_ids=True)(rows)
    ids = batch["input_ids"]
    sequence_id = batch["sequence_id"]
    with torch.no_grad():
        masks = {
            "attention_mask": document_mask(sequence_id),
            "position_ids": batch["position_ids"],
        }
        masked = model(ids, **masks).logits
        by_positions = model(ids, position_ids=batch["position_ids"], use_cache=False).logits
        unmasked = model(ids, attention_mask=batch["attention_mask"]).logits
        largest_difference = 0.0
        for line, number in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
            is_document = sequence_id[line] == number
            alone = model(ids[line][is_document][None]).logits[0]
            for logits in (masked, by_positions):
                torch.testing.assert_close(logits[line][is_document], alone, atol=1e-5, rtol=1e-4)
            difference = float((unmasked[line][is_document] - alone).abs().max())
            largest_difference = max(largest_difference, difference)
    assert largest_difference > 0.01, "without the mask the results differ"


def test_separators_divide_pretraining_rows_into_documents_but_not_chats() -> None:
    for starts, documents, packed_documents in (
        (False, [0, 0, 1, 1], [0, 0, 1, 1, 2, 2, 2, -1]),
        (True, [0, 1, 1, 2], [0, 1, 1, 2, 3, 3, 3, -1]),
    ):
        row_rules = rules(8, separator=EOS, separator_starts=starts)
        text = make_training_row({"tokens": np.array([4, EOS, 5, EOS])}, row_rules)
        chat = make_training_row(
            {"input_ids": np.array([7, EOS]), "labels": np.array([8])}, row_rules
        )
        batch = Collate(rules=row_rules)([text, chat])
        assert batch["sequence_id"].tolist() == [documents + [-1] * 4, [0] * 4 + [-1] * 4]
        batch = Collate(rules=row_rules, packer=Packer(bins=1, max_seq_len=8))(
            [training_row_of([7, EOS, 8]), text]
        )
        assert batch["input_ids"].tolist() == [[4, EOS, 5, EOS, 7, EOS, 8, PAD]]
        assert batch["sequence_id"].tolist() == [packed_documents]
