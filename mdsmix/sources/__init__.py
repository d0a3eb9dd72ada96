"""From the files of a recipe's source to records: files are found, cut into work units, and read as
batches.

files = find(["data/*.jsonl.zst"], base=recipe_folder)      # paths and sizes, nothing is read for
unit in plan(files):                                    # the same units on every machine
    digests = Digests(unit)                                 # hashes of each window's content
    for batch in read(unit, digests=digests):               # about 4 MB of decoded records each
        batch.records, batch.bad, batch.window
    content = digests.content()                             # tells later whether the unit has
    changed
"""

from __future__ import annotations

from mdsmix.sources.content import Content, Digests, Window, file_hash
from mdsmix.sources.find import find
from mdsmix.sources.record_batches import BadRecord, RecordBatch, content_of, read
from mdsmix.sources.unit_plan import (
    LEAST_WINDOW,
    chosen,
    counted_key,
    plan,
    prepare,
    read_beginnings,
    shown_unit,
    size_of,
)
from mdsmix.sources.units import WINDOW_BYTES, ReadAs, SourceFile, Unit

__all__ = [
    "LEAST_WINDOW",
    "WINDOW_BYTES",
    "BadRecord",
    "Content",
    "Digests",
    "ReadAs",
    "RecordBatch",
    "SourceFile",
    "Unit",
    "Window",
    "chosen",
    "content_of",
    "counted_key",
    "file_hash",
    "find",
    "plan",
    "prepare",
    "read",
    "read_beginnings",
    "shown_unit",
    "size_of",
]
