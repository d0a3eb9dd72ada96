"""What must hold between a stream's index, its manifest and the files that lie there: `verify` and `check` judge by these rules alone.

One listing is all that they need. What is wrong inside of an index or a manifest is said when that is read (`parse_index`, `parse_manifest`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from mdsmix.shards import index as index_file
from mdsmix.shards import manifest as manifest_file
from mdsmix.shards.index import Index
from mdsmix.shards.manifest import Manifest
from mdsmix.storage import Stat

MISSING, SIZE, TWICE = "shard-missing", "shard-size", "shard-basenames"
BESIDE, INTERRUPTED, CONTRADICTS = "side-files", "publication-interrupted", "manifest-contradicts"
"The rules, by the names that `check` gives them."


@dataclass(frozen=True, slots=True)
class StreamFault:
    """A rule that a stream breaks."""

    rule: str
    "As `check` names it."
    file: str
    "A shard, the index, the manifest or a file that it names, by its name in the stream's folder."
    problem: str
    "What was expected and what was found."
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}; {self.fix}"


def contradictions(
    index: Index, manifest: Manifest | None, files: Mapping[str, Stat]
) -> Iterator[StreamFault]:
    """Every rule that the stream breaks. `files`: what lies beside its index."""
    for file in index.files:
        if problem := file.missing_from(files):
            yield StreamFault(SIZE if file.basename in files else MISSING, file.basename, problem)
    for name, times in Counter(file.basename for file in index.files).items():
        if times > 1:
            yield StreamFault(TWICE, name, f"expected once in the index, found {times} times")
    if manifest is None:
        return
    if index.hash != manifest.index_hash:
        expected = f"expected the xxh128 {manifest.index_hash} of the manifest, found {index.hash}"
        why = "a publication was interrupted, or the index was changed"
        yield StreamFault(INTERRUPTED, index_file.BASENAME, f"{expected}: {why}")
        return
    for beside in manifest.named_files:
        if problem := beside.stored.missing_from(files):
            yield StreamFault(BESIDE, beside.name, problem)
    columns = manifest.encoding.columns
    for shard in index.shards:
        if shard.columns != columns:
            problem = f"expected the columns {columns}, found {shard.columns}"
            yield StreamFault(CONTRADICTS, shard.stored.basename, problem)
    for problem in _sums(index, manifest):
        yield StreamFault(CONTRADICTS, manifest_file.BASENAME, problem)


def _sums(index: Index, manifest: Manifest) -> Iterator[str]:
    parts, total = manifest.parts, manifest.totals.samples
    if index.samples != total:
        yield f"expected {total:,} samples in the index, found {index.samples:,}"
    if not manifest.records.adds_up:
        yield f"expected as many records read as written, filtered and quarantined, found {manifest.records}"
    listed = sum(part.shards for part in parts)
    if listed != len(index.shards):
        yield f"expected {listed:,} shards of all parts in the index, found {len(index.shards):,}"
        return
    shards = iter(index.shards)
    for part in parts:
        found = sum(shard.samples for shard in islice(shards, part.shards))
        if found != part.samples:
            yield f"expected {part.samples:,} samples in part {part.key}, found {found:,}"
