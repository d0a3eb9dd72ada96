"""The path of an image, as a record says it -> where the image is.

Records may be those of strangers, and a path may name any file of this machine or object of a store that its user may read, as with
every tool that trains on such records. `inside` refuses what does not lie below the folder at which paths begin.
"""

from __future__ import annotations

import os
import posixpath
from functools import lru_cache
from typing import NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.images.check import Bad
from mdsmix.images.http import is_http
from mdsmix.storage import Location, locate

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
