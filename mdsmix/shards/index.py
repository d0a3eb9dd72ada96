"""index.json, version 2: the list of shards that Streaming reads.

Reading is strict, since an index may be hostile and names files to open. A basename must be a path
below the stream's folder (Streaming's merge_index writes paths such as `0/shard.00000.mds`), and
every size must fit a shard. Unknown top-level keys are ignored, as Streaming ignores them.

Source: streaming/base/format/base/writer.py, streaming/base/util.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

import orjson
import xxhash

from mdsmix import schema
from mdsmix.errors import Unreachable
from mdsmix.frozen import frozen
from mdsmix.messages import flatten_error
from mdsmix.shards.codecs import find_codec
from mdsmix.storage import Location, Stat

INDEX = "index.json"
MOST_METADATA_BYTES = 1 << 28
"""256 MiB: the size of an index of 400,000 shards, usually a stream of 26 TB. Reading a larger file
would take too much memory only to look at a stream.
"""
HASH_ALGORITHM = "xxh128"
"The hash in the index and in shards' names: xxh128 runs at 29 GB/s here, xxh64 at 10."


@frozen(kw_only=True, slots=True)
class StoredFile:
    """One stored file, such as the file of a shard."""

    basename: str
    "Its path below the stream's folder."
    bytes: int
    hashes: dict[str, str] = field(default_factory=dict)
    "Hash algorithm, for example xxh128 -> hex digest of the file."

    def with_number(self, number: int) -> StoredFile:
        """Return this file with `number` in its name, so that files with equal bytes get different
        names: 0, 1 and 2 give `x.mds`, `x-1.mds` and `x-2.mds`.
        """
        if not number:
            return self
        return replace(self, basename=self.basename.replace(".mds", f"-{number}.mds"))

    def find_problem(self, listing: Mapping[str, Stat]) -> str | None:
        """Return a sentence if the listing lacks this file or shows another size; otherwise None.

        Args:
            listing: path below the stream's folder -> Stat, as `Index.list_files` returns it.
        """
        stat = listing.get(self.basename)
        if stat is None:
            return f"expected {self.bytes:,} bytes, found no such file"
        if stat.size != self.bytes:
            return f"expected {self.bytes:,} bytes, found {stat.size:,}"
        return None


@frozen(kw_only=True, slots=True)
class Shard:
    """One entry of index.json, with the names that Streaming gives its keys."""

    version: int
    format: str
    samples: int
    raw_data: StoredFile
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    zip_data: StoredFile | None = None
    compression: str | None = None
    hashes: list[str] = field(default_factory=list)
    size_limit: int | str | None = None

    @property
    def columns(self) -> dict[str, str]:
        return dict(zip(self.column_names, self.column_encodings, strict=False))

    @property
    def packing(self) -> str:
        """The algorithm that compressed the shard's file, for example `zstd`; empty if the file is
        not compressed.
        """
        if not self.zip_data:
            return ""
        return str(self.compression).partition(":")[0]

    @property
    def stored(self) -> StoredFile:
        """The file that is in the stream's folder: the compressed file if the shard is compressed,
        otherwise the raw file.
        """
        return self.zip_data or self.raw_data


@frozen
class Index:
    """A whole index.json."""

    shards: tuple[Shard, ...]
    content: bytes = field(repr=False)
    "The bytes as stored."

    @cached_property
    def hash(self) -> str:
        """xxh128 of the stored bytes, 32 hex digits: the identity of a published stream."""
        return xxhash.xxh128_hexdigest(self.content)

    @property
    def files(self) -> list[StoredFile]:
        """The files of the shards in the stream's folder, in the index's order."""
        return [shard.stored for shard in self.shards]

    def list_files(self, folder: Location) -> dict[str, Stat]:
        """Return {path below `folder`: Stat} for the files of the stream in `folder`.

        Files in subfolders are listed only if the index names a shard in a subfolder.
        """
        has_folders = any("/" in file.basename for file in self.files)
        return dict(folder.list(recursive=has_folders))

    # Checks ask for both again and again: 44 times for each stream.
    @cached_property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @cached_property
    def bytes(self) -> int:
        return sum(shard.stored.bytes for shard in self.shards)


def make_index(shards: Sequence[Shard]) -> Index:
    """Make the index of the shards, in their order, byte for byte as MDSWriter would write it."""
    tree = {"version": 2, "shards": orjson.loads(orjson.dumps(shards))}
    return Index(tuple(shards), json.dumps(tree, sort_keys=True).encode())


def parse_index(content: bytes, where: str) -> Index:
    """Parse the bytes of an index.json.

    Raises Unreachable if Streaming could not read the index; the message names the first problem.

    100,000 shards take 3.6 s of CPU. msgspec would take 1.4 s, but it ignores unknown keys, and
    mdsmix would then have two parsers, since recipes are parsed by `mdsmix.schema`.

    Args:
        content: the bytes of the file.
        where: the file's URL, for messages.
    """
    shards = list[Shard]()
    try:
        tree = json.loads(content)
        _refuse_litdata(tree, where)
        if not isinstance(tree, Mapping) or not isinstance(tree.get("shards"), list):
            raise schema.Misfit("it has no list `shards`.")
        for number, entry in enumerate(tree["shards"]):
            _refuse_other_writer(entry, where)
            shard = schema.parse_mapping(Shard, entry, f"shards[{number}]")
            problem = _find_problem(shard)
            if problem:
                raise schema.Misfit(f"shards[{number}] {problem}")
            shards.append(shard)
    except (ValueError, RecursionError, schema.Misfit) as error:
        raise Unreachable(
            f"{where} is not an index that Streaming can read: {flatten_error(error)}; "
            "publish the stream again."
        ) from None
    return Index(tuple(shards), content)


OTHER_WRITERS = {"json": "JSONWriter", "csv": "CSVWriter", "tsv": "TSVWriter", "xsv": "XSVWriter"}
"""Format of a shard -> the class of Streaming that writes it. In these formats the entries of
index.json have other keys than in MDS.
"""


def _refuse_other_writer(entry: Any, where: str) -> None:
    """Raise Unreachable if a shard's entry has a format of Streaming other than MDS."""
    name = entry.get("format") if isinstance(entry, Mapping) else None
    if isinstance(name, str) and name in OTHER_WRITERS:
        read_as = "jsonl" if name == "json" else name
        raise Unreachable(
            f"the index {where} lists shards of the format {name}, which Streaming's "
            f"{OTHER_WRITERS[name]} writes, but mdsmix reads only MDS. Write the stream with "
            "MDSWriter, or convert its files: in a recipe, name the files shard.* as the source, "
            f"with format: {read_as}."
        )


