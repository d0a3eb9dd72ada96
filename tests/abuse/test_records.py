"""Records that are none: each is set aside with its place and its reason, and its neighbours are converted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from tests.abuse.conftest import Arena
from tests.converting import chats, documents, manifest_of, pairs, quarantined

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
    folder = convert(arena, "a.jsonl", b"".join(GOOD + line + b"\n" for line, _ in LINES.values()))
    records, bad = manifest_of(folder).records, quarantined(folder)
    assert (records.read, records.written) == (2 * len(LINES), len(LINES))
    found = {each["line"]: (each["reason"], each["length"]) for each in bad}
    for number, (name, (line, reason)) in enumerate(LINES.items()):
        told, length = found[2 * number + 2]
        assert told in {reason, "too_deep"} if name == "deep and never closed" else told == reason
        assert length == len(line), name


def test_of_keys_that_are_there_twice_the_last_counts(arena: Arena) -> None:
    folder = convert(arena, "a.jsonl", GOOD * 5 + b'{"text": 1, ' + GOOD[1:])
    assert manifest_of(folder).records.written == 6


@pytest.mark.parametrize(
    "content", [b"", b"\n" * 99, b"\xef\xbb\xbf", b"\0" * 4096, b"[]", b"\xff\xfe"]
)
def test_a_file_without_a_record_is_a_sentence(arena: Arena, content: bytes) -> None:
    (arena.home / "a.jsonl").write_bytes(content)
    recipe = arena.recipe(streams={"web": documents("a.jsonl")})
    assert "not one sample came of its source" in arena.refused("convert", recipe)


ODD = ["", "\0", "\u202e", "a\u0301" * 999, "\U0010ffff", "�", " \t\r"]


def test_odd_characters_are_text_like_any_other(arena: Arena) -> None:
    told = [{"prompt": text or "x", "response": f"{text}!", "text": "x"} for text in ODD]
    (arena.home / "a.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in told))
    said = [[{"role": r, "content": f"{text}!"} for r in ("user", "assistant")] for text in ODD]
    (arena.home / "b.jsonl").write_text("".join(f"{json.dumps({'messages': m})}\n" for m in said))
    streams = {"faq": pairs("a.jsonl"), "chat": chats("b.jsonl")}
    recipe = arena.recipe(streams=streams, max_seq_len=4096)
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    for name in streams:
        assert manifest_of(arena.out / name / "train").records.written == len(ODD)


def gzipped(block: bytes, times: int) -> bytes:
    return gzip.compress(block) * times


def zstd(block: bytes, times: int) -> bytes:
    return zstandard.ZstdCompressor().compress(block) * times


PACK: dict[str, Callable[[bytes, int], bytes]] = {".gz": gzipped, ".zst": zstd}
BOMBS = {"zeros": bytes(4 << 20), "spaces": b" " * (4 << 20)}


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("block", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_takes_time_and_not_memory(arena: Arena, packing: str, block: bytes) -> None:
    """400 MB out of 400 KB, where a line may have 256: it is set aside, unread."""
    packed = PACK[packing](b"\n" + block, 1) + PACK[packing](block, 99) + PACK[packing](b"\n", 1)
    assert 100 * len(block) > 200 * len(packed)
    folder = convert(arena, f"a.jsonl{packing}", PACK[packing](GOOD, 9) + packed)
    records = manifest_of(folder).records
    assert (records.written, records.quarantined) == (9, {"line_too_long": 1})
