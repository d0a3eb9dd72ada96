"""A line of 500 MB, written and read for real: it is set aside by its place and length, in bounded memory."""

from __future__ import annotations

from pathlib import Path

from tests.abuse.conftest import Arena
from tests.converting import documents, manifest_of, quarantined
from tests.processes import watched

GOOD = b'{"text": "one two three four five six seven eight nine ten eleven twelve"}\n'
LENGTH = 500 << 20
MOST = 1 << 30
"Bytes of memory of all processes: a line is kept up to 256 MiB, in pieces that the allocator may hold twice."


def write(path: Path) -> None:
    block = b"x" * (1 << 20)
    with path.open("wb", buffering=0) as file:
        file.write(GOOD * 9 + b'{"text": "')
        for _ in range(LENGTH >> 20):
            file.write(block)
        file.write(b'"}\n' + GOOD * 9)


def test_it_is_set_aside_and_its_neighbours_are_converted(arena: Arena) -> None:
    source = arena.home / "a.jsonl"
    write(source)
    recipe = arena.recipe(streams={"web": documents(source)})
    _, peak = watched("convert", recipe, "--workers", 2, seconds=60)
    source.unlink()
    folder = arena.out / "web" / "train"
    assert manifest_of(folder).records.written == 18
    [bad] = quarantined(folder)
    assert (bad["reason"], bad["line"], bad["length"]) == ("line_too_long", 10, LENGTH + 12)
    assert bad["raw"] == ""
    assert peak < MOST, f"{peak >> 20} MiB"
