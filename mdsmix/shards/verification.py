"""Is a published stream what its index and manifest say? Every shard is read, hashed, decoded and counted.

A damaged shard ends a training run days in, or an epoch early without a word, so it is worth a reading of the stream: the
speed is that of the disk or the store (JSON columns: 14 M tokens/s). `quick` compares names and sizes by one listing, which
finds what is missing or cut off. Of the totals only the tokens are counted again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from mdsmix.errors import Earlier, Unreachable
from mdsmix.ragged import Ragged
from mdsmix.shards import index as index_file
from mdsmix.shards import manifest as manifest_file
from mdsmix.shards.codecs import codec_of
from mdsmix.shards.index import Shard, find_description, parse_index
from mdsmix.shards.manifest import Manifest, parse_manifest, read_manifest
from mdsmix.shards.published import (
    BESIDE,
    CONTRADICTS,
    MISSING,
    QUARANTINE,
    SIZE,
    Stream,
    StreamFault,
    read_quarantine,
    working_folder,
)
from mdsmix.shards.shard_samples import can_unpack, check_stored, columns_of, samples_of
from mdsmix.shards.token_ids import token_columns, tokens_of
from mdsmix.storage import Location

T = TypeVar("T")
CONTENTS, BAD_RECORDS = "shard-contents", "quarantine"
"The rules on what only reading finds."
IN_TRANSIT = (
    "read again it was whole, so it was damaged on its way: look at the network, its caches and this machine's memory; what is stored "
    "needs no repair"
)
IN_FLIGHT_BYTES = 1 << 30
"Memory for the shards that are being looked at, 64 MiB each as a rule; one larger shard is looked at alone."
COPIES = 4
"A shard's bytes as stored and as decompressed, its ids, and what is made of them on the way."
S3_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was looked at, and what was wrong."""

    stream: str
    shards: int = 0
    samples: int = 0
    bytes: int = 0
    blind: int = 0
    "Shards without a hash in the index, of which damage that leaves the layout whole is not seen, or that mdsmix cannot decompress."
    faults: tuple[StreamFault, ...] = ()
    in_transit: tuple[StreamFault, ...] = ()
    "Damage that a second read did not find: what is stored is whole."


def verify(
    folder: Location,
    *,
    quick: bool,
    begin: Callable[[str, int], None],
    on_progress: Callable[[int, int], None],
) -> Report:
    """Looks at all of the stream in `folder`; `begin` hears its size, `on_progress` of bytes and tokens that were looked at.

    Unreachable where it cannot be looked at: no index, no right, no store.
    """
    faults: list[StreamFault] = []
    manifest = _parsed(folder / manifest_file.BASENAME, parse_manifest, faults)
    index = _parsed(folder / index_file.BASENAME, parse_index, faults)
    if index is None:
        if not faults:
            (folder / index_file.BASENAME).read()  # which says why it cannot
        return Report(stream=str(folder), faults=_mended(folder, manifest, faults))
    stream = Stream(folder=folder, index=index, manifest=manifest)
    faults += stream.contradictions
    looks = list[_Look]()
    if not quick:
        missing = {each.file for each in faults if each.rule in (MISSING, SIZE, BESIDE)}
        whole = [shard for shard in index.shards if shard.stored.basename not in missing]
        begin(str(folder), sum(shard.stored.bytes for shard in whole))
        looks = _looks(folder, whole, on_progress)
        faults += (StreamFault(CONTENTS, each.file, each.problem) for each in looks if not each.is_whole)  # fmt: skip
        if manifest:
            faults += _damage(folder, manifest, missing)
            faults += _lost_records(folder, manifest)
            faults += [] if faults else _miscount([each.tokens for each in looks], manifest)
    transit = [each for each in looks if each.is_whole and each.problem]
    return Report(
        stream=str(folder),
        shards=len(index.shards),
        samples=index.samples,
        bytes=index.bytes,
        blind=sum(not (shard.stored.hashes and can_unpack(shard)) for shard in index.shards),
        faults=_mended(folder, manifest, faults),
        in_transit=tuple(StreamFault(CONTENTS, *each[:2], IN_TRANSIT) for each in transit),
    )


def _parsed(at: Location, parse: Callable[[bytes, str], T], faults: list[StreamFault]) -> T | None:
    """The index or the manifest; None where there is none, or it cannot be read, which becomes a fault."""
    content = find_description(at)
    try:
        return None if content is None else parse(content, str(at))
    except Earlier:
        raise
    except Unreachable as error:
        rule = "index" if at.name == index_file.BASENAME else "manifest"
        faults.append(StreamFault(rule, at.name, _problem(error)))
        return None


