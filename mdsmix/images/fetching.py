"""Finds the place of an image by the image's path in a record, and reads its bytes.

Records may come from strangers, and a path may name any file or object that the user of mdsmix may
read, as with every tool that trains on such records. `inside` refuses paths that lead out of the
folder at which paths begin.

An http(s) URL is requested only if a recipe sets `http: fetch`, within limits of time and size. A
URL may return another image tomorrow, so each URL is requested once: the hash of the image is
stored with the work unit, and later runs request the URL again only if they read the sources again.
"""

from __future__ import annotations

import os
import posixpath
import time
from functools import lru_cache
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from string import punctuation
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, build_opener

from mdsmix.errors import Denied, NoSuchPlace, RecipeError, Unreachable
from mdsmix.images.judge import BadImage
from mdsmix.storage import Location, locate

MOST_BYTES = 256 << 20
"The largest image file that is read, in bytes."
MISSING = (-1, "")
"""In place of size and stamp if an image has no file: the file is missing, or the image is in its
record or at a URL.
"""
HTTP_BYTES = 64 << 20
"The most bytes that are downloaded for one image."
SECONDS = 60.0
"The time for one image, all tries together."
QUIET_SECONDS = 10.0
"How long a server may send no byte."
PAUSE_SECONDS = 0.5
"The pause before the second try; the one before the third is twice as long."
TRIES = 3
AT_ONCE = 8
"Requests that one worker has in flight."
_RETRIED_STATUSES = (408, 425, 429, 500, 502, 503, 504)


ImagePlace = Location | str | bytes
"The place of an image: a file or object, an http URL (str), or the bytes in the record itself."
NOWHERE = b""
"The place of an image whose path is not valid."


class ImageFile(NamedTuple):
    """The bytes of an image, with size and stamp of its file. A stamp changes when the file is
    written, such as its mtime.
    """

    data: bytes
    stamp: tuple[int, str]
    "(size, stamp) of the image's file; MISSING if the image has no file."


def locate_image(path: str | bytes, base: Location, inside: bool = False) -> ImagePlace:
    """Return the place of an image.

    Args:
        path: a path or URL; or bytes, which are the image itself.
        base: the folder at which relative paths begin.
        inside: whether the place must be below `base`.

    Raises BadImage (bad_image_path) if the path is not valid, or if the place is not below `base`
    although `inside` requires it.
    """
    if isinstance(path, bytes) or is_http(path):
        return path
    try:
        path.encode()  # raises a ValueError for a lone surrogate
        location = _locate_path(path, base)
    except (RecipeError, ValueError) as error:
        raise BadImage("bad_image_path", str(error)) from None
    if inside and not _is_below(location, base):
        raise BadImage(
            "bad_image_path",
            "the path leads out of the folder of the images, and the recipe has images.outside: "
            "refuse",
        )
    return location


def _locate_path(path: str, base: Location) -> Location:
    """Return the location of a path or URL. Relative paths begin at the folder `base`.

    Raises ValueError or RecipeError if the path is not valid, or leads out of the bucket.
    """
    if "\0" in path:  # the message leaves out the folder, which differs between machines
        raise ValueError("a path cannot contain a NUL character")
    if "://" in path:
        return locate(path)
    # An absolute path replaces the base: it is a file of this machine, even if the base is a store.
    if not base.is_store or path.startswith("/"):
        return locate(os.path.join(base.url, path))

    # A relative path in a store: `..` must not lead out of the bucket.
    whole = posixpath.normpath(f"{base.path}/{path}")
    if not f"{whole}/".startswith(f"{base.container}/"):
        raise ValueError(f"it leads out of the {base.container_noun} {base.container}")
    return locate(base.scheme + whole)


def _is_below(location: Location, base: Location) -> bool:
    """Return whether a location is below the folder `base`. On a disk, links are followed first."""
    if location.is_store or base.is_store:
        # `..` is an ordinary name in S3, but a step up in stores that are folders or HTTP servers.
        folder = base.url.rstrip("/")
        return location.url.startswith(f"{folder}/") and ".." not in location.url.split("/")
    return Path(location.url).resolve().is_relative_to(_resolve(base.url))


