"""A stranger adds a kind of stream as one file and one line that registers it; a shape and a format: test_docs_contributing.py."""

from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdsmix.encode.encoded import Encoded, encoded
from mdsmix.encode.labels import Lengths
from mdsmix.kinds import KINDS, Kind
from mdsmix.ragged import Ragged
from mdsmix.shapes import SHAPES, Shape
from mdsmix.shapes.shape import RawRecord
from mdsmix.shards.codecs import CODECS, Codec
from tests.converting import mdsmix, samples, token_rows, write_jsonl, write_recipe

DATA = [{"q": "hello", "a": "world"}, {"q": 3}, {"q": "one", "a": "two"}]


class Length(int):
    """What the shape of the kind below gives."""


class CountedQuestions(Kind):
    """A kind: each record is a row that begins with the length of its question."""

    name, word, reads, has_targets = "lengths", "finetuning", Length, True

    @classmethod
    def settings(cls, recipe: Any, stream: Any, tokenizer: Any) -> dict[str, Any]:
        columns = ("input_ids", "labels")
        return {"columns": dict.fromkeys(columns, f"ndarray:{tokenizer.dtype}")}

    def encode(self, records: list[Length]) -> Encoded:
        rows = Ragged.of([[int(n)] for n in records], np.uint16)
        ends = Ragged.of([[5] for _ in records], np.uint16)
        count = len(records)
        return encoded({"input_ids": rows, "labels": ends}, [rows, ends], range(count), count)

    def losses(self, tokens: Any, eos: int | None) -> Lengths:
        return np.ones(len(tokens.turns) - 1, np.int64)


def _read_length(raw: RawRecord) -> Length | str:
    question = raw.record["q"]
    return Length(len(question)) if isinstance(question, str) else "no_question"


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kind, and a shape that gives what it reads."""
    monkeypatch.setitem(SHAPES, "length", Shape(name="length", gives=Length, parse=_read_length))
    KINDS.append(CountedQuestions)
    yield
    KINDS.pop()


def converted(folder: Path, tokenizer: Path, shape: str) -> Path:
    source = {"path": str(write_jsonl(folder / "a.jsonl", DATA)), "shape": shape}
    recipe = write_recipe(folder, tokenizer, max_bad=1.0, streams={"quiz": {"kind": "finetuning", "source": source}})  # fmt: skip
    for command in (("convert", recipe), ("check", recipe), ("inspect", folder / "out/quiz"), ("verify", folder / "out/quiz")):  # fmt: skip
        answer = mdsmix(*command)
        assert answer.code == 0, answer.out + answer.err
    return recipe


class Scored(CountedQuestions):
    """The kind above with one more column, of an encoding that Streaming has and mdsmix does not know yet."""

    @classmethod
    def settings(cls, recipe: Any, stream: Any, tokenizer: Any) -> dict[str, Any]:
        columns = super().settings(recipe, stream, tokenizer)["columns"]
        return {"columns": columns | {"score": "str_decimal"}}

    def encode(self, records: list[Length]) -> Encoded:
        encoded = super().encode(records)
        scores = Ragged.of([f"{n}.50".encode() for n in records], np.uint8)
        return replace(encoded, columns={**encoded.columns, "score": scores})


@pytest.mark.usefixtures("lengths")
def test_a_kind_is_one_class_and_one_line_and_so_is_a_codec(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a shape that no kind of that word reads is refused."""
    monkeypatch.setitem(
        CODECS, "str_decimal", lambda: Codec(decode=lambda data: Decimal(data.decode()))
    )
    KINDS[-1] = Scored
    recipe = converted(tmp_path, tokenizer_folder, "length")
    assert token_rows(tmp_path / "out/quiz/train") == [[5, 5], [3, 5]]
    scores = [sample["score"] for sample in samples(tmp_path / "out/quiz/train")]
    assert scores == [Decimal("5.50"), Decimal("3.50")]
    answer = mdsmix("convert", recipe, "streams.quiz.kind=pretraining")
    assert answer.code == 2
    assert "source.shape is length; pretraining reads text" in answer.err
