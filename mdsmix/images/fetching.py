"""The path of an image, as a record says it -> where the image is, and its bytes.

Records may be those of strangers, and a path may name any file of this machine or object of a store that its user may read, as with
every tool that trains on such records. `inside` refuses what does not lie below the folder at which paths begin.
"""

from __future__ import annotations

import os
import posixpath
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from mdsmix.errors import Denied, NoSuchPlace, RecipeError, Unreachable
from mdsmix.images.http import fetch, is_http
from mdsmix.images.judge import Bad
from mdsmix.storage import Location, locate

MOST_BYTES = 256 << 20
"Of one file."
MISSING = (-1, "")
"Stands for the size and stamp of a file that is not there."
_TOPS = {"s3": (1, "the bucket"), "hf": (3, "the data set")}
"Scheme -> how many names its store's own name has, and what is called so."


class ImagePlace(NamedTuple):
    """Where an image is."""

    url: str
    place: Location | None
    "None: at an http URL."


def find(path: str, base: Location, inside: bool = False) -> ImagePlace:
    """The place of a path, relative to `base`; Bad (bad_image_path) where it names none, or one that is not below `base` and has to be."""
    if is_http(path):
        return ImagePlace(path, None)
    try:
        path.encode()
        place = _placed(path, base)
    except (RecipeError, ValueError) as error:
        raise Bad("bad_image_path", str(error)) from None
    if inside and not _is_below(place, base):
        why = "it does not lie below the folder of the images, and images.outside is refuse"
        raise Bad("bad_image_path", why)
    return ImagePlace(place.url, place)


def _placed(path: str, base: Location) -> Location:
    if "\0" in path:  # said without the folder, which is another elsewhere
        raise ValueError("no path holds a NUL character")
    if "://" in path:
        return locate(path)
    if not base.is_store or path.startswith("/"):
        return locate(os.path.join(base.url, path))
    scheme, _, rest = base.url.partition("://")
    names, called = _TOPS[scheme]
    top, whole = "/".join(rest.split("/")[:names]), posixpath.normpath(f"{rest}/{path}")
    if not f"{whole}/".startswith(f"{top}/"):
        raise ValueError(f"it leads out of {called} {top}")
    return locate(f"{scheme}://{whole}")


def _is_below(place: Location, base: Location) -> bool:
    if place.is_store or base.is_store:
        # In S3 `..` is a name like others, for stores over folders and over HTTP it is a step up.
        return place.url.startswith(f"{base.url.rstrip('/')}/") and ".." not in place.url.split("/")
    return Path(place.url).resolve().is_relative_to(_real(base.url))


@lru_cache(maxsize=64)
def _real(path: str) -> Path:
    return Path(path).resolve()


def content_at(at: ImagePlace, fetches: bool) -> tuple[bytes, tuple[int, str]]:
    """The image's bytes, with size and stamp of its file. `fetches`: whether http URLs are asked.

    Raises:
        Unreachable: a store does not answer. What it or a disk refuses, or has not, is Bad, said of that image alone.
    """
    if at.place is None:
        if not fetches:
            raise Bad("remote_image", "it is at an http URL: images.http: fetch asks for it")
        return fetch(at.url), MISSING
    try:
        found = at.place.fetch(MOST_BYTES)
    except Unreachable as error:
        if at.place.is_store and not isinstance(error, Denied | NoSuchPlace):
            raise
        reason = "image_not_found" if isinstance(error, NoSuchPlace) else "image_unreadable"
        raise Bad(reason, str(error).partition(": ")[2]) from None  # the path is another elsewhere
    if found is None:
        hint = ": a backslash is a letter of a name here, / parts folders" * ("\\" in at.url)
        raise Bad("image_not_found", f"there is no such file{hint}")
    stat, data = found
    stamp = stat.size, stat.stamp
    if stat.size > MOST_BYTES:
        why = f"the file has {stat.size} bytes, and {MOST_BYTES} are the most that are read"
        raise Bad("image_file_too_large", why, stamp)
    return data, stamp
