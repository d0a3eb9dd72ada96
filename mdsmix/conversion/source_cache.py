"""Remembers the content of sources by their sizes and stamps, so that a second run stats them and
reads nothing.

One small file per stream in the user's cache folder: a line for each window as its worker has
stored it and for each unit as it is done, so that a run that was killed reads nothing again that it
had finished. When a stream is published, lines that it no longer needs are dropped. The file may be
deleted at any time, which costs one reading of the sources. A source that was changed without
changing its size or its modification time is not noticed.

The lines of objects in a store lie beside the stream too (`.mdsmix/sources.zst`): a stamp (ETag) is
the same to every machine, so one that never saw the objects lists them and reads none. Files on a
disk have no line there, since their stamp means something on one machine only. Records that name
images have none either: each machine keeps the images' stamps itself. `--verify-source` reads
neither file.

In streams of images a window's key depends on the bytes of its images, so the same images
elsewhere, or with other times, give no new work. A run with nothing to do must not read them, so
the size and stamp of each image that a window names are kept too. A later run compares these: at a
store by listings of a thousand, on a disk one by one. A window whose images are as they were is
known; where one image differs, all of its window are read. An image from a server (http) has no
stamp: it is asked for again only with --verify-source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import orjson
import xxhash

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.conversion.job import Dropped, Job, lines_keys
from mdsmix.conversion.unit_files import FOLDER, bytes_of, compressed
from mdsmix.errors import Denied, NoSuchPlace, Unreachable
from mdsmix.messages import choose_verb, plural
from mdsmix.shards.shard_files import decompress_frame
from mdsmix.sources import Content, Unit, Window
from mdsmix.sources.formats import format_of, list_raised_versions
from mdsmix.storage import Location, Stat, find_store, locate, map_threads

NOTE = "sources.zst"
PART = re.compile(r"part-\d{1,6}-of-\d{1,6}")
"Names of the notes of an array's parts, with the same lines, at the target."
DROPPED = ".dropped"
UNKNOWN = Content(windows=(), files=())
Stamps = Mapping[str, tuple[int, str]]
"URL of an image -> its size and stamp; a size of -1 where it was not there, or could not be read."
MISSING = [-1, ""]
FEW = 100
"So many objects of a bucket are asked for one by one: a listing may hold any number of others."
SPARSE = 20
"A listing is read up to so many times the wanted objects; the rest is asked for one by one."


@dataclass(slots=True)
class KnownSources:
    """The contents of one stream's units."""

    path: Path
    units: dict[str, Content] = field(default_factory=dict)
    """`unit_stamp` -> content. A unit that was not read to its end has the windows that are stored,
    and no files.
    """

    @staticmethod
    def at(target: str) -> KnownSources:
        """An empty memory of the stream published at `target`, to be written only: its file is not
        read.
        """
        name = f"{xxhash.xxh128_hexdigest(target)}.jsonl"
        return KnownSources(cache_folder() / "seen" / name)

    @staticmethod
    def of(target: str) -> KnownSources:
        """The memory of the stream published at `target`, read from its file."""
        known = KnownSources.at(target)
        with suppress(OSError):
            known.learn_lines(known.path.read_bytes())
        return known

    def learn_lines(self, content: bytes) -> None:
        """Takes in what this machine or another has written."""
        for entry in content.splitlines():
            # A line that was being written when the machine went down is cut off.
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                said = orjson.loads(entry)
                windows, files = (Window(**w) for w in said["windows"]), tuple(said["files"] or ())
                self.learn(said["unit"], Content(windows=tuple(windows), files=files))

    def learn(self, unit: str, content: Content) -> None:
        """Takes in the content of the unit with this stamp: all of it, or one more window."""
        before = self.units.get(unit, UNKNOWN)
        if content.files or not before.files:
            earlier = () if content.files else before.windows
            self.units[unit] = replace(content, windows=earlier + content.windows)

    def learn_objects(self, folder: Location, units: Iterable[Unit]) -> None:
        """Takes in what the note beside the stream says, if there are objects that this machine
        does not know.
        """
        if any(_is_object(unit) and not self.content(unit) for unit in units):
            self.learn_lines(decompress_frame(bytes_of(folder, NOTE)) or b"")

    def learn_parts(self, folder: Location) -> str:
        """Takes in what the notes of all parts at the target say; returns how many have left one. A
        damaged note does not count.
        """
        notes = map_threads(lambda note: decompress_frame(note.read()), notes_of_parts(folder))
        whole = [content for content in notes if content is not None]
        for content in whole:
            self.learn_lines(content)
        return f"{plural(len(whole), 'part')} {choose_verb(whole, 'has', 'have')} finished; what is left is done now"

    def forget(self, gone: Set[Window]) -> None:
        """Forgets these windows. A unit that holds one no longer counts as read to its end, so it
        is read again.
        """
        for unit, of in self.units.items():
            if not gone.isdisjoint(of.windows):
                left = tuple(window for window in of.windows if window not in gone)
                self.units[unit] = Content(windows=left, files=())

    def content(self, unit: Unit) -> Content | None:
        """The content of a unit; None where it was not read to its end."""
        found = self.units.get(unit_stamp(unit), UNKNOWN)
        return found if found.files else None

    def contents(self, units: Iterable[Unit]) -> list[Content]:
        """The contents of those units that were read to their ends."""
        return list(filter(None, map(self.content, units)))

    def windows_of(self, unit: Unit) -> dict[int, Window]:
        """Number -> window, of all known windows of a unit."""
        found = self.units.get(unit_stamp(unit), UNKNOWN)
        return {window.number: window for window in found.windows}

    def note(self, unit: Unit, content: Content) -> None:
        """Remembers a finished unit, or a finished window of it. The line is one write: workers and
        their run append to the same file.
        """
        self.learn(unit_stamp(unit), content)
        with suppress(OSError):  # all that is lost is a reading
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                file.write(_line(unit, content))

    def save(self, contents: Mapping[Unit, Content], folder: Location | None = None) -> None:
        """Remembers these units and forgets all others. `folder`: the stream's, where objects are
        noted too.
        """
        objects = {
            unit: content
            for unit, content in contents.items()
            if _is_object(unit) and not any(window.images for window in content.windows)
        }
        with suppress(Unreachable):  # the stream is published; all that is lost is a reading
            keep_in_cache(self.path, lines_of(contents))
            if folder and objects:
                (folder / FOLDER / NOTE).write(compressed(lines_of(objects)))


