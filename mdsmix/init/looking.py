"""Files, folders, patterns and URLs -> the files that hold data, and the first records of each.

A folder is looked through; what lies in it that is no data (a README, hidden files, what mdsmix itself has published there)
is left alone. A file that is named, or that a pattern finds, is data unless it is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.shards.manifest import BASENAME
from mdsmix.sources import ReadAs, SourceFile, plan, read
from mdsmix.sources.find import name_of
from mdsmix.sources.registry import NAMED, format_of
from mdsmix.storage import Location, locate

RECORDS = 50
"Records of a file that are looked at: enough to see fields that not every record has."
HEAD_BYTES = 1 << 16
MOST_BYTES = 1 << 40


@dataclass(slots=True)
class Found:
    """What was found where data was looked for."""

    files: list[SourceFile] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    "Sentences on files that are not taken."


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The beginning of a file."""

    file: SourceFile
    records: list[Any]
    bad: Counter[str]
    "Reason codes of what is no record."

    @property
    def fields(self) -> list[str]:
        """All names at the top of its records, in their order."""
        objects = (record for record in self.records if isinstance(record, dict))
        return list(dict.fromkeys(str(name) for record in objects for name in record))


def find_data(names: Sequence[str], base: Path) -> Found:
    """The files that hold data; RecipeError where a name finds nothing. Files are named from the folder `base`."""
    found = Found()
    for name in names:
        place = locate(name)
        matches = place.expand()
        inside = [] if matches else list(place.list(recursive=True))
        if not matches and not inside:
            raise RecipeError(
                f"{name} is no file, and no folder or pattern that holds one: name files of data, a folder of them, a pattern "
                "in quotes, or an s3:// URL."
            )
        for location, stat in matches:
            _take(found, SourceFile(location=location, stat=stat, name=name_of(location, base)))
        for below, stat in _own_left_out(inside, found):
            file = SourceFile(location=place / below, stat=stat, name=name_of(place / below, base))
            _take(found, file, is_named=False)
    known = {file.location.url: file for file in found.files}
    found.files = list(known.values())
    return found


def _own_left_out(inside: list[tuple[str, Any]], found: Found) -> Iterator[tuple[str, Any]]:
    """The files of a folder that are neither hidden nor of a stream that mdsmix has published there."""
    own = {name.rpartition("/")[0] for name, _ in inside if name.rpartition("/")[2] == BASENAME}
    hidden = 0
    for name, stat in inside:
        if any(name.startswith(f"{folder}/") for folder in own) or name == BASENAME:
            continue
        if any(part.startswith(".") for part in name.split("/")):
            hidden += 1
            continue
        yield name, stat
    if own:
        found.left_alone.append(
            f"{len(own)} published streams were left alone: {', '.join(sorted(own))}"
        )
    if hidden:
        found.left_alone.append(f"hidden files were left alone: {hidden}")


def _take(found: Found, file: SourceFile, is_named: bool = True) -> None:
    if not file.stat.size:
        found.left_alone.append(f"{file.name} is empty")
    elif known := known_format(file, is_named):
        found.files.append(known)
    elif is_named:
        found.left_alone.append(f"{file.name} is of no format that mdsmix reads: {_seen(file)}")
    else:
        found.left_alone.append(f"{file.name} is no data by its name")


def known_format(file: SourceFile, by_content: bool) -> SourceFile | None:
    """The file with what says its format: its name, or else, where that is asked for, its first bytes."""
    try:
        format_of(file)
        return file
    except RecipeError:
        if not by_content:
            return None
    head = _first_bytes(file)
    for name in NAMED:
        named = replace(file, read_as=ReadAs(format=name))
        if format_of(named).fits(head):
            return named
    return None


def _first_bytes(file: SourceFile) -> bytes:
    with file.open(until=HEAD_BYTES) as opened:
        return opened.read(HEAD_BYTES)


def _seen(file: SourceFile) -> str:
    head = _first_bytes(file)[:16]
    formats = ", ".join(NAMED)
    return f"its name does not tell, and it begins with {head!r}, as none of {formats} does"


def head_of(file: SourceFile) -> Head:
    """The first records of a file; MdsmixError where it cannot be read."""
    records, bad = list[Any](), Counter[str]()
    for batch in read(plan([file], MOST_BYTES)[0], limit=RECORDS):
        records += batch.records
        bad.update(each.reason for each in batch.bad)
    return Head(file=file, records=records, bad=bad)


def sizes(files: Iterable[SourceFile]) -> int:
    """Their stored bytes."""
    return sum(file.stat.size for file in files)


def holds(place: Location) -> bool:
    """Whether there is a file, or a folder with something in it."""
    return place.stat() is not None or any(True for _ in place.list())
