"""Which versions of a stream may go: those beyond the newest ones that are to be kept, and half-made ones.

The current version always stays. The others are ordered by when they ceased to be it, and kept for a while from then on:
a job that began the day before may read one that is months old. Of a version only the files that mdsmix made are deleted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mdsmix.convert.damage import SHARD
from mdsmix.shards.index import BASENAME
from mdsmix.shards.published import named_version, versions
from mdsmix.shards.shard_files import REPLACED
from mdsmix.shards.side_files import NAMES as NAMED_FILES
from mdsmix.storage import Location, Stat

THREADS = 16
_OURS = re.compile(
    "|".join([SHARD.pattern, *NAMED_FILES.values(), r"index\.json|mdsmix\.manifest"])
)
_MARK = re.compile(REPLACED.rpartition("/")[2].format(hash="([0-9a-f]{8})").replace(".", r"\."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version that is not the current one."""

    folder: Location
    files: Mapping[str, Stat]
    replaced: float
    "When it ceased to be current; of a half-made one, when it was last worked on."

    @property
    def is_whole(self) -> bool:
        return BASENAME in self.files

    @property
    def hash(self) -> str:
        """The first digits of its index's hash."""
        return self.folder.name[-8:]

    @property
    def bytes(self) -> int:
        return sum(stat.size for stat in self.files.values())

    def discard(self) -> None:
        """Deletes the version, its index first, so that no reader starts on it."""
        (self.folder / BASENAME).delete()
        self.folder.flush()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: (self.folder / name).delete(), self.files))
        self.folder.delete()


def find_versions(folder: Location) -> list[Version]:
    """All versions of the split in `folder` but the current one, the last replaced first."""
    current, marks = named_version(folder), _marks(folder)
    found = [_look(version, marks) for version in versions(folder) if version != current]
    return sorted(
        filter(lambda version: version.files, found),
        key=lambda version: version.replaced,
        reverse=True,
    )


def versions_to_delete(folder: Location, found: list[Version], keep: int | None) -> list[Version]:
    """Those that are not among the newest `keep`, the current one counted; None keeps all. Half-made ones never count."""
    whole = [version for version in found if version.is_whole]
    room = len(whole) if keep is None else keep - (named_version(folder) is not None)
    return [version for version in found if version not in whole[:room]]


def _marks(folder: Location) -> dict[str, float]:
    marks = (folder / REPLACED).parent
    found = ((_MARK.fullmatch(name), stat.modified) for name, stat in marks.list())
    return {match[1]: modified for match, modified in found if match}


def _look(folder: Location, marks: Mapping[str, float]) -> Version:
    files = {name: stat for name, stat in folder.list() if _OURS.fullmatch(name)}
    last = max((stat.modified for stat in files.values()), default=0.0)
    published = files[BASENAME].modified if BASENAME in files else last
    return Version(folder=folder, files=files, replaced=marks.get(folder.name[-8:], published))
