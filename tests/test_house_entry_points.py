"""Another package adds a shape, a format and a codec by its entry points alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mdsmix import extensions
from mdsmix.shards.codecs import codec_of
from tests.converting import manifest_of, mdsmix, samples, write_jsonl, write_recipe

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