@lru_cache(maxsize=64)
def _resolve(path: str) -> Path:
    return Path(path).resolve()


def read_image_file(image: ImagePlace, fetches: bool) -> ImageFile:
    """Return the bytes of an image, with size and stamp of its file. A stamp changes when the file
    is written, such as its mtime.

    Args:
        image: where the image is: a file, a URL, or the bytes themselves.
        fetches: whether http URLs are requested.

    Raises Unreachable if a store does not answer, so that no image in it can be read.
    Raises BadImage if only this image is missing, refused or too large.
    """
    if isinstance(image, bytes):
        return ImageFile(image, MISSING)
    if isinstance(image, str):
        if not fetches:
            raise BadImage(
                "remote_image", "it is at an http URL: set images.http: fetch to fetch it"
            )
        return ImageFile(fetch_url(image), MISSING)
    try:
        fetched = image.fetch(MOST_BYTES)
    except Unreachable as error:
        concerns_only_image = isinstance(error, Denied | NoSuchPlace)
        if image.is_store and not concerns_only_image:
            raise
        reason = "image_not_found" if isinstance(error, NoSuchPlace) else "image_unreadable"
        # Leave out the path, which is before the first colon: it differs between machines.
        why = str(error).partition(": ")[2]
        raise BadImage(reason, why) from None
    if fetched is None:
        raise BadImage("image_not_found", "there is no such file")
    stat, data = fetched
    stamp = stat.size, stat.stamp
    if stat.size > MOST_BYTES:
        raise BadImage(
            "image_file_too_large",
            f"the file has {stat.size} bytes, and at most {MOST_BYTES} are read",
            stamp,
        )
    return ImageFile(data, stamp)


def is_http(path: str) -> bool:
    return path[:7].lower() == "http://" or path[:8].lower() == "https://"


def fetch_url(url: str) -> bytes:
    """Return the bytes at a URL, after up to 3 tries. Proxies are taken from the environment.

    Raises BadImage (image_not_found, image_not_fetched, image_file_too_large) if the bytes do not
    arrive completely.
    """
    deadline = time.monotonic() + SECONDS
    fault = ""  # of the last try
    for number in range(TRIES):
        time.sleep(PAUSE_SECONDS * number)  # no pause before the first try
        if time.monotonic() > deadline:
            break
        try:
            return _request(url, deadline)
        except HTTPError as error:
            error.close()  # the body is not read and may have no end
            fault = f"the server answers {error.code}"
            if error.code not in _RETRIED_STATUSES:
                raise BadImage("image_not_found", fault) from None
        except ValueError as error:  # the URL, or one that it redirects to, is not valid
            raise BadImage("image_not_found", str(error)) from None
        except (OSError, HTTPException) as error:
            fault = str(getattr(error, "reason", None) or error)
    raise BadImage("image_not_fetched", fault)


def _request(url: str, deadline: float) -> bytes:
    """Request a URL once, and return the bytes of the answer.

    Args:
        deadline: when all bytes must have arrived, as a time of `time.monotonic`.

    Raises BadImage if the answer is too large or too slow.
    """
    headers = {"User-Agent": "mdsmix", "Accept": "image/*"}
    request = Request(quote(url, safe=punctuation), headers=headers)  # a space is %20
    content = bytearray()
    with build_opener().open(request, timeout=QUIET_SECONDS) as answer:
        while piece := answer.read1(1 << 16):  # `read` would wait until it has all these bytes
            content += piece
            if len(content) > HTTP_BYTES:
                raise BadImage(
                    "image_file_too_large", f"the server sends more than {HTTP_BYTES} bytes"
                )
            if time.monotonic() > deadline:
                raise BadImage(
                    "image_not_fetched", f"it did not arrive completely in {SECONDS:g} s"
                )
        if answer.length:  # bytes that the server has announced and not sent
            raise IncompleteRead(bytes(content), answer.length)
    return bytes(content)
