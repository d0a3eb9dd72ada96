"""The columns follow from the recipe's one dial, never from a record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mdsmix.kinds import kind_of_stream
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, TokenizerSpec
from tests.styles import letters

TEXT = SourceSpec(path=["a.jsonl"], text="text")
PAIR = SourceSpec(path=["a.jsonl"], prompt="prompt", response="response")
CHAT = SourceSpec(path=["a.jsonl"], messages="messages")
PLAIN = {"input_ids": "ndarray:uint16", "labels": "ndarray:uint16"}


@pytest.mark.parametrize(
    ("loader", "source", "settings", "columns"),
    [
        ("text", TEXT, {"layout": "concat"}, {"tokens": "ndarray:uint16:32"}),
        ("text", TEXT, {"layout": "document"}, {"tokens": "ndarray:uint16"}),
        (
            "finetuning",
            TEXT,
            {"layout": "concat"},
            {"input_ids": "ndarray:uint16:1", "labels": "ndarray:uint16:31"},
        ),
        ("finetuning", TEXT, {"layout": "document"}, PLAIN),
        ("finetuning", PAIR, {}, PLAIN),
        ("finetuning", CHAT, {}, {"turns": "json"}),
        ("finetuning", CHAT, {"columns": "compact"}, PLAIN),
        ("mdsmix", TEXT, {"layout": "concat"}, {"tokens": "ndarray:uint16:32"}),
        ("mdsmix", TEXT, {"layout": "document"}, {"tokens": "ndarray:uint16"}),
        ("mdsmix", PAIR, {}, PLAIN),
        ("mdsmix", CHAT, {}, {"turns": "json"}),
    ],
)
@pytest.mark.parametrize("vocab_size", [1 << 16, (1 << 16) + 1])
def test_the_table(
    tmp_path: Path,
    loader: str,
    source: SourceSpec,
    settings: dict[str, Any],
    columns: dict[str, str],
    vocab_size: int,
) -> None:
    kind = "pretraining" if source is TEXT else "finetuning"
    stream = StreamSpec(name="a", kind=kind, source=source, **settings)  # type: ignore[arg-type]
    recipe = Recipe(
        folder=tmp_path,
        tokenizer=TokenizerSpec(name="t"),
        max_seq_len=32,
        streams={"a": stream},
        train_loader={"name": loader},
    )
    tokenizer = replace(letters(tmp_path), vocab_size=vocab_size)
    kind = kind_of_stream(stream)
    assert kind is not None
    found = kind.settings(recipe, stream, tokenizer)["columns"]
    if vocab_size > 1 << 16:
        columns = {name: spelled.replace("uint16", "int32") for name, spelled in columns.items()}
    assert found == columns
