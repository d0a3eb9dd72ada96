"""`duplicates: drop`: which records are dropped from each work unit, known before the first one is encoded.

The source is read for the fingerprints of its records, where they are not kept from before, and these are joined: of equal
records the first in the order of the plan stays. That is the order of units in the index: by the name of a unit's first file, then
by where it begins. Encoding first and doing again what loses records would cost less only where hardly any unit holds a duplicate,
and nobody asks for `drop` there: with one duplicate in a hundred records every window of 20,000 holds some.

What is dropped is part of a unit's key, so where the earlier copy is edited away, the unit with the next one is done again, which
then keeps its record; a unit whose list is as it was is not touched. The lists are remembered in the cache of this machine as
long as the stream holds the same windows, so a run with nothing to do joins nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import orjson
import xxhash

from mdsmix.convert.job import Dropped, Job, hashes_name, lines_key, lines_keys
from mdsmix.convert.ledger import FOLDER, compressed, pack
from mdsmix.convert.repeats import find_repeats
from mdsmix.convert.source_hashes import SourceHashCache
from mdsmix.convert.stored import read_hashes
from mdsmix.convert.unit import open_tokenizer_backend
from mdsmix.convert.work import Work
from mdsmix.encode.pretrained import keep_in_cache
from mdsmix.engines.tasks import Attempt, Reporter
from mdsmix.errors import Unreachable
from mdsmix.kinds.membership import Fingerprints as Seen
from mdsmix.kinds.read_records import open_hashing
from mdsmix.sources import Content, Digests, Unit, Window, prepare, read, shown_unit, size_of
from mdsmix.words import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashed:
    """A unit whose fingerprints are kept."""

    job: Job
    "With the limit under which it was read."
    content: Content
    records: int = 0
    "Read for it, good or bad."

    @property
    def keys(self) -> list[str]:
        return lines_keys(self.job, self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashTask:
    """Reads a unit for the fingerprints of its records, as a task of an engine."""

    job: Job
    unit: Unit

    @property
    def name(self) -> str:
        return f"of {shown_unit(self.unit)}"

    def do(self, attempt: Attempt, reporter: Reporter) -> Hashed:
        job, digests, records, done = self.job, Digests(self.unit), 0, set[int]()
        batches = read(self.unit, job.limit, reporter.memory, digests)
        for number, of_window in groupby(batches, key=lambda batch: batch.window):
            seen, count = Seen(), 0
            reading = open_hashing(job.encoding, seen)
            for batch in of_window:
                reporter.wait_for_room()
                reading.encode(batch.records, count)
                count += len(batch.records)
                records += len(batch.records) + sum(1 for _ in batch.bad)
                reporter.on_progress(batch.size, 0)
            _keep(job, digests.window(number), seen.finish(count))
            done.add(number)
        content = digests.content()
        for window in content.windows:
            if window.number not in done:  # no record starts in it
                _keep(job, window, b"")
        return Hashed(job=job, content=content, records=records)


def _keep(job: Job, window: Window, fingerprints: bytes) -> None:
    key = lines_key(job, window)
    (job.folder / FOLDER / hashes_name(key)).write(pack((), {key: compressed(fingerprints)}))


def find_dropped(work: Work) -> list[Dropped]:
    """What is dropped from each unit, or from each that a limit lets in; Unreachable where fingerprints are damaged."""
    hashed = list(_limited(work) if work.job.limit else _whole(work))
    keys = [key for unit in hashed for key in unit.keys]
    bits = _remembered(work.cache, keys)
    if bits is None:
        wanted = [(key, work.stored.hashes_of(key)) for key in keys]
        bits = find_repeats(read_hashes(work.job.folder, wanted))
        _remember(work.cache, keys, bits)
    return _by_unit(bits, [unit.content for unit in hashed])


def known_dropped(
    job: Job, contents: Sequence[Content], cache: SourceHashCache
) -> list[Dropped] | None:
    """What is dropped from units of these contents, as far as this machine remembers it; nothing is under `duplicates: keep`."""
    if not job.drops:
        return [{} for _ in contents]
    bits = _remembered(cache, [key for content in contents for key in lines_keys(job, content)])
    return None if bits is None else _by_unit(bits, contents)


def _whole(work: Work) -> list[Hashed]:
    """All units of the stream, of which those are read that are not known, or whose fingerprints are not kept."""
    job, units, found = work.job, work.units, dict[int, Hashed]()
    for number, unit in enumerate(units):
        content = work.cache.content(unit)
        keys = lines_keys(job, content) if content else []
        if content and all(map(work.stored.keeps_hashes, keys)):
            found[number] = Hashed(job=job, content=content)
            work.watcher.on_progress(size_of(unit.files), 0)
    todo = [number for number in range(len(units)) if number not in found]
    if todo:
        work.watcher.on_step(
            f"{job.name}: reads {plural(len(todo), 'work unit')} for duplicates, before they are converted"
        )
        open_tokenizer_backend(job)  # once, for all workers that are forked, which then convert
        prepare(units)
    with closing(work.run([HashTask(job=job, unit=units[n]) for n in todo])) as finished:
        for position, hashed in finished:
            found[todo[position]] = hashed
            work.cache.note(units[todo[position]], hashed.content)
    work.cache.learn({units[n]: hashed.content for n, hashed in found.items()})
    return [found[number] for number in range(len(units))]


def _limited(work: Work) -> Iterator[Hashed]:
    """The first records: unit by unit, under what is left of the limit."""
    left = work.job.limit or 0
    for unit in work.units:
        if left <= 0:
            return
        ((_, hashed),) = work.run([HashTask(job=replace(work.job, limit=left), unit=unit)])
        left -= hashed.records
        yield hashed


def _by_unit(bits: Sequence[bytes], contents: Sequence[Content]) -> list[Dropped]:
    each = iter(bits)
    return [
        {window.number: dropped for window in content.windows if (dropped := next(each))}
        for content in contents
    ]


def _remember(cache: SourceHashCache, keys: Sequence[str], bits: Sequence[bytes]) -> None:
    dropped = {str(n): base64.b64encode(of).decode() for n, of in enumerate(bits) if of}
    with suppress(Unreachable):  # all that is lost is a join
        keep_in_cache(_path(cache), orjson.dumps({"of": _joint(keys), "dropped": dropped}))


def _remembered(cache: SourceHashCache, keys: Sequence[str]) -> list[bytes] | None:
    """What was joined from the fingerprints of just these windows; None where that is not known."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = orjson.loads(_path(cache).read_bytes())
        if found["of"] == _joint(keys):
            return [base64.b64decode(found["dropped"].get(str(n), "")) for n in range(len(keys))]
    return None


def _joint(keys: Sequence[str]) -> str:
    return xxhash.xxh128_hexdigest(" ".join(keys))


def _path(cache: SourceHashCache) -> Path:
    return cache.path.with_suffix(".dropped")
