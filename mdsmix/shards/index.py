"""index.json, version 2: the list of shards that Streaming reads.

Reading is strict, since an index may be hostile and names files to open. A basename must be a path
below the stream's folder (Streaming's merge_index writes paths such as `0/shard.00000.mds`), and
every size must fit a shard. Unknown top-level keys are ignored, as Streaming ignores them.

Source: streaming/base/format/base/writer.py, streaming/base/util.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import orjson
import xxhash

from mdsmix import schema
from mdsmix.errors import Unreachable
from mdsmix.messages import flatten_error
from mdsmix.shards.codecs import find_codec
from mdsmix.storage import Location, Stat

INDEX = "index.json"
MOST_METADATA_BYTES = 1 << 28
"""256 MiB: the index of 400,000 shards, which usually have 26 TB. Reading a larger one would take
too much memory for looking at a stream.
"""
HASH_ALGORITHM = "xxh128"
"The hash in the index and in shards' names: xxh128 runs at 29 GB/s here, xxh64 at 10."


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a shard."""

    basename: str
    bytes: int
    hashes: dict[str, str] = field(default_factory=dict)

    def with_number(self, number: int) -> StoredFile:
        """Return the file with the name of the `number`-th, from 0, of several files with the same
        bytes: `x.mds`, `x-1.mds`, `x-2.mds`.
        """
        if not number:
            return self
        return replace(self, basename=self.basename.replace(".mds", f"-{number}.mds"))

    def find_problem(self, listing: Mapping[str, Stat]) -> str | None:
        """Return what is wrong if a listing lacks the file or shows another size; otherwise None.

        Args:
            listing: path below the stream's folder -> Stat.
        """
        stat = listing.get(self.basename)
        if stat is None:
            return f"expected {self.bytes:,} bytes, found no such file"
        if stat.size != self.bytes:
            return f"expected {self.bytes:,} bytes, found {stat.size:,}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """The file that is in the stream's folder: compressed, if the shard has such a file."""
        return self.zip_data or self.raw_data


@dataclass(frozen=True)
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
        """List the files of the stream in `folder`: path below it -> Stat.

        Folders inside are listed only if a shard is in one.
        """
        has_folders = any("/" in file.basename for file in self.files)
        return dict(folder.list(recursive=has_folders))

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.stored.bytes for shard in self.shards)


def make_index(shards: Sequence[Shard]) -> Index:
    """Make the index of the shards, in their order, byte for byte as MDSWriter would write it."""
    tree = {"version": 2, "shards": orjson.loads(orjson.dumps(shards))}
    return Index(tuple(shards), json.dumps(tree, sort_keys=True).encode())


def parse_index(content: bytes, where: str) -> Index:
    """Parse an index. Raises Unreachable if Streaming could not read it, with the first problem.

    100,000 shards take 3.6 s of CPU. msgspec would take 1.4 s, but it ignores unknown keys, and it
    would be a second reader in addition to that of recipes.

    Args:
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
"""Format of a shard -> the class of Streaming that writes it. The indexes of these formats have
other keys than those of MDS.
"""


def _refuse_other_writer(entry: Any, where: str) -> None:
    """Raise Unreachable if a shard's entry has a format of Streaming other than MDS."""
    name = entry.get("format") if isinstance(entry, Mapping) else None
    if isinstance(name, str) and name in OTHER_WRITERS:
        read_as = "jsonl" if name == "json" else name
        raise Unreachable(
            f"{where} lists shards of the format {name}, written by Streaming's "
            f"{OTHER_WRITERS[name]}, and mdsmix reads only MDS: convert them (name the files "
            f"shard.* as a source, with format: {read_as}), or write the stream with MDSWriter."
        )


def _refuse_litdata(tree: Any, where: str) -> None:
    """Raise Unreachable if the index is litData's, which lists chunks instead of shards."""
    if isinstance(tree, Mapping) and isinstance(tree.get("chunks"), list) and "shards" not in tree:
        raise Unreachable(
            f"{where} is an index of litData (it lists chunks), and mdsmix reads MDS: convert the "
            "data from its own files, or first write it as MDS from litData's StreamingDataset."
        )


def read_index(folder: Location) -> Index:
    """Read the index of the stream published in `folder`. Raises Unreachable if there is none."""
    file = folder / INDEX
    index = find_index(folder)
    if index is None:
        return parse_index(file.read(), str(file))  # read() raises the error of a missing file
    return index


def find_index(folder: Location) -> Index | None:
    """Return the index in `folder`, or None if there is none.

    Raises Unreachable if it is damaged.
    """
    file = folder / INDEX
    content = find_metadata(file)
    return None if content is None else parse_index(content, str(file))


def find_metadata(file: Location) -> bytes | None:
    """Return the bytes of an index or a manifest, by one request, or None if it is missing.

    Raises Unreachable if it is larger than an index or a manifest can be.
    """
    answer = file.fetch(MOST_METADATA_BYTES)
    if answer is None:
        return None
    stat, content = answer
    if stat.size > MOST_METADATA_BYTES:
        raise Unreachable(
            f"{file} has {stat.size:,} bytes and is not read, since an index or a manifest has at "
            f"most {MOST_METADATA_BYTES:,}; publish the stream again."
        )
    return content


def _is_below(path: str) -> bool:
    """Return whether a relative path names a file below the folder that it is relative to."""
    has_odd_name = any(name in ("", ".", "..") for name in path.split("/"))
    return not has_odd_name and "\0" not in path


def _find_problem(shard: Shard) -> str | None:
    """Return the first problem of an entry that would make a reader fail; otherwise None."""
    for file in (shard.raw_data, shard.zip_data):
        if file is None:
            continue
        if not _is_below(file.basename):
            name = schema.shorten_value(file.basename)
            return f"names the file {name}, which is not inside the stream's folder"
        if not 0 <= file.bytes < 1 << 32:
            return f"has a size of {schema.shorten_value(file.bytes)} bytes"
    columns = len(shard.column_names)
    has_all_columns = columns == len(shard.column_encodings) == len(shard.column_sizes)
    is_compressed = bool(shard.compression)
    if is_compressed != bool(shard.zip_data) or shard.samples < 0 or not has_all_columns:
        return "contradicts itself in samples, in columns or in whether it is compressed"
    for encoding in shard.column_encodings:
        try:
            find_codec(encoding)
        except (TypeError, ValueError, ArithmeticError):
            return f"has a column of the unknown encoding {schema.shorten_value(encoding)}"
    return None
