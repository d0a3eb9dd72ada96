"""index.json, version 2: the list of shards that Streaming reads.

Reading is strict, since a hostile index names files to open: a basename is a path below the
stream's folder and every size fits a shard. Streaming's merge_index writes such paths
(`0/shard.00000.mds`). Unknown top-level keys are ignored, as Streaming ignores them. Source:
streaming/base/format/base/writer.py, streaming/base/util.py.
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
"""256 MiB: the index of 400,000 shards, 26 TB as a rule. More would take more memory than a look at
a stream should.
"""
HASH_ALGORITHM = "xxh128"
"The hash in the index: xxh128 runs at 29 GB/s here, xxh64 at 10, and it names the shard too."


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a shard."""

    basename: str
    bytes: int
    hashes: dict[str, str] = field(default_factory=dict)

    def with_number(self, number: int) -> StoredFile:
        """The `number`-th file, from 0, of several with the same bytes: `x.mds`, `x-1.mds`,
        `x-2.mds`.
        """
        basename = self.basename.replace(".mds", f"-{number}.mds")
        return replace(self, basename=basename) if number else self

    def find_problem(self, found: Mapping[str, Stat]) -> str | None:
        """Says what is wrong where a listing lacks the file or shows another size; None where it is
        there.
        """
        stat = found.get(self.basename)
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
        """The algorithm that compressed the shard's file, for example `zstd`; blank where
        none did.
        """
        return str(self.compression).partition(":")[0] if self.zip_data else ""

    @property
    def stored(self) -> StoredFile:
        """The file that lies in the stream's folder: the compressed one where there is one."""
        return self.zip_data or self.raw_data


@dataclass(frozen=True)
class Index:
    """A whole index.json; `content` is its bytes as stored."""

    shards: tuple[Shard, ...]
    content: bytes = field(repr=False)

    @cached_property
    def hash(self) -> str:
        """xxh128 of the stored bytes, 32 hex digits: the identity of a published stream."""
        return xxhash.xxh128_hexdigest(self.content)

    @property
    def files(self) -> list[StoredFile]:
        """The files that lie in the stream's folder, in the index's order."""
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
    """The index of the shards, in their order, byte for byte as MDSWriter would write it."""
    tree = {"version": 2, "shards": orjson.loads(orjson.dumps(shards))}
    return Index(tuple(shards), json.dumps(tree, sort_keys=True).encode())


def parse_index(content: bytes, where: str) -> Index:
    """Reads an index from its bytes; Unreachable names the first thing that a reader would stumble
    over.

    100,000 shards take 3.6 s of CPU. msgspec would take 1.4 s, but it passes over unknown keys and
    is a second reader beside that of recipes.
    """
    try:
        tree, shards = json.loads(content), list[Shard]()
        _refuse_litdata(tree, where)
        if not isinstance(tree, Mapping) or not isinstance(tree.get("shards"), list):
            raise schema.Misfit("it has no list `shards`.")
        for number, entry in enumerate(tree["shards"]):
            _refuse_other_writer(entry, where)
            shards.append(schema.parse_mapping(Shard, entry, f"shards[{number}]"))
            if problem := _problem(shards[-1]):
                raise schema.Misfit(f"shards[{number}] {problem}")
    except (ValueError, RecursionError, schema.Misfit) as error:
        raise Unreachable(
            f"{where} is no index that Streaming could read: {flatten_error(error)}; "
            "publish the stream again."
        ) from None
    return Index(tuple(shards), content)


OTHER_WRITERS = {"json": "JSONWriter", "csv": "CSVWriter", "tsv": "TSVWriter", "xsv": "XSVWriter"}
"""Format of a shard -> the writer of Streaming that makes it. Their indexes have other keys than
those of MDS.
"""


def _refuse_other_writer(entry: Any, where: str) -> None:
    """Raise Unreachable if the entry of a shard is of another format of Streaming than MDS."""
    name = entry.get("format") if isinstance(entry, Mapping) else None
    if isinstance(name, str) and name in OTHER_WRITERS:
        read_as = "jsonl" if name == "json" else name
        raise Unreachable(
            f"{where} lists shards of the format {name}, which Streaming's {OTHER_WRITERS[name]} writes, and mdsmix reads MDS "
            f"alone: convert them (name the files shard.* as a source, with format: {read_as}), or write the stream "
            "with MDSWriter."
        )


def _refuse_litdata(tree: Any, where: str) -> None:
    """Raise Unreachable if the index is of litData, which lists chunks and not shards."""
    if isinstance(tree, Mapping) and isinstance(tree.get("chunks"), list) and "shards" not in tree:
        raise Unreachable(
            f"{where} is an index of litData (it lists chunks), and mdsmix reads MDS: convert the data from its own files, "
            "or write it out by litData's StreamingDataset first."
        )


def read_index(folder: Location) -> Index:
    """The index of the stream published in `folder`; Unreachable where there is none."""
    at = folder / INDEX
    return find_index(folder) or parse_index(at.read(), str(at))  # read() raises, and says why


def find_index(folder: Location) -> Index | None:
    """The index in `folder`; None where there is none, Unreachable where it is damaged."""
    at = folder / INDEX
    content = find_metadata(at)
    return None if content is None else parse_index(content, str(at))


def find_metadata(at: Location) -> bytes | None:
    """The bytes of an index or a manifest, in one request; None where it is missing, Unreachable
    where it is larger than either can be.
    """
    found = at.fetch(MOST_METADATA_BYTES)
    if found and found[0].size > MOST_METADATA_BYTES:
        raise Unreachable(
            f"{at} has {found[0].size:,} bytes, and no index or manifest has more than {MOST_METADATA_BYTES:,}, so it is not read; "
            "publish the stream again."
        )
    return found[1] if found else None


def _is_below(path: str) -> bool:
    """Return whether a relative path names a file below the folder that it is relative to."""
    has_odd_part = any(part in ("", ".", "..") for part in path.split("/"))
    return not has_odd_part and "\0" not in path


def _problem(shard: Shard) -> str | None:
    """The first thing in an entry that a reader would stumble over; None where nothing is wrong."""
    for file in filter(None, (shard.raw_data, shard.zip_data)):
        if not _is_below(file.basename):
            name = schema.shorten(file.basename)
            return f"names the file {name}, which is not inside the stream's folder"
        if not 0 <= file.bytes < 1 << 32:
            return f"says it has {schema.shorten(file.bytes)} bytes"
    columns = len(shard.column_names)
    is_even = columns == len(shard.column_encodings) == len(shard.column_sizes)
    if bool(shard.compression) != bool(shard.zip_data) or shard.samples < 0 or not is_even:
        return "contradicts itself in samples, in columns or in whether it is compressed"
    for encoding in shard.column_encodings:
        try:
            find_codec(encoding)
        except (TypeError, ValueError, ArithmeticError):
            return f"has a column of the encoding {schema.shorten(encoding)}, which is none"
    return None
