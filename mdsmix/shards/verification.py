"""Is a published stream what its index and manifest say? Every shard is read, hashed, decoded and
counted.

A damaged shard ends a training run days in, or an epoch early without a word, so it is worth a
reading of the stream: the speed is that of the disk or the store (JSON columns: 14 M tokens/s).
`quick` compares names and sizes by one listing, which finds what is missing or cut off. Of the
totals only the tokens are counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from mdsmix.errors import EarlierFormat, Unreachable
from mdsmix.messages import flatten_error
from mdsmix.ragged import Ragged
from mdsmix.shards.codecs import find_codec
from mdsmix.shards.index import INDEX, Shard, StoredFile, find_metadata, parse_index, read_index
from mdsmix.shards.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from mdsmix.shards.published import (
    MANIFEST_CONTRADICTS,
    QUARANTINE,
    SIDE_FILES,
    StreamFault,
    find_contradictions,
    find_working_folder,
    read_quarantine,
)
from mdsmix.shards.shard_samples import can_unpack, check_stored, parse_samples, split_columns
from mdsmix.shards.token_ids import decode_tokens, find_token_columns
from mdsmix.storage import Location

T = TypeVar("T")
SHARD_CONTENTS, QUARANTINE_RULE = "shard-contents", "quarantine"
"The rules that only reading the files can judge."
IN_FLIGHT_BYTES = 1 << 30
"""Memory for the shards that are being looked at, 64 MiB each as a rule; one larger shard is looked
at alone.
"""
COPIES = 4
"Copies of a shard in memory: as stored, as decompressed, its ids, and arrays made on the way."
MOST_THREADS = 16


class ReadingWatcher(Protocol):
    """Receives the progress of reading."""

    def begin(self, stream: str, size: int) -> None:
        """A stream of `size` stored bytes is being read."""

    def on_progress(self, size: int, tokens: int) -> None:
        """So many more bytes were read, and tokens found in them or made of them."""

    def say(self, sentence: str) -> None:
        """Something that the user should know now."""


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of `verify`: the files that were looked at, and their faults."""

    stream: str
    shards: int = 0
    samples: int = 0
    bytes: int = 0
    blind: int = 0
    """Shards that mdsmix cannot decompress, or without a hash in the index: damage there that
    leaves the layout whole is not seen.
    """
    faults: tuple[StreamFault, ...]
    in_transit: tuple[StreamFault, ...] = ()
    "Damage that a second read did not find: what is stored is whole."


def verify(folder: Location, watcher: ReadingWatcher, quick: bool = False) -> VerifyReport:
    """Looks at all of the stream in `folder`. Unreachable where it cannot be looked at: no index,
    no right, no store.
    """
    faults = list[StreamFault]()
    manifest = _parsed(folder / MANIFEST, parse_manifest, faults)
    index = _parsed(folder / INDEX, parse_index, faults)
    if index is None:
        if not faults:
            read_index(folder)  # raises, and says why
        return VerifyReport(stream=str(folder), faults=tuple(faults))
    files = index.list_files(folder)
    looks = list[_Look]()
    faults += find_contradictions(index, manifest, files)
    if not quick:
        named = [file.stored for file in manifest.named_files] if manifest else []
        every = [*((s.stored, s) for s in index.shards), *((stored, None) for stored in named)]
        whole = [of for of in every if not of[0].find_problem(files)]
        watcher.begin(str(folder), sum(stored.bytes for stored, _ in whole))
        looks = _looks(folder, whole, watcher)
        faults += (each.fault for each in looks if each.fault and not each.is_whole)
        if manifest:
            faults += _lost_records(folder, manifest)
            faults += [] if faults else _miscount([each.tokens for each in looks], manifest)
    return VerifyReport(
        stream=str(folder),
        shards=len(index.shards),
        samples=index.samples,
        bytes=index.bytes,
        blind=sum(not (shard.stored.hashes and can_unpack(shard)) for shard in index.shards),
        faults=tuple(faults),
        in_transit=tuple(each.fault for each in looks if each.fault and each.is_whole),
    )


