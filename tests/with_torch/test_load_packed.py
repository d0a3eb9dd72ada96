"""Packed rows in the loader: the same lessons as unpacked, and no document sees another."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mdsmix.errors import RecipeError
from mdsmix.load import build_loader, document_mask
from mdsmix.load.collate import Batch
from tests.converting import run_recipe, write_jsonl, write_recipe
from tests.test_convert_packed import KINDS, records, streams
from tests.with_torch.load_streams import IDS, config, write_tokens

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


def test_an_encoder_has_no_positions(tmp_path: Path) -> None:
    web = {"local": str(write_tokens(tmp_path, 4))}
    with pytest.raises(RecipeError, match="leave them out"):
        build_loader(config({"t": web}, decoder_only_format=False), 2, ids=IDS, position_ids=True)
