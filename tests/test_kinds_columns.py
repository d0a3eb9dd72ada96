"""The columns follow from the recipe's one dial, never from a record."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from mdsmix.kinds import kind_of_stream
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, TokenizerSpec
from tests.styles import letters

TEXT = SourceSpec(path=["a.jsonl"], text="text")
PAIR = SourceSpec(path=["a.jsonl"], prompt="prompt", response="response")
CHAT = SourceSpec(path=["a.jsonl"], messages="messages")
PLAIN = {"input_ids": "ndarray:uint16", "labels": "ndarray:uint16"}
CONCAT, DOCUMENT = {"layout": "concat"}, {"layout": "document"}
TABLE: list[tuple[str, SourceSpec, dict[str, Any], dict[str, str]]] = [
    ("text", TEXT, CONCAT, {"tokens": "ndarray:uint16:32"}),
    ("text", TEXT, DOCUMENT, {"tokens": "ndarray:uint16"}),
    ("finetuning", TEXT, CONCAT, {"input_ids": "ndarray:uint16:1", "labels": "ndarray:uint16:31"}),
    ("finetuning", TEXT, DOCUMENT, PLAIN),
    ("finetuning", PAIR, {}, PLAIN),
    ("finetuning", CHAT, {}, {"turns": "json"}),
    ("finetuning", CHAT, {"columns": "compact"}, PLAIN),
    ("mdsmix", TEXT, CONCAT, {"tokens": "ndarray:uint16:32"}),
    ("mdsmix", TEXT, DOCUMENT, {"tokens": "ndarray:uint16"}),
    ("mdsmix", PAIR, {}, PLAIN),
    ("mdsmix", CHAT, {}, {"turns": "json"}),
]


def test_the_table(tmp_path: Path) -> None:
    small = letters(tmp_path)
    for loader, source, settings, columns in TABLE:
        word = "pretraining" if source is TEXT else "finetuning"
        stream = StreamSpec(name="a", kind=word, source=source, **settings)
        recipe = Recipe(
            folder=tmp_path,
            tokenizer=TokenizerSpec(name="t"),
            max_seq_len=32,
            streams={"a": stream},
            train_loader={"name": loader},
        )
        kind = kind_of_stream(stream)
        assert kind is not None
        for size, dtype in ((1 << 16, "uint16"), ((1 << 16) + 1, "int32")):
            found = kind.settings(recipe, stream, replace(small, vocab_size=size))["columns"]
            wanted = {name: spelled.replace("uint16", dtype) for name, spelled in columns.items()}
            assert found == wanted, (loader, source, settings)
