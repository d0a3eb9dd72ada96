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
from mdsmix.sources.find import SPLITS, STATE, inside, name_of
from mdsmix.sources.formats import NAMED, format_of
from mdsmix.storage import Location, Stat, locate
from mdsmix.words import listed

HEAD_BYTES = 1 << 16
NO_DATA = (
    *("readme", "license", "licence", "notice", "changelog", "requirements"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "config.json", "generation_config.json"),
)
"How texts that lie beside data, and files of tokenizers and models, are called."
THEIRS = "dataset_info.json"
RECORDS = 50
"Records of a file that are read: enough to see fields that not every record has."
MOST_BYTES = 1 << 40
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")


@dataclass(slots=True)
class DataFiles:
    """The files that hold data, and sentences on the others."""

    files: list[SourceFile] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    no_data: list[str] = field(default_factory=list)
    "Names of a folder's files that no format has."


def find_data(names: Sequence[str], base: Path, but: Collection[Location] = ()) -> DataFiles:
    """The files that hold data; RecipeError where a name finds nothing.

    Args:
        base: the folder from which files are named.
        but: folders that are not looked through.
    """
    found, out = DataFiles(), tuple(f"{other.url}/" for other in but)
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
        if f"{place.url}/" in out:
            found.sentences.append(f"{name} is the tokenizer, and was left alone")
            continue
        for file in _of_folder(place, below, base, found):
            if not file.location.url.startswith(out):
                _take(found, file, is_named=False)
    found.files = list({file.location.url: file for file in found.files}.values())
    if found.no_data:
        found.sentences.append(
            f"no data by their names: {listed(found.no_data)} (one that is named itself is known by how it begins)"
        )
    return found


def _of_folder(
    place: Location, below: dict[str, Stat], base: Path, found: DataFiles
) -> Iterator[SourceFile]:
    """The files of a folder but hidden ones and those of published streams; what `save_to_disk` wrote, in its order."""
    saved, streams, ours = (
        {_folder(name) for name in below if _last(name) == mark}
        for mark in (STATE, INDEX, BASENAME)
    )
    for folder in sorted(saved):
        at = place / folder if folder else place
        for number, (location, stat) in enumerate(inside(at)):
            name, order = name_of(location, base), f"{name_of(at, base)}/{number:09}"
            yield SourceFile(location=location, stat=stat, name=name, order=order)
    apart = saved | ours - {""}
    for name, stat in below.items():
        is_shard = _folder(name) in streams and _last(name) != INDEX
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        is_apart = any(not folder or name.startswith(f"{folder}/") for folder in apart)
        if not (is_shard or is_hidden or is_apart or _last(name) in (BASENAME, SPLITS)):
            yield SourceFile(location=place / name, stat=stat, name=name_of(place / name, base))
    if published := sorted(ours - {""}):
        found.sentences.append(f"published streams were left alone: {', '.join(published)}")


def _take(found: DataFiles, file: SourceFile, is_named: bool = True) -> None:
    name = _last(file.name)
    if not file.stat.size:
        found.sentences.append(f"{file.name} is empty")
    elif name == THEIRS:
        said = f"{file.name} is left alone: --dataset-info makes streams of its entries"
        found.sentences.append(said)
    elif (is_named or not name.lower().startswith(NO_DATA)) and (known := _known(file, is_named)):
        found.files.append(known)
    elif is_named:
        found.sentences.append(
            f"{file.name} is of no format that mdsmix reads: its name does not tell, and it begins with {first_bytes(file)[:16]!r}, "
            f"as none of {', '.join(NAMED)} does"
        )
    else:
        found.no_data.append(file.name)


def _known(file: SourceFile, by_content: bool) -> SourceFile | None:
    """The file with its format, by its name or, with `by_content`, by its first bytes; None for an unknown format."""
    try:
        more = format_of(file).guess(file, partial(first_bytes, file))
        return replace(file, read_as=ReadAs(**more)) if more else file
    except RecipeError:
        begins = first_bytes(file) if by_content else b""
    named = (replace(file, read_as=ReadAs(format=name)) for name in NAMED if begins)
    return next((each for each in named if format_of(each).fits(begins)), None)


def first_bytes(file: SourceFile) -> bytes:
    """How a file begins, as it is stored."""
    with file.open(until=HEAD_BYTES) as opened:
        return opened.read(HEAD_BYTES)


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _last(name: str) -> str:
    return name.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRecords:
    """The beginning of a file."""

    file: SourceFile
    records: list[Any]
    bad: Counter[str]
    "Reason code -> items of the file that are no record."

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [record for record in self.records if isinstance(record, dict)]

    @property
    def fields(self) -> list[str]:
        """All names at the top of its records, in their order."""
        return list(dict.fromkeys(str(name) for record in self.objects for name in record))


def head_of(file: SourceFile) -> FirstRecords:
    """The first records of a file; MdsmixError where it cannot be read."""
    batches = list(read(plan([file], MOST_BYTES)[0], limit=RECORDS))
    return FirstRecords(
        file=file,
        records=[record for batch in batches for record in batch.records],
        bad=Counter(each.reason for batch in batches for each in batch.bad),
    )


def fields_of_images(head: FirstRecords) -> tuple[str, ...]:
    """The fields that hold images, at the top of the records; () if they bear the usual names, or if no field holds any."""
    held = [n for n in head.fields if any(_is_image(record.get(n)) for record in head.objects)]
    return () if set(held) & set(FIELDS) else tuple(held)


def _is_image(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_image(each) for each in value if not isinstance(each, list))
    if isinstance(value, dict):
        return value.keys() == {"bytes", "path"} and any(value.values())
    if isinstance(value, bytes):
        return value.startswith(MAGIC)
    is_text = isinstance(value, str)
    return is_text and (value[:11].lower() == "data:image/" or value.lower().endswith(SUFFIXES))