def _parsed(at: Location, parse: Callable[[bytes, str], T], faults: list[StreamFault]) -> T | None:
    """The parsed index or manifest; None where it is missing, or cannot be read, which is added to
    `faults`.
    """
    content = find_metadata(at)
    try:
        return None if content is None else parse(content, str(at))
    except EarlierFormat:
        raise
    except Unreachable as error:
        faults.append(StreamFault("index" if at.name == INDEX else "manifest", at.name, str(error)))
        return None


def _lost_records(folder: Location, manifest: Manifest) -> Iterator[StreamFault]:
    """A fault where the quarantine lacks bad records that the manifest counts. More than it counts
    are no fault: a run that was refused since left them. Versions share one quarantine, in the
    split's folder; it is that of the current version.
    """
    split = find_working_folder(folder)
    current = read_manifest(split)
    if manifest.mixed or current is None or current.index_hash != manifest.index_hash:
        return
    expected = current.records.quarantined
    try:
        found = Counter(record["reason"] for record in read_quarantine(split))
        if Counter(expected) - found:
            problem = f"expected the bad records {expected}, found {dict(found)}"
            yield StreamFault(QUARANTINE_RULE, QUARANTINE, problem)
    except (Unreachable, ValueError, LookupError, TypeError) as error:
        problem = f"its files cannot be read: {error!s}"
        yield StreamFault(QUARANTINE_RULE, QUARANTINE, problem)


def _miscount(counted: Sequence[int | None], manifest: Manifest) -> Iterator[StreamFault]:
    """A fault where all tokens could be counted, and their number is not the manifest's."""
    known, said = sum(tokens or 0 for tokens in counted), manifest.totals.tokens
    if None not in counted and known != said:
        yield StreamFault(
            MANIFEST_CONTRADICTS, MANIFEST, f"expected {said:,} tokens, counted {known:,}"
        )


_File = tuple[StoredFile, Shard | None]
"A stored file and its shard; None for a file beside the manifest."


class _Look(NamedTuple):
    """The result of reading one file."""

    fault: StreamFault | None
    is_whole: bool
    "Whether the file is as stated. With a fault: it was damaged at the first read only."
    tokens: int | None = None
    "Tokens of a shard; None where its columns hold no ids."


def _looks(folder: Location, files: list[_File], watcher: ReadingWatcher) -> list[_Look]:
    looks = []
    with ThreadPoolExecutor(_threads(files)) as pool:
        for (stored, _), look in zip(files, pool.map(partial(_look, folder), files), strict=True):
            looks.append(look)
            watcher.on_progress(stored.bytes, look.tokens or 0)
    return looks


def _threads(files: list[_File]) -> int:
    """How many threads read. Memory sets the limit, since hashing, decompressing and waiting for
    bytes release Python's lock.
    """
    sizes = [of.bytes + (shard.raw_data.bytes if shard else 0) for of, shard in files]
    return min(MOST_THREADS, 2 * IN_FLIGHT_BYTES // (COPIES * max(sizes, default=0) + 1)) or 1


def _look(folder: Location, of: _File) -> _Look:
    """Reads and checks a file, a damaged one twice: a file that was damaged on its way is whole
    then. Unreachable where it cannot be read.
    """
    (stored, shard), fault = of, None
    for _ in range(2):
        data = (folder / stored.basename).read()
        try:
            check_stored(stored, data, "index" if shard else "manifest")
            tokens = None if shard else 0
            if shard and can_unpack(shard):
                tokens = decode_and_count(shard, parse_samples(shard, data))
            return _Look(fault, True, tokens)
        except Exception as error:  # whatever a decoder makes of damaged bytes
            problem = flatten_error(error) or type(error).__name__
            fault = fault or StreamFault(
                SHARD_CONTENTS if shard else SIDE_FILES, stored.basename, problem
            )
    return _Look(fault, False)


def decode_and_count(shard: Shard, samples: Ragged) -> int | None:
    """The tokens of a shard's samples, None where they hold no ids; an error says what does not
    decode.
    """
    counted = find_token_columns(shard)
    for name, cells in split_columns(shard, samples):
        for cell in cells.slices() if name not in counted else ():
            find_codec(shard.columns[name]).decode(bytes(cell))
    tokens = decode_tokens(shard, samples)
    return len(tokens.ids.values) if tokens else 0 if counted else None
