"""The path of an image, as a record says it -> where the image is, and its bytes.

Records may come from strangers, and a path may name any file or object that the user of mdsmix may
read, as with every tool that trains on such records. `inside` refuses paths that do not lie below
the folder at which paths begin.

An http(s) URL is asked only where a recipe says `http: fetch`, within limits of time and size. A
URL may give another image tomorrow, so each is asked once: its work unit records the content's
hash, and later runs do not ask again unless they are told to read the sources again.
"""

from __future__ import annotations

import os
import posixpath
import time
from functools import lru_cache
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from string import punctuation
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, build_opener

from mdsmix.errors import Denied, NoSuchPlace, RecipeError, Unreachable
from mdsmix.images.judge import Bad
from mdsmix.storage import Location, locate

MOST_BYTES = 256 << 20
"The largest image file that is read, in bytes."
MISSING = (-1, "")
"""In place of the size and stamp where there is no file: it is missing, or the image is in its
record or at a URL.
"""
HTTP_BYTES = 64 << 20
"The most bytes that are taken from a server for one image."
SECONDS = 60.0
"The time for one image, all tries together."
QUIET_SECONDS = 10.0
"How long a server may send no byte."
PAUSE_SECONDS = 0.5
"The pause before the second try; the one before the third is twice as long."
TRIES = 3
AT_ONCE = 8
"Requests that one worker has in flight."
_AGAIN = (408, 425, 429, 500, 502, 503, 504)


ImagePlace = Location | str | bytes
"The place of an image: a file or object, an http URL, or the bytes that the record itself holds."
NOWHERE = b""
"The place of an image whose path names none."


def locate_image(path: str | bytes, base: Location, inside: bool = False) -> ImagePlace:
    """The place of an image. `path`: relative to `base`, absolute, or a URL; bytes are the image
    itself. Bad (bad_image_path) where the path names no place, or, under `inside`, a place that is
    not below `base`.
    """
    if isinstance(path, bytes) or is_http(path):
        return path
    try:
        path.encode()
        place = _placed(path, base)
    except (RecipeError, ValueError) as error:
        raise Bad("bad_image_path", str(error)) from None
    if inside and not _is_below(place, base):
        raise Bad(
            "bad_image_path",
            "it does not lie below the folder of the images, and images.outside is refuse",
        )
    return place


def _placed(path: str, base: Location) -> Location:
    if "\0" in path:  # the message leaves out the folder, which differs between machines
        raise ValueError("no path holds a NUL character")
    if "://" in path:
        return locate(path)
    if not base.is_store or path.startswith("/"):
        return locate(os.path.join(base.url, path))
    whole = posixpath.normpath(f"{base.path}/{path}")
    if not f"{whole}/".startswith(f"{base.container}/"):
        raise ValueError(f"it leads out of the {base.container_noun} {base.container}")
    return locate(base.scheme + whole)


def _is_below(place: Location, base: Location) -> bool:
    if place.is_store or base.is_store:
        # `..` is an ordinary name in S3, but a step up in stores that are folders or HTTP servers.
        return place.url.startswith(f"{base.url.rstrip('/')}/") and ".." not in place.url.split("/")
    return Path(place.url).resolve().is_relative_to(_real(base.url))


@lru_cache(maxsize=64)
def _real(path: str) -> Path:
    return Path(path).resolve()


def content_at(at: ImagePlace, fetches: bool) -> tuple[bytes, tuple[int, str]]:
    """The image's bytes, with size and stamp of its file, MISSING where it has no file. `fetches`:
    whether http URLs are asked.

    Raises:
        Unreachable: a store does not answer.
        Bad: this image alone is missing, refused or too large.
    """
    if isinstance(at, bytes):
        return at, MISSING
    if isinstance(at, str):
        if not fetches:
            raise Bad("remote_image", "it is at an http URL: images.http: fetch asks for it")
        return fetch_url(at), MISSING
    try:
        found = at.fetch(MOST_BYTES)
    except Unreachable as error:
        if at.is_store and not isinstance(error, Denied | NoSuchPlace):
            raise
        reason = "image_not_found" if isinstance(error, NoSuchPlace) else "image_unreadable"
        raise Bad(reason, str(error).partition(": ")[2]) from None  # paths differ between machines
    if found is None:
        raise Bad("image_not_found", "there is no such file")
    stat, data = found
    stamp = stat.size, stat.stamp
    if stat.size > MOST_BYTES:
        raise Bad(
            "image_file_too_large",
            f"the file has {stat.size} bytes, and {MOST_BYTES} are the most that are read",
            stamp,
        )
    return data, stamp


def is_http(path: str) -> bool:
    return path[:7].lower() == "http://" or path[:8].lower() == "https://"


def fetch_url(url: str) -> bytes:
    """The bytes at a URL, asked through the proxies of the environment. Bad (image_not_found,
    image_not_fetched, image_file_too_large) where they do not come whole.
    """
    until, why = time.monotonic() + SECONDS, ""
    for number in range(TRIES):
        time.sleep(PAUSE_SECONDS * number)
        if time.monotonic() > until:
            break
        try:
            return _asked(url, until)
        except HTTPError as error:
            error.close()  # a body that nobody wants may have no end
            why = f"the server answers {error.code}"
            if error.code not in _AGAIN:
                raise Bad("image_not_found", why) from None
        except ValueError as error:  # the URL, or one that it redirects to, is none
            raise Bad("image_not_found", str(error)) from None
        except (OSError, HTTPException) as error:
            why = str(getattr(error, "reason", None) or error)
    raise Bad("image_not_fetched", why)


def _asked(url: str, until: float) -> bytes:
    headers = {"User-Agent": "mdsmix", "Accept": "image/*"}
    wanted = Request(quote(url, safe=punctuation), headers=headers)  # a space is %20
    content = bytearray()
    with build_opener().open(wanted, timeout=QUIET_SECONDS) as answer:
        while piece := answer.read1(1 << 16):  # `read` would wait for the whole piece
            content += piece
            if len(content) > HTTP_BYTES:
                raise Bad("image_file_too_large", f"the server sends more than {HTTP_BYTES} bytes")
            if time.monotonic() > until:
                raise Bad("image_not_fetched", f"it was not there whole after {SECONDS:g} s")
        if answer.length:
            raise IncompleteRead(bytes(content), answer.length)
    return bytes(content)