def note_part(folder: Location, part: str, contents: Mapping[Unit, Content]) -> None:
    """Leaves the note of a part, such as `3-of-64`, at the target."""
    (folder / FOLDER / f"part-{part}").write(compressed(lines_of(contents)))


def notes_of_parts(folder: Location) -> list[Location]:
    at = folder / FOLDER
    return [at / name for name, _ in at.list() if PART.fullmatch(name)]


def lines_of(contents: Mapping[Unit, Content]) -> bytes:
    """The lines of these units, as `learn_lines` takes them in."""
    return b"".join(map(_line, contents, contents.values()))


def _line(unit: Unit, content: Content) -> bytes:
    entry = {"unit": unit_stamp(unit), "windows": content.windows, "files": content.files}
    return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)


def unit_stamp(unit: Unit) -> str:
    """Hash of a unit's files, by their places, sizes and stamps, and of every setting that decides
    what is read of them.
    """
    files = [[f.location.url, f.stat.size, f.stat.stamp] for f in unit.files]
    read_as = asdict(unit.files[0].read_as)  # a recipe sets it for all files of a stream
    how: list[Any] = [*(unit.start, unit.end, unit.fields, unit.blobs, unit.window_bytes, read_as)]
    if versions := list_raised_versions(map(format_of, unit.files)):
        how.append(versions)
    return xxhash.xxh128_hexdigest(orjson.dumps([files, how]))


def _is_object(unit: Unit) -> bool:
    return all(file.location.is_store and file.stat.stamp for file in unit.files)


