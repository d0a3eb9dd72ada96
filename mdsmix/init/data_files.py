"""Files, folders, patterns and URLs -> the files that contain data, each with its format, and their
first records.

In a folder, files without data are ignored: a README, hidden files, files of tokenizers, streams
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

Notices = list[str | MdsmixError]
"Messages on data that is in no stream: strings, and errors of files that could not be read."
NO_DATA = (
    *("readme", "license", "licence", "notice", "changelog", "requirements"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "config.json", "generation_config.json", "chat_template"),
    *("preprocessor_config.json", "processor_config.json", "model.safetensors"),
)
"""Names, or beginnings of names, of texts that are often next to data, and of files of tokenizers
and models.
"""
DATASET_INFO = "dataset_info.json"
MAX_RECORDS = 50
"The number of records that are read of a file: enough to see fields that some records lack."
MAX_BYTES = 1 << 40
"Bytes of a work unit: large enough that each file is one unit."


def find_data(names: Sequence[str], base: Path, notices: Notices) -> list[SourceFile]:
    """Find the files that contain data.

    Args:
        names: files, folders, patterns and URLs.
        base: the folder from which files are named.
        notices: a list that messages on files without data are appended to.

    Raises RecipeError if there is no file for a name.
    """
    data_files = dict[str, SourceFile]()
    unknown = list[str]()
    for name in names:
        for file, is_named in _expand_name(name, locate(name), base, notices):
            last = _last_step(file.name)
            is_data = is_named or not last.lower().startswith(NO_DATA)
            if not file.stat.size:
                notices.append(f"{file.name} is empty")
                continue
            if last == DATASET_INFO:
                notices.append(
                    f"{last} is not data: --dataset-info {file.name} makes streams of its entries"
                )
                continue
            known_file = _with_format(file, is_named) if is_data else None
            if known_file:
                data_files[file.location.url] = known_file
            else:
                unknown.append(file.name)
    if unknown:
        notices.append(
            f"not data by their names: {join_names(unknown)}; a file that is named itself is also "
            f"recognised by its first bytes, if its format is {', '.join(NAMED)}"
        )
    return list(data_files.values())


def _expand_name(
    name: str, location: Location, base: Path, notices: Notices
) -> Iterator[tuple[SourceFile, bool]]:
    """Yield the files that a name stands for, each with a flag: True if the user named the file
    itself, by its name or a pattern; False if the user named its folder.

    Args:
        name: a file, folder, pattern or URL, as the user wrote it.
        location: the place that `name` refers to.
        base: the folder from which files are named.
        notices: a list that messages on ignored files are appended to.
    """
    matches = location.expand()
    if matches:
        for match, stat in matches:
            yield SourceFile(location=match, stat=stat, name=name_of(match, base)), True
        return
    stats = dict(location.list(recursive=True))
    if not stats:
        raise RecipeError(
            f"{name} is not a file, and not a folder or pattern with files: name files of data, "
            "a folder of them, a pattern in quotes, or an s3:// URL."
        )
    for file in _folder_files(location, stats, base, notices):
        yield file, False


def _folder_files(
    folder: Location, stats: dict[str, Stat], base: Path, notices: Notices
) -> Iterator[SourceFile]:
    """Yield the files of a folder, without hidden files and published streams.

    Files of `save_to_disk` are in the order of the data set.

    Args:
        stats: path in the folder -> size and stamp.
    """
    published = sorted({_parent(name) for name in stats if _last_step(name) == MANIFEST} - {""})
    datasets = {_parent(name) for name in stats if _last_step(name) in (STATE, INDEX)}
    whole = sorted(datasets - {*published})
    whole = [path for path in whole if not _is_merged_part(path, whole, folder, stats)]
    # Data sets of several files that have an order: of save_to_disk, and of MDS shards.
    for path in whole:
        dataset = folder / path if path else folder
        for number, (location, stat) in enumerate(list_data_files(dataset)):
            order = f"{name_of(dataset, base)}/{number:09}"
            yield SourceFile(
                location=location, stat=stat, name=name_of(location, base), order=order
            )
    # All other files, each on its own.
    excluded = tuple(f"{path}/".lstrip("/") for path in (*whole, *published))
    for name, stat in stats.items():
        is_hidden = name.startswith(".") or "/." in name
        is_state = _last_step(name) in (MANIFEST, SPLITS)
        if not (is_hidden or is_state or name.startswith(excluded)):
            location = folder / name
            yield SourceFile(location=location, stat=stat, name=name_of(location, base))
    if published:
        notices.append(f"published streams were ignored: {', '.join(published)}")


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _last_step(path: str) -> str:
    return path.rpartition("/")[2]


def _is_merged_part(
    path: str, datasets: Sequence[str], folder: Location, stats: dict[str, Stat]
) -> bool:
    """Check whether a data set is only a part of another one in an outer folder: the index of the
    outer folder lists its shards. Streaming's merge_index makes such an index, and keeps the index
    of each part.

    Args:
        path: the data set's path in `folder`.
        datasets: the paths of all data sets in `folder`.
    """
    for outer in datasets:
        prefix = f"{outer}/" if outer else ""
        is_around = path != outer and path.startswith(prefix)
        if is_around and f"{prefix}{INDEX}" in stats:
            index = read_index(folder / outer if outer else folder)
            beginning = f"{path.removeprefix(prefix)}/"
            if any(file.basename.startswith(beginning) for file in index.files):
                return True
    return False


def _with_format(file: SourceFile, by_content: bool) -> SourceFile | None:
    """Return the file with its format; None if that is unknown.

    Args:
        by_content: whether the first bytes are read if the name does not tell the format.
    """
    try:
        keys = format_of(file).guess(file)
    except RecipeError:
        name = sniff_format(file) if by_content else ""
        return replace(file, read_as=ReadAs(format=name)) if name in NAMED else None
    return replace(file, read_as=ReadAs(**keys)) if keys else file


@dataclass(frozen=True, kw_only=True)
class FirstRecords:
    """The first records of a file, or of several files with the same shape and fields."""

    file: SourceFile
    records: Sequence[Any]
    bad: Counter[str]
    "Reason code -> number of items that cannot be read as records."

    def __len__(self) -> int:
        return len(self.records) + self.bad.total()

    def __add__(self, following: FirstRecords) -> FirstRecords:
        return replace(
            self, records=[*self.records, *following.records], bad=self.bad + following.bad
        )

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [record for record in self.records if isinstance(record, dict)]

    @property
    def fields(self) -> list[str]:
        """All field names at the top of the records, in their order."""
        return list(dict.fromkeys(str(name) for record in self.objects for name in record))

    def parsed(self, names: Collection[str]) -> Sequence[Any]:
        """Return the records. In formats whose cells are strings (CSV), the fields in `names` are
        parsed as JSON, as in a conversion.
        """
        if not format_of(self.file).cells_are_texts:
            return self.records
        copies = [dict(record) for record in self.records]
        for record in copies:
            parse_json_fields(record, names)
        return copies


def read_head(file: SourceFile) -> FirstRecords:
    """Read the first records of a file. Raises MdsmixError if it cannot be read."""
    batches = list(read_batches(plan_units([file], MAX_BYTES)[0], limit=MAX_RECORDS))
    return FirstRecords(
        file=file,
        records=[_as_object(record) for batch in batches for record in batch.records],
        bad=Counter(bad.reason for batch in batches for bad in batch.bad),
    )


def _as_object(record: Any) -> Any:
    """Return a bare list of messages as an object with this list, any other record as it is."""
    key = key_of_list(record)
    return {key: record} if key else record
