"""What is remembered of sources saves a reading, and is never believed when a file looks other than it did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mdsmix.convert.known_sources import KnownSources, unit_stamp
from mdsmix.sources import Content, ReadAs, SourceFile, Unit, Window
from mdsmix.storage import Stat, locate

WINDOWS = tuple(Window(number=n, digest=f"{n}" * 32, place="p") for n in (0, 2))
CONTENT = Content(windows=WINDOWS, files=("f" * 32,))
OTHER = Content(windows=WINDOWS[:1], files=("f" * 32,))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path))
    return tmp_path


def unit(stamp: str = "1-1", size: int = 9, name: str = "/a.jsonl", start: int = 0) -> Unit:
    file = SourceFile(location=locate(name), stat=Stat(size, stamp), name=name)
    return Unit(files=(file,), start=start)


def test_a_unit_is_known_by_its_files_their_stamps_and_its_place() -> None:
    KnownSources.of("/mix").save({unit(): CONTENT})
    known = KnownSources.of("/mix")
    assert known.content(unit()) == CONTENT
    others = [unit(stamp="2-1"), unit(size=8), unit(name="/b.jsonl"), unit(start=5)]
    assert [known.content(other) for other in others] == [None] * 4
    assert KnownSources.of("/another").content(unit()) is None


def test_whatever_decides_what_is_read_of_a_file_is_part_of_its_name() -> None:
    """Else another recipe at one target would believe what was never read."""
    whole = unit()
    (file,) = whole.files
    read_as = replace(file, read_as=ReadAs(split_by="line"))
    others = [
        whole,
        replace(whole, end=5),
        replace(whole, fields=("text",)),
        replace(whole, blobs=("image",)),
        replace(whole, window_bytes=1000),
        replace(whole, files=(read_as,)),
        replace(whole, files=(file, file)),
    ]
    assert len({unit_stamp(other) for other in others}) == len(others)


def test_a_unit_that_lost_a_window_is_read_again() -> None:
    first, second = (Window(number=n, digest=f"{n}" * 32, place="p") for n in range(2))
    known = KnownSources.at("/mix")
    known.learn(unit(), Content(windows=(first, second), files=("f",)))
    known.units["begun"] = Content(windows=(first, second), files=())
    known.forget([second])
    assert known.content(unit()) is None
    assert list(known.units.values()) == [Content(windows=(first,), files=())] * 2


def test_what_is_no_longer_in_the_plan_is_forgotten() -> None:
    KnownSources.of("/mix").save({unit(): CONTENT})
    KnownSources.of("/mix").save({unit(start=5): OTHER})
    assert KnownSources.of("/mix").content(unit()) is None


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"7", b'{"a": 7}', b'{"unit": "x", "windows": 3}']
)
def test_a_damaged_memory_is_none(cache: Path, damage: bytes) -> None:
    KnownSources.of("/mix").save({unit(): CONTENT})
    (file,) = (cache / "seen").iterdir()
    file.write_bytes(damage)
    assert KnownSources.of("/mix").units == {}


def test_a_memory_that_cannot_be_kept_costs_a_reading_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "file"))
    KnownSources.of("/mix").save({unit(): CONTENT})
    assert KnownSources.of("/mix").units == {}


def test_what_is_noted_while_a_run_works_is_there_though_it_is_killed(cache: Path) -> None:
    """A window, then another, then the unit is done; half a line is what was being written then."""
    known = KnownSources.at("/mix")
    for number, window in enumerate(WINDOWS, 1):
        known.note(unit(), Content(windows=(window,), files=()))
        assert list(KnownSources.of("/mix").windows_of(unit()).values()) == list(WINDOWS[:number])
    assert KnownSources.of("/mix").content(unit()) is None
    assert {w.digest for w in KnownSources.of("/mix").windows_of(unit()).values()} == {
        window.digest for window in WINDOWS
    }
    known.note(unit(start=5), OTHER)
    (file,) = (cache / "seen").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:50])
    assert KnownSources.of("/mix").content(unit(start=5)) == OTHER
    assert {w.digest for w in KnownSources.of("/mix").windows_of(unit(start=5)).values()} == {
        OTHER.windows[0].digest
    }
    KnownSources.of("/mix").save({unit(): CONTENT})
    assert KnownSources.of("/mix").content(unit()) == CONTENT


def test_a_line_is_added_and_the_file_never_written_anew(cache: Path) -> None:
    known = KnownSources.at("/mix")
    sizes = []
    for n in range(5):
        known.note(unit(start=n), CONTENT)
        (file,) = (cache / "seen").iterdir()
        sizes.append(file.stat().st_size)
    assert sizes == [n * sizes[0] for n in range(1, 6)]
