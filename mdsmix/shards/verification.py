"""Verifies a published stream against its index and manifest: reads, hashes, decodes and counts
every shard.

A damaged shard ends a training run after days, or silently ends an epoch early, so it is worth
reading the whole stream. This is as fast as the disk or the store (JSON columns: 14 M tokens/s).
`quick` only compares names and sizes by one listing, which finds files that are missing or
truncated. Of the totals in the manifest, only the tokens are counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from mdsmix.errors import EarlierFormat, Unreachable
from mdsmix.frozen import frozen
from mdsmix.messages import flatten_error
from mdsmix.ragged import Ragged
from mdsmix.shards.codecs import find_codec
from mdsmix.shards.index import (
    INDEX,
    Index,
    Shard,
    StoredFile,
    find_metadata,
    parse_index,
    read_index,
)
from mdsmix.shards.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from mdsmix.shards.published import (
    MANIFEST_CONTRADICTS,
    QUARANTINE,
    SIDE_FILES,
    StreamFault,
    find_stream_faults,
    find_working_folder,
    read_quarantine,
)
from mdsmix.shards.shard_samples import can_unpack, check_stored, parse_samples, split_columns
from mdsmix.shards.token_ids import decode_tokens, find_token_columns
from mdsmix.storage import Location, map_files

T = TypeVar("T")
# Names, as in `check`, of the rules that can only be checked by reading the files.
SHARD_CONTENTS = "shard-contents"
QUARANTINE_RULE = "quarantine"
IN_FLIGHT_BYTES = 1 << 30
"""1 GiB: memory for the shards that are read at the same time, usually 64 MiB each. A shard that
needs more is read alone.
"""
COPIES = 4
"Copies of a shard in memory: as stored, as decompressed, its ids, and intermediate arrays."
MOST_THREADS = 16


class ReadingWatcher(Protocol):
    """An object whose methods are called while streams are read, to show the progress."""

    def begin(self, stream: str, size: int) -> None:
        """Begin to show the progress of a stream of `size` stored bytes."""

    def on_progress(self, size: int, tokens: int) -> None:
        """Add `size` more bytes that were read, and the tokens that these bytes contain or give."""

    def say(self, sentence: str) -> None:
        """Show the user a sentence now."""


@frozen(kw_only=True)
class VerifyReport:
    """The result of `verify`: counts of the stream, and its faults."""

    stream: str
    shards: int = 0
    samples: int = 0
    bytes: int = 0
    unchecked: int = 0
    """Number of shards that mdsmix cannot decompress, or that have no hash in the index. Damage in
    such a shard is noticed only if the shard's layout is broken.
    """
    faults: tuple[StreamFault, ...]
    in_transit: tuple[StreamFault, ...] = ()
    "Faults of a first read that a second read did not find, so the stored files are whole."

    def to_json(self) -> dict[str, Any]:
        """Return the report as `--json` prints it: field -> value. The field `unchecked` keeps its
        earlier key `blind` there.
        """
        tree = asdict(self)
        return {"blind" if key == "unchecked" else key: value for key, value in tree.items()}


def verify(folder: Location, watcher: ReadingWatcher, quick: bool = False) -> VerifyReport:
    """Verify the stream in `folder`: read every file, and compare it with the index and the
    manifest.

    Raises Unreachable if the stream cannot be read: its index or a permission is missing, or the
    store does not answer.

    Args:
        folder: the folder of the index.
        watcher: its methods are called with the progress.
        quick: only compare names and sizes.
    """
    # Read index and manifest, and compare them with the names and sizes of the files.
    faults = list[StreamFault]()
    manifest_file = folder / MANIFEST
    index_file = folder / INDEX
    manifest_content, index_content = map_files(find_metadata, [manifest_file, index_file])
    manifest = _parse_or_add_fault(manifest_file, manifest_content, parse_manifest, faults)
    index = _parse_or_add_fault(index_file, index_content, parse_index, faults)
    if index is None:
        if not faults:
            read_index(folder)  # raises the error of a missing index
        return VerifyReport(stream=str(folder), faults=tuple(faults))
    files = index.list_files(folder)
    faults += find_stream_faults(index, manifest, files)

    # Read the files that exist.
    read_files = list[_FileResult]()
    if not quick:
        expected = _list_expected_files(index, manifest)
        present = [file for file in expected if not file.stored.find_problem(files)]
        watcher.begin(str(folder), sum(file.stored.bytes for file in present))
        read_files = _read_files(folder, present, watcher)
        # If the second read of a file was whole, the stream has no fault (`in_transit`).
        faults += (file.fault for file in read_files if file.fault and not file.is_whole)
        if manifest:
            faults += _find_lost_records(folder, manifest)
            if not faults:
                faults += _find_wrong_tokens([file.tokens for file in read_files], manifest)
    are_checkable = [bool(shard.stored.hashes) and can_unpack(shard) for shard in index.shards]
    return VerifyReport(
        stream=str(folder),
        shards=len(index.shards),
        samples=index.samples,
        bytes=index.bytes,
        unchecked=are_checkable.count(False),
        faults=tuple(faults),
        in_transit=tuple(file.fault for file in read_files if file.fault and file.is_whole),
    )


def _parse_or_add_fault(
    file: Location,
    content: bytes | None,
    parse: Callable[[bytes, str], T],
    faults: list[StreamFault],
) -> T | None:
    """Return a parsed index or manifest. If the file is damaged, add a fault to `faults` and return
    None; if it is missing, return None.

    Raises EarlierFormat for a manifest of an earlier commit of mdsmix, which is not damaged.

    Args:
        file: the index or the manifest.
        content: its bytes; None if it is missing.
        parse: parses the bytes of the file; it also gets the file's URL, for messages.
    """
    if content is None:
        return None
    try:
        return parse(content, str(file))
    except EarlierFormat:
        raise
    except Unreachable as error:
        rule = "index" if file.name == INDEX else "manifest"
        faults.append(StreamFault(rule, file.name, str(error)))
        return None


def _find_lost_records(folder: Location, manifest: Manifest) -> Iterator[StreamFault]:
    """Yield a fault if the manifest counts more bad records than the quarantine folder contains.

    More records in the folder are not a fault: a later run that published nothing may have left
    them.
    """
    # All versions of a stream share the quarantine in the split's folder. It belongs to the current
    # version, so it is compared only if `folder` has that version.
    split = find_working_folder(folder)
    if split == folder and not manifest.records.quarantined:
        return
    current = read_manifest(split)
    if manifest.mixed or current is None or current.index_hash != manifest.index_hash:
        return
    expected = current.records.quarantined
    try:
        actual = Counter(record["reason"] for record in read_quarantine(split))
        if Counter(expected) - actual:
            problem = f"expected these bad records by reason: {expected}, found {dict(actual)}"
            yield StreamFault(QUARANTINE_RULE, QUARANTINE, problem)
    except (Unreachable, ValueError, LookupError, TypeError) as error:
        problem = f"the files of bad records cannot be read: {error!s}"
        yield StreamFault(QUARANTINE_RULE, QUARANTINE, problem)


def _find_wrong_tokens(
    tokens_of_files: Sequence[int | None], manifest: Manifest
) -> Iterator[StreamFault]:
    """Yield a fault if the files do not have as many tokens as the manifest states.

    Args:
        tokens_of_files: tokens of each file; None if they cannot be counted: then yield nothing.
        manifest: the manifest of the stream.
    """
    if None in tokens_of_files:
        return
    counted = sum(tokens for tokens in tokens_of_files if tokens is not None)
    expected = manifest.totals.tokens
    if counted != expected:
        problem = f"expected {expected:,} tokens, counted {counted:,}"
        yield StreamFault(MANIFEST_CONTRADICTS, MANIFEST, problem)


class _ExpectedFile(NamedTuple):
    """A file that the index or the manifest names."""

    stored: StoredFile
    shard: Shard | None
    "The shard that the file contains; None for a file that the manifest names."


class _FileResult(NamedTuple):
    """The result of reading one file."""

    fault: StreamFault | None
    is_whole: bool
    """Whether the last read gave the stated bytes. If there is a fault too, only the first read was
    damaged.
    """
    tokens: int | None = None
    "Tokens of a shard, or 0 for another file; None if the shard's columns contain no token ids."


def _list_expected_files(index: Index, manifest: Manifest | None) -> list[_ExpectedFile]:
    """Return all files that the index and the manifest name."""
    files = [_ExpectedFile(shard.stored, shard) for shard in index.shards]
    if manifest:
        files += [_ExpectedFile(file.stored, None) for file in manifest.named_files]
    return files


def _read_files(
    folder: Location, files: list[_ExpectedFile], watcher: ReadingWatcher
) -> list[_FileResult]:
    """Read and check the files, several at a time, and return their results in the same order."""
    from concurrent.futures import ThreadPoolExecutor  # 3.5 ms, and few commands read all shards

    results = []
    with ThreadPoolExecutor(_choose_threads(files)) as pool:
        read_results = pool.map(partial(_read_file, folder), files)
        for file, result in zip(files, read_results, strict=True):
            results.append(result)
            watcher.on_progress(file.stored.bytes, result.tokens or 0)
    return results


def _choose_threads(files: list[_ExpectedFile]) -> int:
    """Return how many threads read files. Hashing, decompressing and waiting for bytes release
    Python's lock, so only memory limits the number.
    """
    largest = 1
    for file in files:
        decompressed_bytes = file.shard.raw_data.bytes if file.shard else 0
        largest = max(largest, file.stored.bytes + decompressed_bytes)
    # While a thread reads a shard, there are COPIES of it in memory. `largest` is the bytes of two
    # of them, as stored and as decompressed; the others are about as large.
    bytes_of_thread = largest * COPIES // 2
    fitting_threads = IN_FLIGHT_BYTES // bytes_of_thread
    return max(1, min(MOST_THREADS, fitting_threads))


def _read_file(folder: Location, file: _ExpectedFile) -> _FileResult:
    """Read and check a file. A file that seems damaged is read once more: if the second read is
    whole, the first was only damaged in transit.

    Raises Unreachable if the file cannot be read.
    """
    stored = file.stored
    shard = file.shard
    fault = None
    for _ in range(2):
        data = (folder / stored.basename).read()
        try:
            check_stored(stored, data, "index" if shard else "manifest")
            # Only shards have tokens. If mdsmix cannot unpack a shard, they are unknown (None).
            tokens = None if shard else 0
            if shard and can_unpack(shard):
                tokens = decode_and_count(shard, parse_samples(shard, data))
            return _FileResult(fault, is_whole=True, tokens=tokens)
        except Exception as error:  # a decoder may raise any error for damaged bytes
            problem = flatten_error(error) or type(error).__name__
            rule = SHARD_CONTENTS if shard else SIDE_FILES
            fault = fault or StreamFault(rule, stored.basename, problem)
    return _FileResult(fault, is_whole=False)


def decode_and_count(shard: Shard, samples: Ragged) -> int | None:
    """Decode all columns of a shard's samples. Return the number of tokens in them, or None if no
    column contains token ids.

    Raises an error of any class if a sample cannot be decoded; its message states the problem.
    """
    token_columns = find_token_columns(shard)
    for name, cells in split_columns(shard, samples):
        if name not in token_columns:  # `decode_tokens` below decodes the token columns
            decode = find_codec(shard.columns[name]).decode
            for cell in cells.slices():
                decode(bytes(cell))
    if not token_columns:
        return None
    tokens = decode_tokens(shard, samples)
    return len(tokens.ids.values) if tokens else 0
