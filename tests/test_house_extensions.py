"""A stranger adds a kind, a shape, a format, a codec or an engine, as one class and one line, or by a package's entry points."""

import pickle
import random
import shutil
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdsmix import extensions
from mdsmix.convert import unit
from mdsmix.convert.planning import Options
from mdsmix.convert.run import convert
from mdsmix.encode.encoded import Encoded, encoded
from mdsmix.encode.labels import Lengths
from mdsmix.engines.tasks import Attempt, Engine, OnProgress, Reporter
from mdsmix.kinds import KINDS, Kind, open_recipe
from mdsmix.ragged import Ragged
from mdsmix.shapes import SHAPES, Shape
from mdsmix.shapes.shape import RawRecord
from mdsmix.shards.codecs import CODECS, Codec, codec_of
from tests import converting
from tests.converting import (
    files,
    manifest_of,
    mdsmix,
    samples,
    token_rows,
    write_jsonl,
    write_recipe,
)

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
    assert (answer.code, "is length; pretraining reads text" in answer.err) == (2, True)


MODULE = """
import json
from mdsmix.record import Pair
from mdsmix.shapes.shape import Shape
from mdsmix.shards.codecs import Codec
from mdsmix.sources.jsonl import Jsonl

SHAPE = Shape(name="chatty", gives=Pair, parse=lambda raw: Pair(raw.record["q"], raw.record["a"]))
FORMAT = Jsonl("")

def codec(times):
    return Codec(decode=lambda data: data.decode() * int(times))

def broken():
    raise ValueError("on purpose")
"""
POINTS = """
[mdsmix.shapes]
chatty = {module}:SHAPE
lost = {module}:NOT_THERE
[mdsmix.formats]
.chats = {module}:FORMAT
[mdsmix.codecs]
loud = {module}:codec
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package of version 1.2."""
    module = f"shapes_of_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    info = tmp_path / "shapes_of_mine-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shapes-of-mine\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(POINTS.format(module=module))
    monkeypatch.syspath_prepend(str(tmp_path))
    _forget()
    yield tmp_path
    _forget()


def _forget() -> None:
    extensions.entry.cache_clear()
    extensions.extension.cache_clear()


def test_its_shape_reads_its_format_and_a_new_version_converts_again(
    package: Path, tokenizer_folder: Path
) -> None:
    write_jsonl(package / "a.chats", [{"q": "Who?", "a": "A king."}] * 3)
    named = write_jsonl(package / "b.data", [{"q": "Who?", "a": "A king."}] * 3)
    stream = {"kind": "finetuning", "source": {"path": "a.chats", "shape": "chatty"}}
    recipe = write_recipe(package, tokenizer_folder, streams={"s": stream}, max_seq_len=64)
    by_name = [f"streams.s.source.path={named}", "streams.s.source.format=chats", "--reencode"]

    def convert(*more: object) -> str:
        answer = mdsmix("convert", recipe, *more)
        assert answer.code == 0, answer.err
        return answer.out

    convert()
    assert len(samples(package / "out/s/train")) == 3
    assert manifest_of(package / "out/s/train").encoding.shape == "chatty of shapes-of-mine 1.2"
    assert mdsmix("check", recipe).code == 0
    assert "up to date" in convert()
    metadata = package / "shapes_of_mine-1.2.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("1.2", "1.3"))
    _forget()
    assert "1 of 1 work units converted" in convert()
    convert(*by_name)


def test_its_codec_decodes_and_what_cannot_be_imported_is_told(
    package: Path, tokenizer_folder: Path
) -> None:
    assert codec_of("loud:3").decode(b"ha") == "hahaha"
    assert codec_of("unheard of").decode(b"ha") == b"ha"
    stream = {"kind": "finetuning", "source": {"path": "a.chats", "shape": "lost"}}
    answer = mdsmix("check", write_recipe(package, tokenizer_folder, streams={"s": stream}))
    assert answer.code == 2
    assert "lost of shapes-of-mine 1.2 cannot be imported (AttributeError" in answer.err


@dataclass
class Elsewhere(Engine, Reporter):
    """Tasks arrive as bytes, in a drawn order, where the only tokenizer is the one beside the streams."""

    cache: Path
    peak, memory = 0, 1 << 30

    def run(self, tasks: Sequence[Any], on_progress: OnProgress, say: Any) -> Generator[Any]:
        self.on_progress = on_progress
        for number in random.Random(1).sample(range(len(tasks)), len(tasks)):
            away = (self.cache / "tokenizers").rename(self.cache / "away")
            unit._backends.clear()
            result = pickle.loads(pickle.dumps(tasks[number])).do(Attempt(), self)
            shutil.rmtree(self.cache / "fetched")
            away.rename(self.cache / "tokenizers")
            yield number, result


def test_an_engine_is_one_class(tmp_path: Path, tokenizer_folder: Path, monkeypatch: Any) -> None:
    converting.windows(monkeypatch, 600)
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))
    texts = [{"text": f"Document {n}. " * 5, "n": str(n)} for n in range(99)]
    web = converting.write_jsonl(tmp_path / "a.jsonl", texts)
    faq = {"path": str(web), "prompt": "n", "response": "text"}
    recipe = converting.write_recipe(tmp_path, tokenizer_folder, streams={"web": converting.documents(web), "faq": {"kind": "finetuning", "source": faq}}, max_seq_len=64, mix={"faq": {"repeat": 2}})  # fmt: skip
    engine = Elsewhere(tmp_path / "cache")
    found = list(convert(open_recipe(recipe), Options(), converting.Told(), engine))
    assert min(outcome.done for outcome in found) > 5
    converting.run_recipe(recipe, f"local={tmp_path / 'other'}")
    assert files(tmp_path / "out") == files(tmp_path / "other"), "equal to the local engine's"
    for command in (("check", recipe), ("inspect", tmp_path / "out/web"), ("verify", tmp_path / "out/faq"), ("render-yaml", recipe, "-o", tmp_path / "t.yaml", "train_loader.num_workers=0")):  # fmt: skip
        assert mdsmix(*command).code == 0, command
