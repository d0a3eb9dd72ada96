"""Reads the records of a recipe's source: finds its files, splits them into work units, and yields
their records in batches.

files = find_files(["data/*.jsonl.zst"], base=recipe_folder)  # paths and sizes; nothing is read
for unit in plan_units(files):  # the same work units on every machine
    digests = Digests(unit)  # hashes of each window (a slice of the unit's bytes)
    for batch in read_batches(unit, digests=digests):  # about 4 MB of decoded records each
        batch.records, batch.bad, batch.window
    content = digests.content()  # shows a later run whether the unit has changed
"""

from __future__ import annotations

from mdsmix.sources.content import Content, Digests, Window, file_hash
from mdsmix.sources.find import find_files
from mdsmix.sources.record_batches import BadRecord, RecordBatch, compute_content, read_batches
from mdsmix.sources.unit_plan import (
    LEAST_WINDOW,
    choose_splits,
    describe_unit,
    estimate_size,
    estimate_unit_size,
    find_counted_key,
    plan_units,
    prepare_formats,
    read_beginnings,
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
    "choose_splits",
    "compute_content",
    "describe_unit",
    "estimate_size",
    "estimate_unit_size",
    "file_hash",
    "find_counted_key",
    "find_files",
    "plan_units",
    "prepare_formats",
    "read_batches",
    "read_beginnings",
]
