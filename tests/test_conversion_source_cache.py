"""What is remembered of sources saves a reading, and is never believed when a file looks other than
it did. What another machine found in objects is believed of just these objects, as the store lists
them. Every source is read once at a first conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from mdsmix.conversion.source_cache import NOTE, KnownSources, unit_stamp
from mdsmix.conversion.unit_files import FOLDER
from mdsmix.sources import Content, ReadAs, SourceFile, Unit, Window
from mdsmix.storage import Location, Stat, locate
from tests.converting import Project, documents, read_files

WINDOWS = tuple(Window(number=n, digest=f"{n}" * 32, place="p") for n in (0, 2))
CONTENT = Content(windows=WINDOWS, files=("f" * 32,))
OTHER = Content(windows=WINDOWS[:1], files=("f" * 32,))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path))
    return tmp_path


def unit(url: str = "/a.jsonl", start: int = 0, **differs: Any) -> Unit:
    stat = Stat(**{"size": 9, "stamp": "1-1", "modified": 7.9} | differs)
    return Unit(files=(SourceFile(location=locate(url), stat=stat, name=url),), start=start)


def test_a_unit_of_a_target_is_known_while_it_is_in_the_plan() -> None:
    KnownSources.load("/mix").save({unit(): CONTENT})
    assert KnownSources.load("/mix").content(unit()) == CONTENT
    assert KnownSources.load("/another").content(unit()) is None
    KnownSources.load("/mix").save({unit(start=5): OTHER})
    assert KnownSources.load("/mix").content(unit()) is None, "it is no longer in the plan"


def test_whatever_decides_what_is_read_of_a_file_is_part_of_its_name() -> None:
    """Else another recipe at one target would believe what was never read."""
    whole, given = unit(), [{"size": 8}, {"stamp": "2-1"}, {"url": "/b.jsonl"}, {"start": 5}]
    (file,) = whole.files
    settings = [{"end": 5}, {"fields": ("text",)}, {"blobs": ("image",)}, {"window_bytes": 1000}]
    files = [(replace(file, read_as=ReadAs(split_by="line")),), (file, file)]
    others = [replace(whole, **each) for each in [*settings, *({"files": of} for of in files)]]
    units = [whole, *others, *(unit(**each) for each in given)]
    assert len(set(map(unit_stamp, units))) == len(units) == 11


def test_a_unit_that_lost_a_window_is_read_again() -> None:
    known = KnownSources.empty("/mix")
    known.learn(unit_stamp(unit()), CONTENT)
    known.units["begun"] = Content(windows=WINDOWS, files=())
    known.forget({*WINDOWS[1:]})
    assert known.content(unit()) is None
    assert list(known.units.values()) == [Content(windows=WINDOWS[:1], files=())] * 2


def test_a_damaged_memory_is_none(cache: Path) -> None:
    KnownSources.load("/mix").save({unit(): CONTENT})
    (file,) = (cache / "seen").iterdir()
    for damage in (b"", b"{", b"[]", b"7", b'{"a": 7}', b'{"unit": "x", "windows": 3}'):
        file.write_bytes(damage)
        assert KnownSources.load("/mix").units == {}


def test_what_is_noted_while_a_run_works_is_there_though_it_is_killed(cache: Path) -> None:
    """A window, then another, then the unit is done; half a line is what was being written then.
    The file is never written anew.
    """
    known = KnownSources.empty("/mix")
    for number, window in enumerate(WINDOWS, 1):
        known.note(unit(), Content(windows=(window,), files=()))
        found = KnownSources.load("/mix")
        assert found.windows_of(unit()) == {w.number: w for w in WINDOWS[:number]}
        assert found.content(unit()) is None
    (file,) = (cache / "seen").iterdir()
    sizes = [file.stat().st_size]
    for start in range(3):
        known.note(unit(start=start), OTHER)
        sizes.append(file.stat().st_size)
    assert sizes[3] - sizes[2] == sizes[2] - sizes[1] < sizes[1]
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:50])
    found = KnownSources.load("/mix")
    assert found.content(unit()) == found.content(unit(start=2)) == OTHER
    assert list(found.windows_of(unit(start=2)).values()) == [*OTHER.windows]


def known(folder: Location, *units: Unit) -> list[Content | None]:
    """Each on a machine that has seen nothing."""
    machines = [(KnownSources(Path("nowhere")), each) for each in units]
    for machine, each in machines:
        machine.learn_objects(folder, [each])
    return [machine.content(each) for machine, each in machines]


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return locate(tmp_path / "out")


def note(folder: Location, *units: Unit, content: Content = CONTENT) -> None:
    KnownSources.empty(folder.url).save(dict.fromkeys(units, content), folder)


ONE, TWO = "s3://b/a.jsonl", "s3://b/b.jsonl"


def test_an_object_is_known_by_its_key_size_and_stamp_and_nothing_else_is(folder: Location) -> None:
    """Neither files of a disk, whose stamps say nothing to another machine, nor objects without a
    stamp, nor what has images, is noted.
    """
    note(folder, unit(ONE))
    others = [unit(TWO), unit(ONE, size=8), unit(ONE, stamp="other")]
    assert known(folder, unit(ONE), unit(ONE, modified=8.0), *others) == [CONTENT] * 2 + [None] * 3
    units = [unit(), unit(ONE, stamp="")]
    note(folder, *units)
    assert known(folder, *units, unit(ONE)) == [None, None, CONTENT], "the note of before stays"
    seen = Content(windows=(replace(WINDOWS[0], images="i" * 32),), files=CONTENT.files)
    note(folder, unit(TWO), content=seen)
    mixed = replace(unit(ONE), files=(*unit(ONE).files, *unit().files))
    note(folder, mixed)
    assert known(folder, unit(TWO), mixed, unit(ONE)) == [None, None, CONTENT]


def test_a_damaged_note_says_nothing_or_what_it_said(folder: Location) -> None:
    """A bit that turned in its head may make it say that it holds terabytes: nobody makes room for
    them.
    """
    units = [unit(f"s3://b/{number}.jsonl") for number in range(9)]
    note(folder, *units)
    at = folder / FOLDER / NOTE
    whole = at.read()
    for bit in range(0, 8 * len(whole), 37):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        at.write(bytes(damaged))
        assert known(folder, units[0])[0] in (None, CONTENT)
    for length in (0, 5, len(whole) - 1):
        at.write(whole[:length])
        assert known(folder, units[0]) == [None]


NAMES = ["a.jsonl", "b.jsonl", "c.jsonl.zst", "d.jsonl"]
Opened = Callable[[], list[str]]


@pytest.fixture
def project(project: Project) -> Project:
    """Four units, the third of several windows."""
    project.set_window_size(2_500)
    for name in NAMES:
        texts = (f"{name} holds the text number {n} of some words" for n in range(40))
        path = project.write_source(texts, f"data/{name}")
        if name.endswith(".zst"):
            path.write_bytes(zstandard.compress(path.read_bytes() * 3))
    return project.configure(documents("data/*", layout="document"))


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The sources that were opened since it was asked last, by whatever process, in order."""
    log, really = tmp_path / "opened", SourceFile.open

    def opening(self: SourceFile, *where: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{self.name}\n")
        return really(self, *where)

    def asked() -> list[str]:
        names = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return [name.removeprefix("data/") for name in names]

    monkeypatch.setattr(SourceFile, "open", opening)
    return asked


def test_a_first_conversion_reads_each_source_once_a_second_none(
    project: Project, opened: Opened
) -> None:
    """Without the cache sources are read to know them, and nothing is encoded."""
    project.run(workers=2)
    assert sorted(opened()) == NAMES
    assert project.run().state == "up to date"
    project.convert_ok("--dry-run")
    assert opened() == []
    before = read_files(project.out)
    project.switch_machine("another")
    for verify_source in (False, True):
        assert (project.run(verify_source=verify_source).done, opened()) == (0, NAMES)
    assert read_files(project.out) == before


def test_moved_renamed_and_packed_sources_are_the_same_stream(project: Project) -> None:
    units, moved = project.run().units, project.folder / "moved"
    (project.folder / "data").rename(moved)
    for name in NAMES:
        (moved / name).rename(moved / f"z{name}")
    again = project.run("streams.web.source.path=moved/*")
    assert (again.done, again.units) == (0, units)
    path = moved / "zb.jsonl"
    path.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(path.read_bytes()))
    path.unlink()
    assert project.run("streams.web.source.path=moved/*").done == 0