def _problem(error: Exception) -> str:
    """The problem that the error names, without its advice, since a fault has its own."""
    return str(error).rpartition("; ")[0] or str(error)


def _mended(
    folder: Location, manifest: Manifest | None, faults: Sequence[StreamFault]
) -> tuple[StreamFault, ...]:
    """The faults with what mends them."""
    fix = "publish the stream again with the tool that made it"
    if manifest and manifest.mixed:
        fix = "delete that file and run mdsmix mix again"
    elif manifest or any(each.rule == "manifest" for each in faults):
        fix = f"mdsmix repair {folder} --recipe RECIPE makes it anew"
    anew = "mdsmix convert RECIPE --reencode writes it anew from the finished work units"
    return tuple(replace(each, fix=anew if each.rule == "manifest" else fix) for each in faults)


def _damage(folder: Location, manifest: Manifest, missing: set[str]) -> Iterator[StreamFault]:
    """The files beside the manifest whose bytes are not those that it names, one at a time in memory."""
    for file in manifest.named_files:
        try:
            if file.name not in missing:
                check_stored(file.stored, (folder / file.name).read(), "manifest")
        except ValueError as error:
            yield StreamFault(BESIDE, file.name, str(error))


def _lost_records(folder: Location, manifest: Manifest) -> Iterator[StreamFault]:
    """Where the quarantine lacks bad records that the manifest counts; more of them are of a run that was refused since. That of versions
    lies beside them, of the current one."""
    split = working_folder(folder)
    current = manifest if split == folder else read_manifest(split)
    if manifest.mixed or current is None or current.index_hash != manifest.index_hash:
        return
    expected = current.records.quarantined
    try:
        found = Counter(record["reason"] for record in read_quarantine(split))
        is_short = bool(Counter(expected) - found)
        problem = f"expected the bad records {expected}, found {dict(found)}" * is_short
    except (Unreachable, ValueError, LookupError, TypeError) as error:
        problem = f"its files cannot be read: {_problem(error)}"
    if problem:
        yield StreamFault(BAD_RECORDS, QUARANTINE, problem)


def _miscount(counted: Sequence[int | None], manifest: Manifest) -> Iterator[StreamFault]:
    """Where the shards hold other tokens than the manifest counts, and all of them could be counted."""
    known, said = [tokens for tokens in counted if tokens is not None], manifest.totals.tokens
    if len(known) == len(counted) and sum(known) != said:
        problem = f"expected {said:,} tokens, counted {sum(known):,}"
        yield StreamFault(CONTRADICTS, manifest_file.BASENAME, problem)


class _Look(NamedTuple):
    """What reading a shard came to."""

    file: str
    problem: str
    is_whole: bool
    "Whether it could be read: with a problem, at the second time alone."
    tokens: int | None = None
    "Those that it holds; None where its columns are none of ids."


def _looks(
    folder: Location, shards: list[Shard], on_progress: Callable[[int, int], None]
) -> list[_Look]:
    looks = []
    with ThreadPoolExecutor(_threads(folder, shards)) as pool:
        for shard, look in zip(shards, pool.map(partial(_look, folder), shards), strict=True):
            looks.append(look)
            on_progress(shard.stored.bytes, look.tokens or 0)
    return looks


def _threads(folder: Location, shards: list[Shard]) -> int:
    """Memory sets the limit, since hashing, decompressing and waiting for bytes release Python's lock."""
    largest = max((s.stored.bytes + s.raw_data.bytes for s in shards), default=0)
    wanted = S3_THREADS if folder.is_store else (os.cpu_count() or 1) + 1
    return max(1, min(wanted, len(shards), 2 * IN_FLIGHT_BYTES // (COPIES * largest + 1)))


def _look(folder: Location, shard: Shard) -> _Look:
    """Reads a damaged shard a second time: one that was damaged on its way is whole then. Unreachable where it cannot be read."""
    name, problem = shard.stored.basename, ""
    for _ in range(2):
        data = (folder / name).read()
        try:
            check_stored(shard.stored, data)
            tokens = decode(shard, samples_of(shard, data)) if can_unpack(shard) else None
            return _Look(name, problem, True, tokens)
        except Exception as error:  # whatever a decoder makes of damaged bytes
            problem = problem or str(error).rstrip(".") or type(error).__name__
    return _Look(name, problem, False)


def decode(shard: Shard, samples: Ragged) -> int | None:
    """The tokens of a shard's samples, None where they hold no ids; an error says what does not decode."""
    counted = token_columns(shard)
    for name, cells in columns_of(shard, samples):
        for cell in cells.slices() if name not in counted else ():
            codec_of(shard.columns[name]).decode(bytes(cell))
    tokens = tokens_of(shard, samples)
    return len(tokens.ids.values) if tokens else 0 if counted else None
