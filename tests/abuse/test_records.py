"""Records that are none: each is set aside with its place and its reason, and its neighbours are converted."""

import gzip
import lzma
import os
from pathlib import Path

import pytest
import zstandard

from mdsmix.errors import Unreachable
from mdsmix.sources import find, inflate, plan
from tests.abuse.conftest import Arena
from tests.alarm import SECONDS
from tests.converting import documents, manifest_of, quarantined
from tests.processes import watched

GOOD = b'{"text": "one two three four five six seven eight nine ten eleven twelve"}\n'
LINES: dict[str, tuple[bytes, str]] = {
    "deep lists": (b"[" * 100_000 + b"]" * 100_000, "too_deep"),
    "deep objects": (b'{"text":' * 20_000 + b"1" + b"}" * 20_000, "too_deep"),
    "deep and never closed": (b"[" * 1_000_000, "not_json"),
    "invalid UTF-8": (b'{"text": "\xff\xfe"}', "invalid_utf8"),
    "surrogates in bytes": (b'{"text": "\xed\xa0\x80"}', "invalid_utf8"),
    "half a pair": (b'{"text": "\\ud800"}', "lone_surrogate"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16-le"), "not_json"),
    "a mark inside": (b"\xef\xbb\xbf" + GOOD.strip(), "not_json"),
    "not a number": (b'{"text": NaN}', "not_json"),
    "without end": (b'{"text": Infinity}', "not_json"),
    "a million digits": (b'{"text": ' + b"9" * 1_000_000 + b"}", "not_json"),
    "an exponent without end": (b'{"text": 1e999999}', "not_json"),
    "a NUL": (b"\0", "not_json"),
    "two on a line": (GOOD.strip() + b"," + GOOD.strip(), "not_json"),
    "a code": (b'__import__("os").system("true")', "not_json"),
    "a list": (b'["text"]', "not_an_object"),
    "another key": (b'{"txet": "a"}', "missing_field"),
    "a text in a list": (b'{"text": ["a"]}', "field_not_text"),
}


def convert(arena: Arena, name: str, content: bytes) -> Path:
    (arena.home / name).write_bytes(content)
    recipe = arena.recipe(streams={"web": documents(name)})
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    return arena.out / "web" / "train"


def test_each_line_that_is_no_record_is_set_aside_with_its_place(arena: Arena) -> None:
    """Of keys that are there twice the last counts."""
    lines = b"".join(GOOD + line + b"\n" for line, _ in LINES.values())
    folder = convert(arena, "a.jsonl", lines + b'{"text": 1, ' + GOOD[1:])
    records, bad = manifest_of(folder).records, quarantined(folder)
    assert (records.read, records.written) == (2 * len(LINES) + 1, len(LINES) + 1)
    found = {each["line"]: (each["reason"], each["length"]) for each in bad}
    for number, (name, (line, reason)) in enumerate(LINES.items()):
        told, length = found[2 * number + 2]
        assert told in {reason, "too_deep"} if name == "deep and never closed" else told == reason
        assert length == len(line), name


def test_a_file_without_a_record_is_a_sentence(arena: Arena) -> None:
    recipe = arena.recipe(streams={"web": documents("a.jsonl")})
    for content in (b"", b"\n" * 99, b"\xef\xbb\xbf", b"\0" * 4096, b"[]", b"\xff\xfe"):
        (arena.home / "a.jsonl").write_bytes(content)
        assert "not one sample came of its source" in arena.refused("convert", recipe), content


def test_a_bomb_takes_time_and_not_memory(arena: Arena) -> None:
    """Hundreds of MB out of 1 in 200 and more, where a line may have 256: it is set aside, unread."""
    for suffix, pack, block, times in (
        (".gz", gzip.compress, bytes(4 << 20), 70),
        (".zst", zstandard.compress, b" " * (4 << 20), 70),
        (".xz", lzma.compress, bytes(4 << 20), 70),
    ):
        packed = pack(GOOD * 9) + pack(b"\n" + block) + pack(block) * times + pack(b"\n")
        assert times * len(block) > 200 * len(packed)
        records = manifest_of(convert(arena, f"a.jsonl{suffix}", packed)).records
        assert (records.written, records.quarantined) == (9, {"line_too_long": 1})
    [unit] = plan(find(["a.jsonl.xz"], arena.home))
    with (
        pytest.raises(Unreachable, match="was compressed with a window of"),
        inflate.opened(unit.files[0], ".xz", memory=1 << 20) as stream,
    ):
        stream.read(1)


def test_a_line_of_300_megabytes_is_set_aside_by_its_place_and_length(arena: Arena) -> None:
    """In bounded memory of all processes: a line is kept up to 256 MiB, in pieces that the allocator may hold twice."""
    source, length = arena.home / "a.jsonl", 300 << 20
    with source.open("wb") as file:
        file.write(GOOD * 9)
        file.seek(length, os.SEEK_CUR)  # a hole in the file, which is read as NULs
        file.write(b"\n" + GOOD * 9)
    recipe = arena.recipe(streams={"web": documents(source)})
    _, peak = watched("convert", recipe, "--workers", 2, seconds=SECONDS)
    source.unlink()
    folder = arena.out / "web" / "train"
    assert manifest_of(folder).records.written == 18
    [bad] = quarantined(folder)
    assert (bad["reason"], bad["line"], bad["length"]) == ("line_too_long", 10, length)
    assert bad["raw"] == ""
    assert peak < 1 << 30, f"{peak >> 20} MiB"
