"""What another machine found in objects is believed of just these objects, as the store lists them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mdsmix.convert.known_sources import NOTE, KnownSources
from mdsmix.convert.ledger import FOLDER
from mdsmix.sources import Content, SourceFile, Unit, Window
from mdsmix.storage import Location, Stat, locate

WINDOW = Window(number=0, digest="d" * 32, place="p")
CONTENT = Content(windows=(WINDOW,), files=("f" * 32,))


def unit(url: str = "s3://b/a.jsonl", size: int = 9, stamp: str = "tag", at: float = 7.9) -> Unit:
    file = SourceFile(location=locate(url), stat=Stat(size, stamp, at), name=url)
    return Unit(files=(file,))


def known(folder: Location, *units: Unit) -> list[Content | None]:
    """Each on a machine that has seen nothing."""
    found = []
    for each in units:
        known = KnownSources(Path("nowhere"))
        known.learn_objects(folder, [each])
        found.append(known.content(each))
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return locate(tmp_path / "out")


def note(folder: Location, *units: Unit, content: Content = CONTENT) -> None:
    KnownSources.at(folder.url).save(dict.fromkeys(units, content), folder)


def test_an_object_is_known_by_its_key_size_and_stamp(folder: Location) -> None:
    note(folder, unit())
    same = [unit(), unit(at=8.0)]
    others = [unit(url="s3://b/b.jsonl"), unit(size=8), unit(stamp="other")]
    assert known(folder, *same, *others) == [CONTENT] * 2 + [None] * 3


def test_files_of_a_disk_objects_without_a_stamp_and_images_are_not_noted(folder: Location) -> None:
    note(folder, unit())
    units = [unit(url="/a.jsonl"), unit(stamp=""), unit()]
    note(folder, *units[:2])
    assert known(folder, *units) == [None, None, CONTENT], (
        "where there is nothing to note, the note stays"
    )
    seen = Content(windows=(replace(WINDOW, images="i" * 32),), files=CONTENT.files)
    note(folder, unit(url="s3://b/b.jsonl"), content=seen)
    assert known(folder, unit(url="s3://b/b.jsonl")) == [None]
    mixed = replace(unit(), files=(*unit().files, *units[0].files))
    note(folder, mixed)
    assert known(folder, mixed) == [None], "a disk's stamp says nothing to another machine"
    assert known(folder, unit()) == [CONTENT]


def test_a_damaged_note_says_nothing_or_what_it_said(folder: Location) -> None:
    """A bit that turned in its head may make it say that it holds terabytes: nobody makes room for them."""
    units = [unit(f"s3://b/{number}.jsonl") for number in range(9)]
    note(folder, *units)
    at = folder / FOLDER / NOTE
    whole = at.read()
    for bit in range(0, 8 * len(whole), 3):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        at.write(bytes(damaged))
        assert known(folder, units[0])[0] in (None, CONTENT)
    for length in (0, 5, len(whole) - 1):
        at.write(whole[:length])
        assert known(folder, units[0]) == [None]
