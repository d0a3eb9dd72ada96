"""Files, folders, patterns and URLs -> the files that contain data, each with its format, and their
first records.

In a folder, files without data are ignored: a README, hidden files, files of tokenizers, streams
that mdsmix published there. A file that is named, or that a pattern finds, is data unless it is
empty.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.frozen import frozen
from mdsmix.kinds.recipe_schema import SCHEMA_FILE
from mdsmix.messages import join_names
from mdsmix.record import NoRecord
from mdsmix.shapes.shape import find_list_key
from mdsmix.shards.index import INDEX, read_index
from mdsmix.shards.manifest import MANIFEST
from mdsmix.sources import ReadAs, SourceFile, plan_units, read_batches
from mdsmix.sources.find import SPLITS, STATE, describe_links, list_data_files, name_of
from mdsmix.sources.format import BYTE_ORDER_MARK, parse_cells
from mdsmix.sources.formats import NAMED, format_of
from mdsmix.sources.inflate import open_unpacked
from mdsmix.sources.sniff import sniff_format
from mdsmix.storage import Location, Stat, find_store, locate

Notices = list[str | MdsmixError]
"Messages on data that is in no stream: strings, and errors of files that could not be read."
NO_DATA = (
    *("readme", "license", "licence", "notice", "changelog", "requirements"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "config.json", "generation_config.json", "chat_template"),
    *("preprocessor_config.json", "processor_config.json", "model.safetensors"),
    SCHEMA_FILE,
)
"""Names, or beginnings of names, of texts that are often next to data, and of files of tokenizers
and models.
"""
DATASET_INFO = "dataset_info.json"
MAX_RECORDS = 50
"The number of records that are read of a file: enough to see fields that some records lack."
BEGINNING_BYTES = 64 << 10
MAX_BYTES = 1 << 40
"Bytes to convert as one piece of work: so many that each file is one piece."


class _NamedFile(NamedTuple):
    """A file that a name on the command line means. The name may be a folder or a pattern."""

    file: SourceFile
    is_named: bool
    "True: the user named the file itself, by its name or a pattern; False: by its folder."


def find_data(names: Sequence[str], base: Path, notices: Notices) -> list[SourceFile]:
    """Find the files that contain data.

    Args:
        names: files, folders, patterns and URLs.
        base: the folder from which files are named.
        notices: a list that messages on files without data are appended to.

    Raises RecipeError if no file belongs to a name.
    """
    data_files = dict[str, SourceFile]()
    unknown, unknown_named = list[str](), list[str]()
    for name in names:
        for file, is_named in _expand_name(name, locate(name), base, notices):
            file_name = _last_step(file.name)
            is_data = is_named or not file_name.lower().startswith(NO_DATA)
            if not file.stat.size:
                notices.append(f"{file.name} is empty and was ignored")
                continue
            if file_name == DATASET_INFO:
                notices.append(
                    f"{file.name} is not data but a list of data sets, and was ignored: pass "
                    f"--dataset-info {file.name} to make streams of its entries"
                )
                continue
            known_file = _with_format(file, is_named) if is_data else None
            if known_file:
                data_files[file.location.url] = known_file
            else:
                (unknown_named if is_named else unknown).append(file.name)
    _drop_linked_twins(data_files, notices)
    if unknown:
        notices.append(
            f"ignored, since these do not look like data: {join_names(unknown)}; a file that you "
            "name yourself, and not by its folder, is also recognised by its first bytes, if its "
            f"format is {', '.join(NAMED)}"
        )
    if unknown_named:
        notices.append(
            "ignored, since neither name nor first bytes show a format of mdsmix: "
            f"{join_names(unknown_named)}; rename a file of plain text to .txt, or write the "
            f"recipe by hand and set source.format ({', '.join(NAMED)})"
        )
    return list(data_files.values())


def _drop_linked_twins(data_files: dict[str, SourceFile], notices: Notices) -> None:
    """Keep one path of each file that links lead to by several paths: its own, or the first link if
    its own is not among the data. The others would train the same records twice.

    Args:
        data_files: URL -> file; these files are removed from it.
        notices: a list that a message on the removed links is appended to.
    """
    targets = {url: os.path.realpath(url) for url in data_files if not find_store(url)}
    kept = dict[str, SourceFile]()  # the file that links lead to -> the path that is read
    for url, target in sorted(targets.items(), key=lambda item: (item[0] != item[1], item)):
        if target not in kept:
            kept[target] = data_files[url]
            continue
        link = data_files.pop(url)
        notices.append(
            f"{link.name} is by a link the same file as {kept[target].name}, whose records are "
            "read already, and was ignored"
        )


def _expand_name(
    name: str, location: Location, base: Path, notices: Notices
) -> Iterator[_NamedFile]:
    """Yield the files that a name on the command line means.

    Args:
        name: a file, folder, pattern or URL, as the user wrote it.
        location: the place that `name` refers to.
        base: the folder from which files are named.
        notices: a list that messages on ignored files are appended to.
    """
    matches = location.expand()
    if matches:
        for match, stat in matches:
            file = SourceFile(location=match, stat=stat, name=name_of(match, base))
            yield _NamedFile(file, is_named=True)
        return
    stats = dict(location.list(recursive=True))
    on_links = [*describe_links(location.skipped_links(), base, "itself")]
    if not stats:
        raise RecipeError(
            f"{name} is not a file, and not a folder or pattern with files: name files of data, "
            "a folder of them, a pattern in quotes, or a URL of a bucket"
            + "".join(f"; {sentence}" for sentence in on_links)
            + "."
        )
    notices += on_links
    for file in _list_folder_files(location, stats, base, notices):
        yield _NamedFile(file, is_named=False)


def _list_folder_files(
    folder: Location, stats: dict[str, Stat], base: Path, notices: Notices
) -> Iterator[SourceFile]:
    """Yield the files of a folder and of the folders in it, without hidden files and published
    streams.

    Args:
        stats: path in `folder` -> the file's size and stamp.
        base: the folder from which files are named.
        notices: a list that a message on published streams is appended to.
    """
    # Without "", the folder itself: a manifest in it does not exclude all files.
    published = sorted({_parent(name) for name in stats if _last_step(name) == MANIFEST} - {""})
    # First the data sets whose files have an order: of save_to_disk, and of MDS shards.
    datasets = {_parent(name) for name in stats if _last_step(name) in (STATE, INDEX)}
    unpublished = sorted(datasets - {*published})
    ordered = [
        path for path in unpublished if not _is_merged_part(path, unpublished, folder, stats)
    ]
    for path in ordered:
        dataset = folder / path if path else folder
        for number, (location, stat) in enumerate(list_data_files(dataset)):
            order = f"{name_of(dataset, base)}/{number:09}"
            yield SourceFile(
                location=location, stat=stat, name=name_of(location, base), order=order
            )
    # Then all other files, each on its own.
    # Beginnings of paths. For the folder itself this is "", which excludes all files.
    excluded = tuple(f"{path}/".lstrip("/") for path in (*ordered, *published))
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
    """Check whether a data set is only a part of another one: the index of an outer folder lists
    the part's shards. Streaming's merge_index writes an outer index, and keeps the index of each
    part.

    Args:
        path: the data set's path in `folder`.
        datasets: the paths of all data sets in `folder`.
        stats: path in `folder` -> the file's size and stamp.
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
    """Return the file with its format; None if the format is unknown.

    Args:
        by_content: whether to recognise the format by the first bytes if the name does not tell it.
    """
    try:
        keys = format_of(file).guess(file)
    except RecipeError:  # no format has this suffix
        format_name = sniff_format(file) if by_content else ""
        if format_name not in NAMED:
            return None
        return replace(file, read_as=ReadAs(format=format_name))
    return replace(file, read_as=ReadAs(**keys)) if keys else file


