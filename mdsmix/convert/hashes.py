"""The fingerprints of a window's records, in a file beside its unit record: `.mdsmix/<key>.hashes`, 16 bytes a record.

They are named by the key that the unit has where nothing is dropped from it, since what is dropped is only known once the
fingerprints of the whole stream are. A unit without such a file, as older versions made them, stays as it is: its records are not
looked at for duplicates, which is said, and `duplicates: drop` reads them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mdsmix.convert.job import Job
from mdsmix.convert.ledger import FOLDER, UnitRecord
from mdsmix.convert.repeats import Fingerprints, count_repeats
from mdsmix.convert.stored import stored_at
from mdsmix.shards.manifest import Records
from mdsmix.storage import Location, together

AT_ONCE = 16
"Files that are asked for together: half a MB each for records of 3 KB."


def hashes_name(key: str) -> str:
    return f"{key}.hashes"


def are_kept(job: Job, key: str) -> bool:
    """Whether the fingerprints lay at the target when the work on it began."""
    stored = stored_at(job)
    if stored:
        return hashes_name(key) in stored.kept
    return _at(job.folder, key).stat() is not None


def keep_hashes(folder: Location, key: str, content: bytes) -> None:
    """Compressed, for the side of a holdout on which few records are, and for the checksum."""
    from zstandard import ZstdCompressor

    _at(folder, key).write(ZstdCompressor(level=1, write_checksum=True).compress(content))


def read_hashes(folder: Location, key: str) -> Fingerprints | None:
    """uint64 [n, 2]; None where there is no such file, or a damaged one."""
    from zstandard import ZstdDecompressor, ZstdError

    found = _at(folder, key).fetch()
    if found is None:
        return None
    frame = ZstdDecompressor().decompressobj()
    try:
        content = frame.decompress(found[1])
    except ZstdError:
        return None
    if not frame.eof or len(content) % 16:
        return None
    return np.frombuffer(content, "<u8").reshape(-1, 2)


def all_hashes(folder: Location, keys: Sequence[str]) -> Iterator[Fingerprints | None]:
    """Those of all keys, in their order; only a few files are held."""
    for begin in range(0, len(keys), AT_ONCE):
        yield from together(lambda key: read_hashes(folder, key), keys[begin : begin + AT_ONCE])


def duplicates_among(job: Job, units: Sequence[UnitRecord]) -> Records:
    """How many records of these units, in the order of the plan, an earlier one equals, and how many were not looked at."""
    unhashed, found = list[int](), all_hashes(job.folder, [unit.base or unit.key for unit in units])

    def looked_at() -> Iterator[Fingerprints]:
        for unit, hashes in zip(units, found, strict=True):
            if hashes is None:
                unhashed.append(unit.records.read)
            else:
                yield hashes

    return Records(duplicates=count_repeats(looked_at()), unhashed=sum(unhashed))


def _at(folder: Location, key: str) -> Location:
    return folder / FOLDER / hashes_name(key)
