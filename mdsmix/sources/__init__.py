"""Files to records: what a recipe's source names, cut into work units, read as batches.

files = find(["data/*.jsonl.zst"], base=recipe_folder)      # paths and sizes, nothing is read
for unit in plan(files):                                    # the same units on every machine
    key = content_hash(unit)                                # of the bytes that the unit owns
    for batch in read(unit):                                # about 8 MB of decoded records each
        batch.records, batch.bad, batch.window
"""

from __future__ import annotations

from mdsmix.sources.batches import BadLine, RecordBatch, read
from mdsmix.sources.blocks import Origin
from mdsmix.sources.content import content_hash
from mdsmix.sources.find import find
from mdsmix.sources.plan import has_one_window, plan
from mdsmix.sources.units import WINDOW_BYTES, SourceFile, Unit

__all__ = [
    "WINDOW_BYTES",
    "BadLine",
    "Origin",
    "RecordBatch",
    "SourceFile",
    "Unit",
    "content_hash",
    "find",
    "has_one_window",
    "plan",
    "read",
]
