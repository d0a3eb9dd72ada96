"""The same records as a file of every format, and helpers to read such files.

`write_records` writes a file. `read_file` plans and reads the files of a pattern, and
`all_records`, `all_origins` and `bad_items` take apart the batches that it returns.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
    compute_content,
    find_files,
    plan_units,
    read_batches,
)
from mdsmix.sources.format import Item
from mdsmix.storage import locate

Record = Mapping[str, Any]
Records = Sequence[Record]


def cell_text(value: Any) -> str:
    """Return a value as a format stores it whose cells are strings."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def encode_jsonl(records: Records) -> bytes:
    return b"".join(orjson.dumps(record) + b"\n" for record in records)


def encode_json(records: Records) -> bytes:
    return json.dumps(list(records), indent=1).encode()


def encode_table(records: Records, delimiter: str) -> bytes:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    names = list(records[0])
    writer.writerow(names)
    for record in records:
        writer.writerow([cell_text(record[name]) for name in names])
    return buffer.getvalue().encode()


def make_tar(members: Iterable[tuple[str, bytes]], mode: Any = "w", **settings: Any) -> bytes:
    """Return an archive of these members: name and content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, **settings) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def encode_tar(records: Iterable[Record], mode: Any = "w") -> bytes:
    """Return an archive in which each value is a member; bytes are written unchanged."""
    members = list[tuple[str, bytes]]()
    for number, record in enumerate(records):
        for name, value in record.items():
            data = value if isinstance(value, bytes) else cell_text(value).encode()
            members.append((f"{number:05}.{name}", data))
    return make_tar(members, mode)


def encode_arrow(records: Records, open_writer: Callable[..., Any]) -> bytes:
    table = pa.Table.from_pylist(list(records))
    buffer = io.BytesIO()
    with open_writer(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return buffer.getvalue()


def encode_parquet(records: Records) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(records)), buffer, row_group_size=3)
    return buffer.getvalue()


def write_mds(folder: Path, records: Records) -> Path:
    """Write a stream of raw columns, in shards of three samples; its index is the source."""
    encodings = {
        name: "str" if isinstance(value, str) else "json" for name, value in records[0].items()
    }
    layout = ShardLayout(encodings)
    shards = list[Any]()
    folder.mkdir(parents=True)
    for start in range(0, len(records), 3):
        group = records[start : start + 3]
        columns = dict[str, Any]()
        for name in encodings:
            cells = [cell_text(record[name]).encode() for record in group]
            columns[name] = Ragged.from_rows(cells, np.uint8)
        shards += store_shards(locate(folder), layout, lay_out_samples(layout, columns))
    (folder / "index.json").write_bytes(make_index(shards).content)
    return folder


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
"The suffix of a packing -> the function that compresses a file."
ENCODERS: dict[str, Callable[[Records], bytes]] = {
    "jsonl": encode_jsonl,
    "json": encode_json,
    "parquet": encode_parquet,
    "arrow": partial(encode_arrow, open_writer=pa.ipc.new_stream),
    "feather": partial(encode_arrow, open_writer=pa.ipc.new_file),
    "csv": partial(encode_table, delimiter=","),
    "tsv": partial(encode_table, delimiter="\t"),
    "tar": encode_tar,
}
"A format's suffix -> the function that returns records as the bytes of such a file."


def _encode_packed(records: Records, format: str, packing: str) -> bytes:
    return PACKERS[packing](ENCODERS[format](records))


for _format, _packing in (("jsonl", ".bz2"), ("json", ".xz"), ("csv", ".zst"), ("tar", ".gz")):
    ENCODERS[_format + _packing] = partial(_encode_packed, format=_format, packing=_packing)
FORMATS = (*ENCODERS, "mds")


def write_records(folder: Path, format: str, records: Records) -> Path:
    """Write the records as a file of this format, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    if format == "mds":
        return write_mds(folder / "mds", records)
    path = folder / f"records.{format}"
    path.write_bytes(ENCODERS[format](records))
    return path


def plan_pattern(
    folder: Path,
    pattern: str,
    window: int = 1 << 20,
    fields: Any = (),
    parsed: Any = (),
    text_or_messages: Any = (),
    **read_as: Any,
) -> list[Unit]:
    """Return the units of the files that a pattern finds. `read_as`: the settings of `ReadAs`."""
    files = find_files([pattern], folder, ReadAs(**read_as))
    return plan_units(files, window, fields, parsed, text_or_messages=text_or_messages)


def read_file(folder: Path, name: str, content: Any = None, **settings: Any) -> list[RecordBatch]:
    """Return the batches of a file.

    Args:
        content: is written to the file first; None: the file is there.
        settings: further arguments of `plan_pattern`.
    """
    if content is not None:
        (folder / name).write_bytes(content)
    batches = list[RecordBatch]()
    for unit in plan_pattern(folder, name, **settings):
        batches += read_batches(unit)
    return batches


def all_records(batches: Sequence[RecordBatch]) -> list[Any]:
    return [record for batch in batches for record in batch.records]


def all_origins(batches: Sequence[RecordBatch]) -> list[Item]:
    return [batch.origin(n) for batch in batches for n in range(len(batch.records))]


def bad_items(batches: Sequence[RecordBatch]) -> list[tuple[str, Item]]:
    """Return the reason and the item of each bad record."""
    return [(record.reason, record.origin) for batch in batches for record in batch.bad]


def window_digests(folder: Path, pattern: str = "*", **settings: Any) -> list[str]:
    """Return the digests of all windows of the files that a pattern finds, in order."""
    units = plan_pattern(folder, pattern, **settings)
    return [window.digest for unit in units for window in compute_content(unit).windows]
