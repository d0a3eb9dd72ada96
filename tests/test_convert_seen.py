"""What is remembered of sources saves a reading, and is never believed when a file looks other than it did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mdsmix.convert.seen import Content, Seen
from mdsmix.sources import SourceFile, Unit
from mdsmix.storage import Stat, locate

CONTENT = Content(hash="c" * 32, windows=(0, 2))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path))
    return tmp_path


def unit(stamp: str = "1-1", size: int = 9, name: str = "/a.jsonl", start: int = 0) -> Unit:
    file = SourceFile(location=locate(name), stat=Stat(size, stamp), name=name)
    return Unit(files=(file,), start=start)


def test_a_unit_is_known_by_its_files_their_stamps_and_its_place() -> None:
    Seen.of("/mix").save([unit()], [CONTENT])
    seen = Seen.of("/mix")
    assert seen.content(unit()) == CONTENT
    others = [unit(stamp="2-1"), unit(size=8), unit(name="/b.jsonl"), unit(start=5)]
    assert [seen.content(other) for other in others] == [None] * 4
    assert Seen.of("/another").content(unit()) is None


def test_what_is_no_longer_in_the_plan_is_forgotten() -> None:
    Seen.of("/mix").save([unit()], [CONTENT])
    Seen.of("/mix").save([unit(start=5)], [replace(CONTENT, hash="d" * 32)])
    assert Seen.of("/mix").content(unit()) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"7", b'{"a": 7}', b'{"a": {"hash": "x"}}'])
def test_a_damaged_memory_is_none(cache: Path, damage: bytes) -> None:
    Seen.of("/mix").save([unit()], [CONTENT])
    (file,) = (cache / "seen").iterdir()
    file.write_bytes(damage)
    assert Seen.of("/mix").contents == {}


def test_a_memory_that_cannot_be_kept_costs_a_reading_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "file"))
    Seen.of("/mix").save([unit()], [CONTENT])
    assert Seen.of("/mix").contents == {}
