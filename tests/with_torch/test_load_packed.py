"""Packed rows in the loader: the same lessons as unpacked, and no document sees another."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load import TokenIds, build_loader, document_mask
from mdsmix.load.collate import Batch, Collate, Packer
from mdsmix.load.training_rows import RowRules, TrainingRow, row_of
from tests.converting import run_recipe, write_jsonl, write_recipe
from tests.test_convert_packed import KINDS, records, streams
from tests.with_torch.load_streams import EOS, IDS, PAD, config, write_tokens

X = -100
WIDTH = 64


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """Documents, pairs and conversations, in `packed` and in `plain`."""
    folder = tmp_path_factory.mktemp("packed")
    source = write_jsonl(folder / "all.jsonl", records(40))
    for name, settings in (("packed", {"pack": True}), ("plain", {})):
        (folder / name).mkdir()
        keys = {"max_seq_len": WIDTH, "target_responses": "all"}
        keys |= {} if settings else {"train_loader": {"name": "finetuning"}}
        made = streams(source, **settings)
        run_recipe(write_recipe(folder / name, tokenizer_folder, streams=made, **keys))
    return folder


def batches(folder: Path, width: int = WIDTH, **more: Any) -> Iterator[Batch]:
    keys = {k: more.pop(k) for k in ("position_ids",) if k in more}
    mixed = {name: {"local": str(folder / "out" / name), "split": "train"} for name in KINDS}
    made = config(mixed, target_responses="all", num_workers=0, drop_last=False, **more)
    made["max_seq_len"] = width
    yield from build_loader(made, 4, ids=IDS, **keys)


def lessons(folder: Path) -> Counter[Any]:
    """(tokens of its document before it, token) of every position that gives a loss, after the shift by one."""
    found: Counter[Any] = Counter()
    for batch in batches(folder):
        for ids, labels, places in zip(
            *(batch[k].tolist() for k in ("input_ids", "labels", "sequence_id")), strict=True
        ):
            for at in range(1, len(ids)):
                if labels[at] != X:
                    before = [t for t, s in zip(ids[:at], places, strict=False) if s == places[at]]
                    assert labels[at] == ids[at]
                    assert before, "the first token of a document is predicted by another document"
                    found[tuple(before), ids[at]] += 1
    return found


def test_packed_rows_teach_what_unpacked_ones_do(published: Path) -> None:
    assert lessons(published / "packed") == lessons(published / "plain")


def packed_row(*documents: list[int], trained: list[int] | None = None) -> dict[str, Any]:
    ids = [t for document in documents for t in document]
    row = {
        "input_ids": np.array(ids, np.uint16),
        "starts": np.cumsum([0, *map(len, documents[:-1])]).astype(np.int32),
    }
    return row if trained is None else row | {"loss_mask": np.array(trained, np.uint8)}


def rules(width: int = 8, **more: Any) -> RowRules:
    return RowRules(ids=IDS, max_seq_len=width, **more)


def test_the_labels_of_a_row_were_settled_when_it_was_made() -> None:
    row = packed_row([5, 6], [7, 8, 9], trained=[1, 1, 1, 0, 1])
    for policies in ({}, {"target_prompts": "all", "target_responses": "all"}):
        found = row_of(row, rules(**policies))
        assert found.labels.tolist() == [X, 6, X, X, 9]
        assert found.documents.tolist() == [0, 0, 1, 1, 1]
    assert row_of(packed_row([5, 6], [7, 8]), rules()).labels.tolist() == [X, 6, X, 8]


def test_a_row_is_cut_where_the_runs_rows_end() -> None:
    with pytest.warns(UserWarning, match="longer than max_seq_len 3"):
        found = row_of(packed_row([5, 6], [7, 8], [9, 10]), rules(3))
    assert (found.input_ids.tolist(), found.documents.tolist()) == ([5, 6, 7], [0, 0, 1])
    with pytest.raises(MixRefused, match="nothing left to train on"):
        row_of(packed_row([5, 6], trained=[0, 1]), rules(1))
    with pytest.raises(MixRefused, match="nothing left to train on"):  # uncut, of another tool
        row_of(packed_row([5, 6], trained=[0, 0]), rules())


def test_a_row_that_contradicts_itself_is_refused() -> None:
    for wrong in (
        {"starts": np.array([1], np.int32)},
        {"starts": np.array([0, 2, 2], np.int32)},
        {"starts": np.array([0, 4], np.int32)},
        {"starts": np.array([], np.int32)},
        {"loss_mask": np.array([1], np.uint8)},
    ):
        with pytest.raises(MixRefused, match="contradicts its tokens"):
            row_of(packed_row([5, 6], [7, 8]) | wrong, rules())


def test_an_encoder_has_no_packed_rows_and_no_positions(tmp_path: Path) -> None:
    with pytest.raises(MixRefused, match="decoder_only_format: true"):
        row_of(packed_row([5, 6]), rules(decoder_only_format=False))
    web = {"local": str(write_tokens(tmp_path, 4))}
    with pytest.raises(RecipeError, match="leave them out"):
        build_loader(config({"t": web}, decoder_only_format=False), 2, ids=IDS, position_ids=True)


def row(*lengths: int) -> TrainingRow:
    ids = np.arange(10, 10 + sum(lengths))
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return TrainingRow(ids, ids, documents if len(lengths) > 1 else None)


def test_packed_rows_are_packed_further_and_padded_on_either_side() -> None:
    left = TokenIds(eos=EOS, pad=PAD, padding_side="left")
    for ids, places, position in (
        (IDS, [0, 0, 1, 2, 2, -1], [0, 1, 0, 0, 1, 0]),
        (left, [-1, 0, 0, 1, 2, 2], [0, 0, 1, 0, 0, 1]),
    ):
        collate = Collate(
            rules=RowRules(ids=ids, max_seq_len=6),
            packer=Packer(bins=1, max_seq_len=6),
            with_position_ids=True,
        )
        batch = collate([row(2, 1), row(2)])
        assert batch["sequence_id"].tolist() == [places]
        assert batch["position_ids"].tolist() == [position]
    collate = Collate(rules=rules(4), with_sequence_id=False, with_position_ids=True)
    batch = collate([row(3)])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0]]
    assert "sequence_id" not in batch


def test_a_model_computes_for_each_document_what_it_computes_for_it_alone(published: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=1 << 16, num_hidden_layers=2, num_key_value_heads=2, **shape)
    ).eval()
    batch = next(batches(published / "packed", position_ids=True))
    ids, places = batch["input_ids"], batch["sequence_id"]
    assert places.max() > 1
    with torch.no_grad():
        masks = {"attention_mask": document_mask(places), "position_ids": batch["position_ids"]}
        packed = model(ids, **masks).logits
        crossing = model(ids, attention_mask=batch["attention_mask"]).logits
        crossed = 0.0
        for line in range(len(ids)):
            for number in range(int(places[line].max()) + 1):
                here = places[line] == number
                alone = model(ids[line][here][None]).logits[0]
                torch.testing.assert_close(packed[line][here], alone, atol=1e-5, rtol=1e-4)
                crossed = max(crossed, float((crossing[line][here] - alone).abs().max()))
    assert crossed > 0.01, "without the mask documents are seen, so the test would notice"
