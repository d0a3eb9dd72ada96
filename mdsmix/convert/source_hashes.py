"""The source-hash cache: what source files were found to hold, by their sizes and stamps, so that a second run stats them and
reads nothing.

One small file per stream in the user's cache folder, a line for each window as its worker has stored it and for each unit
as it is done, so that a run that was killed reads nothing again that it had finished. When a stream is published what is
no longer needed is dropped. The file may be deleted at any time, which costs one reading of the sources. A source that was
changed without changing its size or its modification time is not noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson
import xxhash

from mdsmix.encode.pretrained import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.sources import BY_NAME, WINDOW_BYTES, Content, Unit, Window


@dataclass(slots=True)
class SourceHashCache:
    """The contents of one stream's units."""

    path: Path
    contents: dict[str, Content] = field(default_factory=dict)
    "Of units that were read to their ends, by their fingerprints."
    windows: dict[str, dict[int, Window]] = field(default_factory=dict)
    "Those that are stored, of units that were not."

    @staticmethod
    def at(target: str) -> SourceHashCache:
        """The cache of the stream published at `target`, to be written only: nothing of it is read."""
        name = f"{xxhash.xxh128_hexdigest(target)}.jsonl"
        return SourceHashCache(cache_folder() / "seen" / name)

    @staticmethod
    def of(target: str) -> SourceHashCache:
        """What is remembered of the stream published at `target`."""
        cache = SourceHashCache.at(target)
        with suppress(OSError):
            cache.learn_lines(cache.path.read_bytes())
        return cache

    def learn_lines(self, content: bytes) -> None:
        """Takes in what a cache, of this machine or of another, has written."""
        for entry in content.splitlines():
            # What was being written when the machine went down is half a line.
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                self._learn(orjson.loads(entry))

    def _learn(self, entry: Mapping[str, Any]) -> None:
        windows = tuple(Window(**window) for window in entry["windows"])
        unit = entry["unit"]
        if entry["files"] is not None:
            self.contents[unit] = Content(windows=windows, files=tuple(entry["files"]))
        else:
            self.windows.setdefault(unit, {}).update({w.number: w for w in windows})

    def all_windows(self) -> Iterator[Window]:
        """Of all units that are remembered."""
        for content in self.contents.values():
            yield from content.windows
        for windows in self.windows.values():
            yield from windows.values()

    def without(self, gone: Collection[Window]) -> SourceHashCache:
        """The same, less these windows: a unit that had one is one that was not read to its end."""
        windows = {unit: dict(of) for unit, of in self.windows.items()}
        contents = dict[str, Content]()
        for unit, content in self.contents.items():
            if any(window in gone for window in content.windows):
                windows.setdefault(unit, {}).update({w.number: w for w in content.windows})
            else:
                contents[unit] = content
        left = {
            unit: {n: window for n, window in of.items() if window not in gone}
            for unit, of in windows.items()
        }
        return SourceHashCache(self.path, contents, left)

    def content(self, unit: Unit) -> Content | None:
        return self.contents.get(fingerprint(unit))

    def learn(self, contents: Mapping[Unit, Content]) -> None:
        """Units whose contents are known by now."""
        self.contents |= {fingerprint(unit): content for unit, content in contents.items()}

    def digests(self, units: Iterable[Unit]) -> Iterator[str]:
        """The digests of all known windows of these units."""
        for unit in units:
            content = self.content(unit)
            windows = content.windows if content else self.begun(unit).values()
            yield from (window.said for window in windows)

    def begun(self, unit: Unit) -> dict[int, Window]:
        """The windows that are stored of a unit that is not done."""
        return self.windows.get(fingerprint(unit), {})

    def note(self, unit: Unit, content: Content) -> None:
        """A unit is done."""
        self._append(line(fingerprint(unit), content.windows, content.files))

    def note_window(self, unit: Unit, window: Window) -> None:
        """A window of it is stored."""
        self._append(line(fingerprint(unit), [window], None))

    def _append(self, entry: bytes) -> None:
        """A line at once: workers and their run write to the same file."""
        with suppress(OSError):  # all that is lost is a reading
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                file.write(entry)

    def save(self, units: list[Unit], contents: list[Content]) -> None:
        """Remembers these units and forgets all others."""
        with suppress(Unreachable):  # the stream is published; all that is lost is a reading
            keep_in_cache(self.path, self.lines(units, contents))

    def lines(self, units: Sequence[Unit], contents: Sequence[Content]) -> bytes:
        """What these units hold, as `learn_lines` takes it in."""
        return b"".join(
            line(fingerprint(unit), content.windows, content.files)
            for unit, content in zip(units, contents, strict=True)
        )


def line(unit: str, windows: Collection[Window], files: Collection[str] | None) -> bytes:
    """What a unit holds, or some windows of one that is not done, as `learn_lines` takes it in."""
    entry = {"unit": unit, "windows": [_said(w) for w in windows], "files": files}
    return orjson.dumps(entry) + b"\n"


def _said(window: Window) -> dict[str, Any]:
    return {key: value for key in _WINDOW if (value := getattr(window, key)) != ""}


_WINDOW = [f.name for f in fields(Window)]


def fingerprint(unit: Unit) -> str:
    files = [[f.location.url, f.stat.size, f.stat.stamp] for f in unit.files]
    read_as = unit.files[0].read_as  # a recipe says it of all files of a stream
    more: list[Any] = [unit.fields] if unit.fields else []
    more += [{"blobs": unit.blobs}] if unit.blobs else []
    more += [asdict(read_as)] if read_as != BY_NAME else []
    more += [unit.window_bytes] if unit.window_bytes != WINDOW_BYTES else []
    return xxhash.xxh128_hexdigest(orjson.dumps([files, unit.start, unit.end, *more]))
