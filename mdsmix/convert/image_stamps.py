"""Streams of images: which folders their paths begin at, and whether the images are those that they were.

A window's key holds what its images hold, so the same images elsewhere, or with other times, give no new work. That takes
reading them, and a run with nothing to do must not. So beside what this machine remembers of a source it keeps the size and stamp of
each image that a window names, and a later run looks at those: at a store in listings of a thousand, on a disk one by one. A
window whose images are as they were is known; of one with another image all are read. What a server gave over http has no
stamp: it is asked again only with --verify-source.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from mdsmix.convert.job import Job
from mdsmix.convert.known_sources import KnownSources, recall, remember
from mdsmix.errors import Denied, NoSuchPlace, Unreachable
from mdsmix.sources import Content, Unit, Window
from mdsmix.storage import Location, Stat, locate, together

if TYPE_CHECKING:
    from mdsmix.images.reader import ImageReader

Stamps = Mapping[str, tuple[int, str]]
"URL of an image -> its size and stamp; a size of -1 where it was not there, or could not be read."
MISSING = (-1, "")
FEW = 100
"Objects of a bucket that are asked for one by one: a listing may hold any number of others."
SPARSE = 20
"Where a listing is more than so many times what is looked for, the rest is asked for one by one."


def folders_of(job: Job, unit: Unit) -> dict[str, Location]:
    """File of the unit -> the folder at which paths of images in it begin; empty where the recipe names a root, or there are none."""
    if not job.kind.has_images or job.images:
        return {}
    return {file.name: file.location.parent for file in unit.files}


def cut_by_images(pieces: Iterable[range], pictures: ImageReader | None) -> Iterator[range]:
    """The positions in pieces whose images are about AIM_BYTES, as far as those before tell."""
    for piece in pieces:
        while piece:
            most = pictures.most_records if pictures else len(piece)
            yield piece[:most]
            piece = piece[most:]


def keep_stamps(job: Job, window: Window, stamps: Stamps) -> None:
    """Remembers the images of a window on this machine."""
    if window.images:
        remember(_path(job, window), stamps)


def forget_changed(job: Job, known: KnownSources) -> None:
    """Forgets the windows of which an image is another than it was, or of which nothing is remembered."""
    if not job.kind.has_images:
        return
    every = (window for of in known.windows.values() for window in of.values())
    windows = {window for window in every if window.images}
    stamps = {window: recall(_path(job, window)) for window in windows}
    now = current([url for of in stamps.values() for url in of or ()])
    known.forget(
        {
            window
            for window, of in stamps.items()
            if of is None or any(now.get(url, MISSING) != tuple(was) for url, was in of.items())
        }
    )


def forget_stamps(job: Job, contents: Iterable[Content]) -> None:
    """Deletes what is remembered of windows that the stream has no longer."""
    names = {_path(job, w).name for content in contents for w in content.windows if w.images}
    with suppress(OSError):
        for path in _folder(job).iterdir():
            if path.name not in names:
                path.unlink()


def current(urls: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Size and stamp of these files, of those that are there."""
    found = dict(_listed({url for url in urls if url.startswith("s3://")}))
    left = [url for url in set(urls) if url not in found]
    each = zip(left, together(_stat_of, left), strict=True)
    return {url: (stat.size, stat.stamp) for url, stat in [*found.items(), *each] if stat}


def _listed(urls: Collection[str]) -> Iterator[tuple[str, Stat]]:
    """Those of a bucket's images that a listing of the folder that holds them all gives, as long as that folder holds little else."""
    for bucket, of in groupby(sorted(urls), lambda url: url.split("/")[2]):
        keys = list(of)
        if len(keys) > FEW:
            top = os.path.commonprefix(keys).rpartition("/")[0]  # noqa: RUF071  (of URLs)
            root = locate(top if len(top) > len(f"s3://{bucket}") else f"s3://{bucket}")
            for name, stat in islice(root.list(recursive=True), SPARSE * len(keys)):
                if (url := f"{root.url}/{name}") in urls:
                    yield url, stat


def _stat_of(url: str) -> Stat | None:
    place = locate(url)
    try:
        return place.stat()
    except Unreachable as error:
        if place.is_store and not isinstance(error, Denied | NoSuchPlace):
            raise
        return None


def _path(job: Job, window: Window) -> Path:
    """By the window and where its records stand, since paths may begin there."""
    name = xxhash.xxh128_hexdigest(f"{window.said} {window.place} {job.images}")
    return _folder(job) / name


def _folder(job: Job) -> Path:
    return KnownSources.at(job.target).path.with_suffix(".images")
