"""Files, folders, patterns and URLs -> the files that hold data, each with how it is read, and their first records.

In a folder, files that are no data are left alone: a README, hidden files, the tokenizer, streams that mdsmix published there. A file
that is named, or that a pattern finds, is data unless it is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.shapes.image_parts import FIELDS
from mdsmix.shards.index import BASENAME as INDEX
from mdsmix.shards.manifest import BASENAME
from mdsmix.sources import ReadAs, SourceFile, plan, read
from mdsmix.sources.find import STATE, inside, name_of
from mdsmix.sources.formats import NAMED, format_of
from mdsmix.storage import Location, Stat, locate
from mdsmix.words import listed

HEAD_BYTES = 1 << 16
NO_DATA = ("readme", "license", "licence", "notice", "changelog", "requirements")
"Texts that lie beside data."
OF_MODELS = frozenset(
    {
        *(
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
        ),
        *("vocab.json", "merges.txt", "config.json", "generation_config.json"),
    }
)
"Names of a tokenizer's and a model's files: mdsmix itself publishes a tokenizer beside the streams."
THEIRS = "dataset_info.json"
MOST_NAMED = 3
RECORDS = 50
"Records of a file that are read: enough to see fields that not every record has."
MOST_BYTES = 1 << 40
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")


@dataclass(slots=True)
class DataFiles:
    """The files that hold data, and sentences on the others."""

    files: list[SourceFile] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    "Sentences on files that are not taken."
    no_data: list[str] = field(default_factory=list)
    "Names of a folder's files that no format has."

    @property
    def sentences(self) -> list[str]:
        """The sentences for the user."""
        named = listed(self.no_data, MOST_NAMED)
        said = (
            f"no data by their names: {named} (one that is named itself is known by how it begins)"
        )
        return [*self.left_alone, *([said] if named else [])]


def find_data(names: Sequence[str], base: Path, but: Collection[Location] = ()) -> DataFiles:
    """The files that hold data; RecipeError where a name finds nothing.

    Args:
        base: the folder from which files are named.
        but: folders that are not looked through.
    """
    found = DataFiles()
    for name in names:
        place = locate(name)
        matches = place.expand()
        below = {} if matches else dict(place.list(recursive=True))
        if not matches and not below:
            raise RecipeError(
                f"{name} is no file, and no folder or pattern that holds one: name files of data, a folder of them, a pattern "
                "in quotes, or an s3:// URL."
            )
        for location, stat in matches:
            _take(found, SourceFile(location=location, stat=stat, name=name_of(location, base)))
        if place.url in {other.url for other in but}:
            found.left_alone.append(f"{name} is the tokenizer, and was left alone")
            continue
        _look_through(place, below, base, but, found)
    known = {file.location.url: file for file in found.files}
    found.files = list(known.values())
    return found


def _look_through(
    place: Location, below: dict[str, Stat], base: Path, but: Collection[Location], found: DataFiles
) -> None:
    saved = {_folder(name) for name in below if _last(name) == STATE}
    for folder in sorted(saved):
        found.files += _saved(place / folder if folder else place, base)
    for name, stat in _visible(place, below, but, found):
        if not any(_is_in(name, folder) for folder in saved) and _last(name) != "dataset_dict.json":
            file = SourceFile(location=place / name, stat=stat, name=name_of(place / name, base))
            _take(found, file, is_named=False)


def _saved(folder: Location, base: Path) -> Iterator[SourceFile]:
    """The files of a folder that `save_to_disk` wrote, in its order."""
    for number, (location, stat) in enumerate(inside(folder)):
        order = f"{name_of(folder, base)}/{number:09}"
        yield SourceFile(location=location, stat=stat, name=name_of(location, base), order=order)


def _visible(
    place: Location, below: dict[str, Stat], but: Collection[Location], found: DataFiles
) -> Iterator[tuple[str, Stat]]:
    """The files of a folder. Hidden files, published streams and the folders of `but` are left out."""
    own = {_folder(name) for name in below if _last(name) == BASENAME} - {""}
    streams = {_folder(name) for name in below if _last(name) == INDEX}
    for name, stat in below.items():
        is_ours = name == BASENAME or any(_is_in(name, folder) for folder in own)
        is_shard = _folder(name) in streams and _last(name) != INDEX
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        is_out = any(f"{place / name}".startswith(f"{other}/") for other in but)
        if not (is_ours or is_shard or is_hidden or is_out):
            yield name, stat
    if own:
        found.left_alone.append(f"published streams were left alone: {', '.join(sorted(own))}")


def _take(found: DataFiles, file: SourceFile, is_named: bool = True) -> None:
    name = _last(file.name)
    if not file.stat.size:
        found.left_alone.append(f"{file.name} is empty")
    elif name == THEIRS:
        found.left_alone.append(
            f"{file.name} is left alone: --dataset-info makes streams of its entries"
        )
    elif not is_named and (name.lower().startswith(NO_DATA) or name in OF_MODELS):
        found.no_data.append(file.name)
    elif known := known_format(file, is_named):
        found.files.append(known)
    elif is_named:
        found.left_alone.append(
            f"{file.name} is of no format that mdsmix reads: its name does not tell, and it begins with {first_bytes(file)[:16]!r}, "
            f"as none of {', '.join(NAMED)} does"
        )
    else:
        found.no_data.append(file.name)


def known_format(file: SourceFile, by_content: bool) -> SourceFile | None:
    """The file with its format, by its name or, with `by_content`, by its first bytes; None for an unknown format."""
    head = partial(first_bytes, file)
    try:
        more = format_of(file).guess(file, head)
        return replace(file, read_as=ReadAs(**more)) if more else file
    except RecipeError:
        if not by_content:
            return None
    begins = head()
    for name in NAMED:
        named = replace(file, read_as=ReadAs(format=name))
        if format_of(named).fits(begins):
            return named
    return None


def first_bytes(file: SourceFile) -> bytes:
    """How a file begins, as it is stored."""
    with file.open(until=HEAD_BYTES) as opened:
        return opened.read(HEAD_BYTES)


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _is_in(name: str, folder: str) -> bool:
    return not folder or name.startswith(f"{folder}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRecords:
    """The beginning of a file."""

    file: SourceFile
    records: list[Any]
    bad: Counter[str]
    "Reason code -> items of the file that are no record."

    @property
    def fields(self) -> list[str]:
        """All names at the top of its records, in their order."""
        objects = (record for record in self.records if isinstance(record, dict))
        return list(dict.fromkeys(str(name) for record in objects for name in record))


def head_of(file: SourceFile) -> FirstRecords:
    """The first records of a file; MdsmixError where it cannot be read."""
    records, bad = list[Any](), Counter[str]()
    for batch in read(plan([file], MOST_BYTES)[0], limit=RECORDS):
        records += batch.records
        bad.update(each.reason for each in batch.bad)
    return FirstRecords(file=file, records=records, bad=bad)


def fields_of_images(head: FirstRecords) -> tuple[str, ...]:
    """The fields that hold images, at the top of the records; () if they bear the usual names, or if no field holds any."""
    objects = [record for record in head.records if isinstance(record, dict)]
    held = [name for name in head.fields if any(is_image(record.get(name)) for record in objects)]
    return () if set(held) & set(FIELDS) else tuple(held)


def is_image(value: Any) -> bool:
    if isinstance(value, list):
        return any(is_image(each) for each in value if not isinstance(each, list))
    if isinstance(value, dict):
        return value.keys() == {"bytes", "path"} and any(value.values())
    if isinstance(value, bytes):
        return value.startswith(MAGIC)
    return isinstance(value, str) and (
        value.lower().endswith(SUFFIXES) or value[:11].lower() == "data:image/"
    )