def remember(path: Path, value: object) -> None:
    """Keeps a value in the cache of this machine."""
    with suppress(Unreachable):  # all that is lost is the work
        keep_in_cache(path, compressed(orjson.dumps(value)))


def recall(path: Path) -> Any:
    """A value from the cache of this machine; None where it is missing or damaged."""
    with suppress(OSError, ValueError):
        return orjson.loads(decompress_frame(path.read_bytes()) or b"")
    return None


def known_dropped(
    job: Job, contents: Sequence[Content], cache: KnownSources
) -> list[Dropped] | None:
    """The duplicates to drop from units of these contents, none under `duplicates: keep`; None
    where this machine does not remember them.
    """
    if not job.drops:
        return [{}] * len(contents)
    found = recall(cache.path.with_suffix(DROPPED)) or ()
    if [key for key, _ in found] != [key for of in contents for key in lines_keys(job, of)]:
        return None
    return dropped_by_unit((bytes.fromhex(bits) for _, bits in found), contents)


def remember_dropped(cache: KnownSources, keys: Sequence[str], bits: Sequence[bytes]) -> None:
    """Keeps the bits of `find_repeats` for the windows with these keys."""
    each = [[key, of.hex()] for key, of in zip(keys, bits, strict=True)]
    remember(cache.path.with_suffix(DROPPED), each)


def dropped_by_unit(bits: Iterable[bytes], contents: Sequence[Content]) -> list[Dropped]:
    """The duplicates to drop from each unit. `bits`: those of `find_repeats`, for each window of
    these units in order.
    """
    each = iter(bits)
    return [
        {window.number: dropped for window in content.windows if (dropped := next(each))}
        for content in contents
    ]


def keep_stamps(job: Job, window: Window, stamps: Stamps) -> None:
    """Remembers the images of a window on this machine."""
    if window.images:
        remember(_path(job, window), {window.full_digest: stamps})


def forget_changed(job: Job, known: KnownSources) -> None:
    """Forgets windows with an image that has changed, or whose images' stamps are not
    remembered.
    """
    if not job.kind.has_images:
        return
    windows = {window for of in known.units.values() for window in of.windows if window.images}
    stamps = {w: (recall(_path(job, w)) or {}).get(w.full_digest) for w in windows}
    now = current({url for of in stamps.values() for url in of or ()})
    known.forget({w for w, of in stamps.items() if of != {url: now[url] for url in of or ()}})


def current(urls: Set[str]) -> dict[str, list[Any]]:
    """Size and stamp of each of these files. Many objects of a bucket are listed by the folder that
    holds them all, as long as that holds little else.
    """
    found = dict[str, Stat | None]()
    objects = sorted(filter(_is_listed, urls))
    for _, of in groupby(objects, lambda url: url.split("/")[2]):
        keys = list(of)
        if len(keys) > FEW:
            root = locate(os.path.commonprefix(keys).rpartition("/")[0])  # noqa: RUF071  (of URLs)
            for name, stat in islice(root.list(recursive=True), SPARSE * len(keys)):
                if (url := f"{root.url}/{name}") in urls:
                    found[url] = stat
    left = [url for url in urls if url not in found]
    found |= zip(left, map_threads(_stat_of, left), strict=True)
    return {url: [stat.size, stat.stamp] if stat else MISSING for url, stat in found.items()}


def _is_listed(url: str) -> bool:
    store = find_store(url)
    return store is not None and store.has_cheap_listings


def _stat_of(url: str) -> Stat | None:
    place = locate(url)
    try:
        return place.stat()
    except Unreachable as error:
        if place.is_store and not isinstance(error, Denied | NoSuchPlace):
            raise
        return None


def _path(job: Job, window: Window) -> Path:
    """The file of a window's stamps, named by the window's place, since paths may begin there. A
    later window there overwrites it.
    """
    folder = KnownSources.at(job.target).path.with_suffix(".images")
    return folder / xxhash.xxh128_hexdigest(f"{window.place} {job.images}")