@frozen(kw_only=True)
class FirstRecords:
    """The first records of a file, or of several files with the same shape and fields."""

    file: SourceFile
    records: Sequence[Any]
    bad: Counter[str]
    "Reason code -> number of items that cannot be read as records."

    def __len__(self) -> int:
        return len(self.records) + self.bad.total()

    def __add__(self, following: FirstRecords) -> FirstRecords:
        """Return the records of both files, as records of the first file."""
        return replace(
            self, records=[*self.records, *following.records], bad=self.bad + following.bad
        )

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The records that are objects, and not for example lists or numbers."""
        return [record for record in self.records if isinstance(record, dict)]

    @property
    def fields(self) -> list[str]:
        """All field names at the top of the records, in their order."""
        names = dict[str, None]()
        for record in self.objects:
            names |= dict.fromkeys(map(str, record))
        return list(names)

    def parse_records(
        self, names: Collection[str], text_or_messages: Collection[str] = ()
    ) -> Sequence[Any]:
        """Return the records. In formats whose cells are strings (CSV), fields are parsed as JSON,
        as in a conversion.

        A record with messages that are not valid JSON becomes a NoRecord, the reason.

        Args:
            names: the fields with lists or objects.
            text_or_messages: the fields with strings or messages.
        """
        if not format_of(self.file).cells_are_texts:
            return self.records
        structured = set(names).difference(text_or_messages)
        parsed = list[Any]()
        for record in map(dict, self.records):
            reason = parse_cells(record, structured, text_or_messages)
            parsed.append(NoRecord(reason) if reason else record)
        return parsed


def read_head(file: SourceFile) -> FirstRecords:
    """Read the first records of a file. Raises MdsmixError if it cannot be read."""
    # With a window of MAX_BYTES a file is one work unit. Only its first records are read.
    whole_file = plan_units([file], MAX_BYTES)[0]
    records = list[Any]()
    bad = Counter[str]()
    for batch in read_batches(whole_file, limit=MAX_RECORDS):
        records += map(_as_object, batch.records)
        bad.update(bad_record.reason for bad_record in batch.bad)
    return FirstRecords(file=file, records=records, bad=bad)


def read_beginning(file: SourceFile) -> str:
    """Return the first 64 KiB of a text file, uncompressed. Bytes that are not UTF-8 are left out.
    Raises MdsmixError if it cannot be read.
    """
    packing = getattr(format_of(file), "packing", "")
    with open_unpacked(file, packing) as stream:
        return stream.read(BEGINNING_BYTES).removeprefix(BYTE_ORDER_MARK).decode(errors="ignore")


def _as_object(record: Any) -> Any:
    """Return a list of messages as an object, such as {"messages": [...]}. Return any other record
    unchanged.
    """
    key = find_list_key(record)
    return {key: record} if key else record