def _refuse_litdata(tree: Any, where: str) -> None:
    """Raise Unreachable if the index is litData's, which lists chunks instead of shards."""
    if isinstance(tree, Mapping) and isinstance(tree.get("chunks"), list) and "shards" not in tree:
        raise Unreachable(
            f"{where} is an index of litData, since it lists chunks, but mdsmix reads only MDS. "
            "Convert the original files of the data with mdsmix, or read the data with litData's "
            "StreamingDataset and write it with MDSWriter."
        )


def read_index(folder: Location) -> Index:
    """Read the index of the stream published in `folder`.

    Raises Unreachable if the folder has no index, or a damaged index.
    """
    file = folder / INDEX
    index = find_index(folder)
    if index is None:
        content = file.read()  # raises the error of a missing file
        return parse_index(content, str(file))
    return index


def find_index(folder: Location) -> Index | None:
    """Return the index in `folder`, or None if the folder has no index.

    Raises Unreachable if the index is damaged.
    """
    file = folder / INDEX
    content = find_metadata(file)
    return None if content is None else parse_index(content, str(file))


def find_metadata(file: Location) -> bytes | None:
    """Read an index or a manifest by one request. Return its bytes, or None if the file is missing.

    Raises Unreachable if the file has more than MOST_METADATA_BYTES.
    """
    answer = file.fetch(MOST_METADATA_BYTES)
    if answer is None:
        return None
    stat, content = answer
    if stat.size > MOST_METADATA_BYTES:
        raise Unreachable(
            f"{file} has {stat.size:,} bytes, so mdsmix does not read it: an index or a manifest "
            f"has at most {MOST_METADATA_BYTES:,} bytes. Publish the stream again."
        )
    return content


def _is_below(path: str) -> bool:
    """Return whether a relative path stays below the folder where it starts: `0/x.mds` does,
    `../x.mds` does not.
    """
    has_odd_name = any(name in ("", ".", "..") for name in path.split("/"))
    return not has_odd_name and "\0" not in path


def _find_problem(shard: Shard) -> str | None:
    """Return the first problem that would make a reader of this shard fail, as the end of a
    sentence that begins with `shards[3]`. Return None if the shard has no problem.
    """
    for file in (shard.raw_data, shard.zip_data):
        if file is None:
            continue
        if not _is_below(file.basename):
            name = schema.shorten_value(file.basename)
            return f"names the file {name}, which is not inside the stream's folder"
        if not 0 <= file.bytes < 1 << 32:
            size = schema.shorten_value(file.bytes)
            return f"has a size of {size} bytes, but a file of MDS has at most 4,294,967,295"
    columns = len(shard.column_names)
    has_all_columns = columns == len(shard.column_encodings) == len(shard.column_sizes)
    is_compressed = bool(shard.compression)
    if is_compressed != bool(shard.zip_data):
        return "has only one of the keys `compression` and `zip_data`, which belong together"
    if shard.samples < 0:
        return f"has a negative number of samples, {schema.shorten_value(shard.samples)}"
    if not has_all_columns:
        return "has different numbers of column names, column encodings and column sizes"
    for encoding in shard.column_encodings:
        try:
            find_codec(encoding)
        except (TypeError, ValueError, ArithmeticError):
            return f"has a column with the wrong encoding {schema.shorten_value(encoding)}"
    return None
