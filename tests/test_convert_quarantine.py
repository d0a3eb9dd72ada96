"""The quarantine holds the bad records that the published stream has, and no others."""

import base64
import json
import re
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest
import zstandard

from mdsmix.convert.bad_records import described
from mdsmix.sources import BadRecord, format, jsonl
from mdsmix.sources.format import Item
from tests.converting import Web, documents, files

GOOD = [f"a document, number {n}" for n in range(20)]


@pytest.fixture
def web(web: Web) -> Web:
    web.windows(100)
    for name in "ab":
        web.holds([*GOOD[:10], {"name": name}, *GOOD[10:]], f"{name}.jsonl")
    return web


def where(web: Web) -> list[tuple[str, int]]:
    return sorted((record["file"], record["line"]) for record in web.bad)


def test_a_record_that_was_mended_is_no_longer_there(web: Web) -> None:
    web.run()
    assert where(web) == [("a.jsonl", 11), ("b.jsonl", 11)]
    path = web.folder / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"name"', b'"text"'))
    web.run()
    assert where(web) == [("b.jsonl", 11)]
    assert web.manifest.records.bad == 1
    web.holds(GOOD, "b.jsonl")
    web.run()
    assert not [name for name in files(web.out) if "quarantine" in name]


@pytest.mark.parametrize("window", [100, 1 << 20])
def test_files_of_equal_content_or_one_unit_have_bad_records_of_their_own(
    web: Web, window: int
) -> None:
    """They are named as their files are named now."""
    web.windows(window)
    (web.folder / "b.jsonl").write_bytes((web.folder / "a.jsonl").read_bytes())
    assert (web.run().units == 1) == (window > 100)
    assert where(web) == [("a.jsonl", 11), ("b.jsonl", 11)]
    assert web.manifest.records.bad == 2
    (web.folder / "b.jsonl").rename(web.folder / "c.jsonl")
    web.run()
    assert where(web) == [("a.jsonl", 11), ("c.jsonl", 11)]


def test_lines_above_shift_the_number_of_a_record_that_is_not_done_again(web: Web) -> None:
    """Its unit is reused; what it is told by is the line that an editor shows now."""
    web.run()
    path = web.folder / "a.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    shorter = first.replace(b"document", b"d")
    filler = b"\n" * (len(first) - len(shorter))  # the bytes behind stay where they are
    path.write_bytes(b"".join([shorter, filler, *rest]))
    assert web.run().done == 1
    (record,) = (r for r in web.bad if r["file"] == "a.jsonl")
    assert record["line"] == 11 + len(filler)
    assert path.read_bytes()[record["offset"] :].startswith(b'{"name":"a"}')


def test_lost_bad_records_are_found_again_and_damaged_ones_are_named(web: Web) -> None:
    web.run()
    whole, first = files(web.out), min((web.train / "quarantine").iterdir())
    kept = web.train / ".mdsmix" / f"{first.name.partition('.')[0]}.unit"
    (web.train / "index.json").unlink()
    kept.write_bytes(kept.read_bytes()[:-9] + b"no frame.")
    answer = web.convert()
    assert answer.code == 4
    assert f"{kept.name} is damaged" in answer.err
    assert web.convert("--verify-target").code == 0
    for lost in (kept, web.train / "index.json"):
        lost.unlink()
    assert web.run().done == 1
    assert files(web.out) == whole


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_a_record_too_long_to_be_held_is_named_and_all_others_are_converted(
    web: Web, suffix: str
) -> None:
    """1 GB in little: it crosses many windows, none of which holds another line of it."""
    web.patch.setattr(format, "LONGEST", 1000)
    web.patch.setattr(jsonl, "PIECE_BYTES", 300)
    web.windows(500)
    good = b'{"text": "one two three four five six seven eight nine ten eleven twelve"}\n'
    long = b'{"text": "%s"}' % (b"word " * 2000)
    data, name = good * 9 + long + b"\n" + good * 9, f"long.jsonl{suffix}"
    (web.folder / name).write_bytes(zstandard.compress(data) if suffix else data)
    records = web.says(documents(name)).run().manifest.records
    assert (records.read, records.written) == (19, 18)
    place = {"line": 10, "offset": 9 * len(good), "length": len(long)}
    assert web.bad == [{"file": name, **place, "reason": "line_too_long", "raw": ""}]


def bad(raw: bytes, detail: Any = None) -> BadRecord:
    names = tuple(f"field {number}" for number in range(70))
    origin = Item(3, {"row": 4}, len(raw), raw, fields=names, file="a.parquet")
    told = SimpleNamespace(origin=origin, reason="missing_field", detail=detail)
    return cast(BadRecord, told)


def test_what_is_said_of_a_bad_record() -> None:
    """Of a table with very many columns the first ones; what the template said; bytes that are no text as base64."""
    assert json.loads(described(bad(b"\xff", detail={"template": "no"}))) == {
        "file": "a.parquet",
        "row": 4,
        "length": 1,
        "reason": "missing_field",
        "detail": {"template": "no"},
        "fields": [f"field {number}" for number in range(64)],
        "raw_base64": "/w==",
    }


def test_of_images_in_a_bad_record_the_bytes_are_left_out_and_of_words_none() -> None:
    """However base64 is written."""
    image = bytes(range(256)) * 8
    plain, lines = base64.b64encode(image).decode(), base64.encodebytes(image).decode()
    words = "\n".join(["words", "that", "stand", "below", "each", "other"] * 60)
    left_out = r"(data:image/png;base64,)?<\d+ characters of base64 left out>\n?"
    ways = [plain, lines, base64.urlsafe_b64encode(image).decode(), quote(plain, "")]
    for way in [*ways, f"data:image/png;base64,{plain}"]:
        raw = json.dumps({"image": way, "text": words}).encode()
        kept = json.loads(json.loads(described(bad(raw), has_images=True))["raw"])
        assert kept["text"] == words
        assert re.fullmatch(left_out, kept["image"])
        assert json.loads(described(bad(raw)))["raw"] == raw.decode()
