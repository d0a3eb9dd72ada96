"""The fingerprints of a window's records, in a file beside its unit record: `.mdsmix/<key>.hashes`, 16 bytes a record.

They are named by the key that the unit has where nothing is dropped from it, since what is dropped is only known once the
fingerprints of the whole stream are. A unit without such a file, as older versions made them, stays as it is: its records are not
looked at for duplicates, which is said, and `duplicates: drop` reads them again. Those of many units lie in segments (segments.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from mdsmix.convert.ledger import FOLDER, UnitRecord, decompressed
from mdsmix.convert.repeats import Fingerprints, count_repeats
from mdsmix.convert.segments import WHOLE, Extent, read_extents
from mdsmix.convert.stored import StoredUnits
from mdsmix.shards.counts import Records
from mdsmix.storage import Location

HASHES = re.compile(r"[0-9a-f]{32}\.hashes")


def hashes_name(key: str) -> str:
    return f"{key}.hashes"


def are_kept(stored: StoredUnits, key: str) -> bool:
    """Whether the fingerprints lay at the target when the work on it began."""
    return hashes_name(key) in stored.kept or key in stored.joined.fingerprints


def keep_hashes(folder: Location, key: str, content: bytes) -> None:
    """Compressed, for the side of a holdout on which few records are, and for the checksum."""
    from zstandard import ZstdCompressor

    _at(folder, key).write(ZstdCompressor(level=1, write_checksum=True).compress(content))


def parse_hashes(stored: bytes | None) -> Fingerprints | None:
    """uint64 [n, 2]; None where there are none, or damaged ones."""
    content = decompressed(stored)
    if content is None or len(content) % 16:
        return None
    return np.frombuffer(content, "<u8").reshape(-1, 2)


def stored_hashes(
    folder: Location, keys: Iterable[str], joined: Mapping[str, Extent]
) -> Iterator[bytes | None]:
    """Those of all keys as they are stored, in their order: where `joined` says, or in files of their own."""
    return read_extents(
        folder, (joined.get(key) or Extent(hashes_name(key), 0, WHOLE) for key in keys)
    )


def all_hashes(
    folder: Location,
    keys: Sequence[str],
    joined: Mapping[str, Extent],
    note: Callable[[str, bytes], None] | None = None,
) -> Iterator[Fingerprints | None]:
    """The fingerprints of all keys, in their order. `note` is told of each as it is stored. Those of a damaged segment
    that were read again since have a file of their own."""
    for key, content in zip(keys, stored_hashes(folder, keys, joined), strict=True):
        found = parse_hashes(content)
        if found is None and key in joined:
            found = parse_hashes(next(stored_hashes(folder, [key], {})))
        if note and content:
            note(key, content)
        yield found


def duplicates_among(
    folder: Location,
    units: Sequence[UnitRecord],
    joined: Mapping[str, Extent],
    note: Callable[[str, bytes], None] | None = None,
) -> Records:
    """How many records of these units, in the order of the plan, an earlier one equals, and how many were not looked at."""
    unhashed, keys = list[int](), [unit.base or unit.key for unit in units]

    def looked_at() -> Iterator[Fingerprints]:
        for unit, hashes in zip(units, all_hashes(folder, keys, joined, note), strict=True):
            if hashes is None:
                unhashed.append(unit.records.read)
            else:
                yield hashes

    return Records(duplicates=count_repeats(looked_at()), unhashed=sum(unhashed))


def _at(folder: Location, key: str) -> Location:
    return folder / FOLDER / hashes_name(key)
