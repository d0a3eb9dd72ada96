"""The formats of files, by suffix. A further format is one more file and one more line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from mdsmix.errors import RecipeError
from mdsmix.extensions import load_extension
from mdsmix.messages import suggest_key
from mdsmix.shards.index import INDEX
from mdsmix.sources.arrow import Arrow
from mdsmix.sources.csv_table import CsvTable
from mdsmix.sources.format import Format
from mdsmix.sources.inflate import PACKINGS
from mdsmix.sources.json_array import Json
from mdsmix.sources.jsonl import Jsonl
from mdsmix.sources.mds import Mds
from mdsmix.sources.parquet import Parquet
from mdsmix.sources.plain_text import Text
from mdsmix.sources.tar import Tar
from mdsmix.sources.units import SourceFile


def _packed_or_not(new: Callable[[str], Format], *suffixes: str) -> dict[str, Format]:
    """A format that is read from the start to the end, and so through a decompressor too."""
    return {suffix + p: new(p) for p in ("", *PACKINGS) for suffix in suffixes}


FORMATS: dict[str, Format] = {
    **_packed_or_not(Jsonl, ".jsonl", ".ndjson"),
    **_packed_or_not(Json, ".json"),
    **_packed_or_not(partial(CsvTable, ","), ".csv"),
    **_packed_or_not(partial(CsvTable, "\t"), ".tsv"),
    **_packed_or_not(Text, ".txt", ".text"),
    **_packed_or_not(Tar, ".tar"),
    ".tgz": Tar(".gz"),
    INDEX: Mds(),
    ".parquet": Parquet(),
    **dict.fromkeys((".arrow", ".feather"), Arrow()),
}
"Suffix (lower case, one or two parts) -> format; a stream's key is the name of its index."
NAMED = {"text": ".txt", "mds": INDEX} | {
    name: f".{name}" for name in ("jsonl", "json", "csv", "tsv", "tar", "parquet", "arrow")
}
"What a recipe's `source.format` says -> the suffix of such files."
ENTRY_POINTS = "mdsmix.formats"
"The group by which other packages register a Format under its suffix."


def format_of(file: SourceFile) -> Format:
    """The format of a file; RecipeError where no format has the file's suffix, or the name that the
    recipe gives.
    """
    return format_by(file.name, file.read_as.format)


def format_by(path: str, named: str = "") -> Format:
    """Return the format of a file by its path, or by the name that a recipe gives.

    Raises RecipeError if no format has the file's suffix, or that name.
    """
    base = path.lower().rpartition("/")[2]
    suffixes = [f".{part}" for part in base.split(".")[1:]]
    last = "".join(suffixes[-1:])
    if named:
        return _named(named, last)
    for known in (base, "".join(suffixes[-2:]), last):
        if known in FORMATS:
            return FORMATS[known]
    if added := _added(last):
        return added
    plain = [suffix for suffix in FORMATS if not suffix.endswith(PACKINGS)]
    raise RecipeError(
        f"the source file {path} has no suffix that mdsmix reads ({', '.join(plain)}; text and tar also with {', '.join(PACKINGS)}): say "
        "what it is by source.format, rename or unpack it, or narrow the pattern that found it"
    )


def _added(suffix: str) -> Format | None:
    """The format that another package registers for this suffix."""
    found: Format | None = load_extension(ENTRY_POINTS, suffix) if suffix else None
    return found


def _named(name: str, suffix: str) -> Format:
    """The format that a recipe names; the file's suffix tells only whether the file is packed."""
    if known := NAMED.get(name):
        return FORMATS.get(known + suffix * (suffix in PACKINGS)) or FORMATS[known]
    if added := _added(f".{name}"):
        return added
    raise RecipeError(f"source.format is {name!r}; {suggest_key(name, list(NAMED))}")


def list_raised_versions(formats: Iterable[Format]) -> dict[str, int]:
    """Return the rules of formats whose version is above 1: name -> version."""
    return {of.rule: of.version for of in formats if of.version > 1}
