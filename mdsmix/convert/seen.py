"""What source files were found to hold, by their sizes and stamps: a second run stats them and reads nothing.

One small file per stream in the user's cache folder. It may be deleted at any time, which costs one reading of the
sources. A file that was changed without changing its size or its modification time is not noticed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
import xxhash

from mdsmix.encode.tokenizer import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.sources import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a unit held: the hash of its bytes, and which windows lines start in."""

    hash: str
    windows: tuple[int, ...]


@dataclass(slots=True)
class Seen:
    """The contents of one stream's units."""

    path: Path
    contents: dict[str, Content] = field(default_factory=dict)

    @staticmethod
    def of(target: str) -> Seen:
        """What is remembered of the stream published at `target`."""
        path = cache_folder() / "seen" / f"{xxhash.xxh128_hexdigest(target)}.json"
        try:
            entries = orjson.loads(path.read_bytes())
            known = {
                k: Content(hash=c["hash"], windows=tuple(c["windows"])) for k, c in entries.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            known = {}
        return Seen(path, known)

    def content(self, unit: Unit) -> Content | None:
        return self.contents.get(fingerprint(unit))

    def save(self, units: list[Unit], contents: list[Content]) -> None:
        """Remembers these units and forgets all others."""
        entries = {fingerprint(u): asdict(c) for u, c in zip(units, contents, strict=True)}
        with suppress(Unreachable):  # the stream is published; all that is lost is a reading
            keep_in_cache(self.path, orjson.dumps(entries))


def fingerprint(unit: Unit) -> str:
    files = [[f.location.url, f.stat.size, f.stat.stamp] for f in unit.files]
    return xxhash.xxh128_hexdigest(orjson.dumps([files, unit.start, unit.end]))
