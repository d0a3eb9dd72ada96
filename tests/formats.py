"""The same records as a file of every format, and files as they are read."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from mdsmix.ragged import Ragged
from mdsmix.shards.index import make_index
from mdsmix.shards.shard_files import ShardLayout, lay_out_samples, store_shards
from mdsmix.sources import (
    ReadAs,
    RecordBatch,
    Unit,
    content_of,
    find_files,
    plan_units,
    read_batches,
)
from mdsmix.sources.format import Item
from mdsmix.storage import locate

Record = Mapping[str, Any]
Records = Sequence[Record]


def cell(value: Any) -> str:
    """A value where a cell can only be a text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_table(records: Records, delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writerow(records[0])
    writer.writerows([[cell(record[name]) for name in records[0]] for record in records])
    return out.getvalue().encode()


def tar_of(members: Iterable[tuple[str, bytes]], mode: Any = "w", **settings: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, **settings) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def as_tar(records: Iterable[Record], mode: Any = "w") -> bytes:
    """Each value is a member: bytes as they are."""
    cells = ((f"{n:05}.{name}", value) for n, record in enumerate(records) for name, value in record.items())  # fmt: skip
    return tar_of(((n, v if isinstance(v, bytes) else cell(v).encode()) for n, v in cells), mode)


def as_arrow(records: Records, new: Callable[..., Any]) -> bytes:
    table, out = pa.Table.from_pylist(list(records)), io.BytesIO()
    with new(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return out.getvalue()


def as_parquet(records: Records) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(records)), out, row_group_size=3)
    return out.getvalue()


def write_mds(folder: Path, records: Records) -> Path:
    """A stream of raw columns, in shards of three samples; its index is the source."""
    encodings = {name: "str" if isinstance(value, str) else "json" for name, value in records[0].items()}  # fmt: skip
    layout, shards = ShardLayout(encodings), []
    folder.mkdir(parents=True)
    for start in range(0, len(records), 3):
        some = records[start : start + 3]
        columns = {name: Ragged.from_rows([cell(r[name]).encode() for r in some], np.uint8) for name in encodings}  # fmt: skip
        shards += store_shards(locate(folder), layout, lay_out_samples(layout, columns))
    (folder / "index.json").write_bytes(make_index(shards).content)
    return folder


PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
WRITTEN: dict[str, Callable[[Records], bytes]] = {
    "jsonl": lambda records: b"".join(orjson.dumps(record) + b"\n" for record in records),
    "json": lambda records: json.dumps(list(records), indent=1).encode(),
    "parquet": as_parquet,
    "arrow": lambda records: as_arrow(records, pa.ipc.new_stream),
    "feather": lambda records: as_arrow(records, pa.ipc.new_file),
    "csv": lambda records: as_table(records, ","),
    "tsv": lambda records: as_table(records, "\t"),
    "tar": as_tar,
}
"A format's suffix -> the records as such a file."
WRITTEN |= {
    f"{name}{packing}": lambda records, write=WRITTEN[name], pack=pack: pack(write(records))  # type: ignore[misc]
    for name, packing in (("jsonl", ".bz2"), ("json", ".xz"), ("csv", ".zst"), ("tar", ".gz"))
    for pack in [PACKED[packing]]
}
FORMATS = (*WRITTEN, "mds")


def write(folder: Path, format: str, records: Records) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if format == "mds":
        return write_mds(folder / "mds", records)
    path = folder / f"records.{format}"
    path.write_bytes(WRITTEN[format](records))
    return path


def units(folder: Path, name: str, window: int = 1 << 20, fields: Any = (), parsed: Any = (), **said: Any) -> list[Unit]:  # fmt: skip
    """The units of the files that a pattern finds. `said`: the recipe's settings, as in
    `ReadAs`.
    """
    return plan_units(find_files([name], folder, ReadAs(**said)), window, fields, parsed)


def read_file(folder: Path, name: str, content: Any = None, **settings: Any) -> list[RecordBatch]:
    """The batches of a file, which is written before if its content is given. `settings`: as of
    `units`.
    """
    if content is not None:
        (folder / name).write_bytes(content)
    return [batch for unit in units(folder, name, **settings) for batch in read_batches(unit)]


def records(found: Sequence[RecordBatch]) -> list[Any]:
    return [record for batch in found for record in batch.records]


def origins(found: Sequence[RecordBatch]) -> list[Item]:
    return [batch.origin(n) for batch in found for n in range(len(batch.records))]


def bad(found: Sequence[RecordBatch]) -> list[tuple[str, Item]]:
    return [(wrong.reason, wrong.origin) for batch in found for wrong in batch.bad]


def digests(folder: Path, name: str = "*", **settings: Any) -> list[str]:
    """The digests of all windows, in order."""
    found = units(folder, name, **settings)
    return [window.digest for unit in found for window in content_of(unit).windows]
