"""What another machine found in objects is believed of just these objects, as the store lists them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix.convert.ledger import FOLDER
from mdsmix.convert.source_hashes import SourceHashCache
from mdsmix.convert.source_notes import NOTE, learn_objects, note_objects
from mdsmix.sources import Content, SourceFile, Unit, Window
from mdsmix.storage import Stat, locate

WINDOW = Window(number=0, digest="d" * 32, place="p")
CONTENT = Content(windows=(WINDOW,), files=("f" * 32,))


def unit(url: str = "s3://b/a.jsonl", size: int = 9, stamp: str = "tag", at: float = 7.9) -> Unit:
    file = SourceFile(location=locate(url), stat=Stat(size, stamp, at), name=url)
    return Unit(files=(file,))


def known(job: Any, *units: Unit) -> list[Content | None]:
    """Each on a machine that has seen nothing."""
    found = []
    for each in units:
        cache = SourceHashCache(Path("nowhere"))
        learn_objects(job, [each], cache)
        found.append(cache.content(each))
    return found


@pytest.fixture
def job(tmp_path: Path) -> Any:
    return SimpleNamespace(folder=locate(tmp_path))


def test_an_object_is_known_by_its_key_size_stamp_and_second(job: Any) -> None:
    note_objects(job, [unit()], [CONTENT])
    same = [unit(), unit(at=7.0)]  # a HEAD tells seconds
    others = [unit(url="s3://b/b.jsonl"), unit(size=8), unit(stamp="other"), unit(at=8.0)]
    assert known(job, *same, *others) == [CONTENT] * 2 + [None] * 4


def test_files_of_a_disk_objects_without_a_stamp_and_images_are_not_noted(job: Any) -> None:
    note_objects(job, [unit()], [CONTENT])
    seen = Content(windows=(replace(WINDOW, images="i" * 32),), files=CONTENT.files)
    units = [unit(url="/a.jsonl"), unit(stamp=""), unit()]
    note_objects(job, units[:2], [CONTENT] * 2)
    assert known(job, *units) == [None, None, CONTENT], (
        "where there is nothing to note, the note stays"
    )
    note_objects(job, units, [CONTENT, CONTENT, seen])
    mixed = replace(unit(), files=(*unit().files, *units[0].files))
    note_objects(job, [mixed], [CONTENT])
    assert known(job, mixed) == [None], "a disk's stamp says nothing to another machine"
    assert (job.folder / FOLDER / NOTE).stat() is not None
    assert known(job, unit()) == [CONTENT]


def test_a_damaged_note_says_nothing_or_what_it_said(job: Any) -> None:
    """A bit that turned in its head may make it say that it holds terabytes: nobody makes room for them."""
    units = [unit(f"s3://b/{number}.jsonl") for number in range(9)]
    note_objects(job, units, [CONTENT] * 9)
    note = job.folder / FOLDER / NOTE
    whole = note.read()
    for bit in range(0, 8 * len(whole), 3):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        note.write(bytes(damaged))
        assert known(job, units[0])[0] in (None, CONTENT)
    for length in (0, 5, len(whole) - 1):
        note.write(whole[:length])
        assert known(job, units[0]) == [None]
