"""Files, folders, patterns and URLs -> the files that hold data, each with its format, and their
first records.

In a folder, files without data are left alone: a README, hidden files, files of tokenizers, streams
that mdsmix published there. A file that is named, or that a pattern finds, is data unless it is
empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.messages import join_names
from mdsmix.shapes.shape import key_of_list
from mdsmix.shards.index import INDEX, read_index
from mdsmix.shards.manifest import MANIFEST
from mdsmix.sources import ReadAs, SourceFile, plan_units, read_batches
from mdsmix.sources.find import SPLITS, STATE, list_data_files, name_of
from mdsmix.sources.format import parse_json_fields
from mdsmix.sources.formats import NAMED, format_of
from mdsmix.sources.sniff import sniff_format
from mdsmix.storage import Location, Stat, locate

Said = list[str | MdsmixError]
"Messages on data that is in no stream: sentences, and errors of files that could not be read."
NO_DATA = (
    *("readme", "license", "licence", "notice", "changelog", "requirements"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "config.json", "generation_config.json", "chat_template"),
    *("preprocessor_config.json", "processor_config.json", "model.safetensors"),
)
"""Names, or beginnings of names, of texts that lie beside data, and of files of tokenizers and
models.
"""
THEIRS = "dataset_info.json"
RECORDS = 50
"Records that are read of a file: enough to see fields that some records lack."
MOST_BYTES = 1 << 40


def find_data(names: Sequence[str], base: Path, said: Said) -> list[SourceFile]:
    """The files that hold data; RecipeError where a name finds nothing.

    Args:
        base: the folder from which files are named.
        said: takes sentences on files that hold no data.
    """
    found, unknown = dict[str, SourceFile](), list[str]()
    for name in names:
        for file, is_named in _files(name, locate(name), base, said):
            last = file.name.rpartition("/")[2]
            is_data = is_named or not last.lower().startswith(NO_DATA)
            if not file.stat.size:
                said.append(f"{file.name} is empty")
            elif last == THEIRS:
                said.append(
                    f"{last} is left alone: --dataset-info {file.name} makes streams of its entries"
                )
            elif is_data and (known := _known(file, is_named)):
                found[file.location.url] = known
            else:
                unknown.append(file.name)
    if unknown:
        said.append(
            f"no data by their names: {join_names(unknown)}; a file that is named itself is known by how it begins too, if that is a format "
            f"of {', '.join(NAMED)}"
        )
    return list(found.values())


def _files(name: str, place: Location, base: Path, said: Said) -> Iterator[tuple[SourceFile, bool]]:
    """The files that a name finds, each with whether the name names or matches the file itself, not
    its folder.
    """
    if matches := place.expand():
        for location, stat in matches:
            yield SourceFile(location=location, stat=stat, name=name_of(location, base)), True
    elif below := dict(place.list(recursive=True)):
        yield from ((file, False) for file in _of_folder(place, below, base, said))
    else:
        raise RecipeError(
            f"{name} is no file, and no folder or pattern that holds one: name files of data, a folder of them, a pattern "
            "in quotes, or an s3:// URL."
        )


def _of_folder(
    place: Location, below: dict[str, Stat], base: Path, said: Said
) -> Iterator[SourceFile]:
    """The files of a folder, without hidden files and published streams. Files of `save_to_disk`
    come in its order.
    """
    parts = [name.rpartition("/") for name in below]
    published = sorted({folder for folder, _, last in parts if last == MANIFEST} - {""})
    whole = sorted({folder for folder, _, last in parts if last in (STATE, INDEX)} - {*published})
    whole = [folder for folder in whole if not _is_part(folder, whole, place, below)]
    for folder in whole:
        at = place / folder if folder else place
        for number, (location, stat) in enumerate(list_data_files(at)):
            name, order = name_of(location, base), f"{name_of(at, base)}/{number:09}"
            yield SourceFile(location=location, stat=stat, name=name, order=order)
    apart = tuple(f"{folder}/".lstrip("/") for folder in (*whole, *published))
    for (_, _, last), (name, stat) in zip(parts, below.items(), strict=True):
        is_hidden = name.startswith(".") or "/." in name
        if not (is_hidden or name.startswith(apart) or last in (MANIFEST, SPLITS)):
            yield SourceFile(location=place / name, stat=stat, name=name_of(place / name, base))
    if published:
        said.append(f"published streams were left alone: {', '.join(published)}")


def _is_part(folder: str, others: Sequence[str], place: Location, below: dict[str, Stat]) -> bool:
    """Return whether the stream in `folder` is named by the index of a folder around it.

    Streaming's merge_index leaves the index of each part where it was.
    """
    for other in others:
        prefix = f"{other}/" if other else ""
        is_around = folder != other and folder.startswith(prefix)
        if is_around and f"{prefix}{INDEX}" in below:
            index = read_index(place / other if other else place)
            first = f"{folder.removeprefix(prefix)}/"
            if any(file.basename.startswith(first) for file in index.files):
                return True
    return False


def _known(file: SourceFile, by_content: bool) -> SourceFile | None:
    """The file with its format, by its name or, with `by_content`, by its first bytes; None for an
    unknown format.
    """
    try:
        more = format_of(file).guess(file)
        return replace(file, read_as=ReadAs(**more)) if more else file
    except RecipeError:
        name = sniff_format(file) if by_content else ""
    return replace(file, read_as=ReadAs(format=name)) if name in NAMED else None


@dataclass(frozen=True, kw_only=True)
class FirstRecords:
    """The first records of a file, or of several files that are alike."""

    file: SourceFile
    records: Sequence[Any]
    bad: Counter[str]
    "Reason code -> number of items that are no records."

    def __len__(self) -> int:
        return len(self.records) + self.bad.total()

    def __add__(self, other: FirstRecords) -> FirstRecords:
        return replace(self, records=[*self.records, *other.records], bad=self.bad + other.bad)

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [record for record in self.records if isinstance(record, dict)]

    @property
    def fields(self) -> list[str]:
        """All field names at the top of the records, in their order."""
        return list(dict.fromkeys(str(name) for record in self.objects for name in record))

    def parsed(self, names: Collection[str]) -> Sequence[Any]:
        """The records. In formats whose cells are texts (CSV), the fields in `names` are read as
        JSON, as a conversion reads them.
        """
        if not format_of(self.file).cells_are_texts:
            return self.records
        copies = [dict(record) for record in self.records]
        for record in copies:
            parse_json_fields(record, names)
        return copies


def head_of(file: SourceFile) -> FirstRecords:
    """The first records of a file; MdsmixError where it cannot be read."""
    batches = list(read_batches(plan_units([file], MOST_BYTES)[0], limit=RECORDS))
    return FirstRecords(
        file=file,
        records=[_as_object(record) for batch in batches for record in batch.records],
        bad=Counter(each.reason for batch in batches for each in batch.bad),
    )


def _as_object(record: Any) -> Any:
    """Return a record that is a bare list of messages as the object that a shape takes it for."""
    key = key_of_list(record)
    return {key: record} if key else record
