"""The path of an image, as a record says it -> where the image is, and its bytes.

Records may be those of strangers, and a path may name any file of this machine or object of a store that its user may read, as with
every tool that trains on such records. `inside` refuses what does not lie below the folder at which paths begin.
"""

from __future__ import annotations

import os
import posixpath
from functools import lru_cache
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
    except (RecipeError, UnicodeEncodeError, ValueError) as error:
        raise Bad("bad_image_path", str(error)) from None
    if inside and not _is_below(place, base):
        why = "it does not lie below the folder of the images, and images.outside is refuse"
        raise Bad("bad_image_path", why)
    return ImagePlace(place.url, place)


def _placed(path: str, base: Location) -> Location:
    if "\0" in path:  # said without the folder, which is another elsewhere
        raise Bad("bad_image_path", "no path holds a NUL character")
    if "://" in path:
        return locate(path)
    if not base.is_store or path.startswith("/"):
        return locate(os.path.join(base.url, path))
    scheme, _, rest = base.url.partition("://")
    names, called = _TOPS[scheme]
    parts = rest.split("/")
    name = posixpath.normpath("/".join([*parts[names:], path]))
    if name.split("/")[0] == "..":
        raise Bad("bad_image_path", f"it leads out of {called} {'/'.join(parts[:names])}")
    return locate("/".join([f"{scheme}:/", *parts[:names], "" if name == "." else name]))


def _is_below(place: Location, base: Location) -> bool:
    if place.is_store or base.is_store:
        # In S3 `..` is a name like others, for stores over folders and over HTTP it is a step up.
        below = place.url.removeprefix(f"{base.url.rstrip('/')}/")
        return below != place.url and ".." not in below.split("/")
    top = _real(base.url)
    return os.path.realpath(place.url).startswith(top if top.endswith("/") else f"{top}/")


@lru_cache(maxsize=64)
def _real(path: str) -> str:
    return os.path.realpath(path)


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
    except NoSuchPlace as error:
        raise Bad("image_not_found", _without_path(error)) from None
    except Unreachable as error:
        if at.place.is_store and not isinstance(error, Denied):
            raise
        raise Bad("image_unreadable", _without_path(error)) from None
    if found is None:
        is_folder = not at.place.is_store and os.path.isdir(at.url)
        why = "it is a folder" if is_folder else "there is no such file"
        why += ": a backslash is a letter of a name here, / parts folders" * ("\\" in at.url)
        raise Bad("image_not_found", why)
    stat, data = found
    if stat.size > MOST_BYTES:
        why = f"the file has {stat.size} bytes, and {MOST_BYTES} are the most that are read"
        raise Bad("image_file_too_large", why, (stat.size, stat.stamp))
    return data, (stat.size, stat.stamp)


def _without_path(error: Unreachable) -> str:
    """What is said of a path that is another elsewhere."""
    return str(error).partition(": ")[2]
