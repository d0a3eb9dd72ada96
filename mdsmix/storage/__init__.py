"""One path type for local folders, S3-compatible stores and the Hugging Face hub:
`locate("s3://bucket/key")`.

Nothing else in mdsmix opens a file of a stream or of a source. Operations that a disk or a store
lacks (append, rename, lock) are not offered, so code on top works on both. The hub is only read.
boto3 takes 0.5 s to import, so only the first request to a bucket imports it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from mdsmix.errors import RecipeError
from mdsmix.storage.local import LocalPath
from mdsmix.storage.location import (
    CHANGED,
    FoundFiles,
    Location,
    Stat,
    fixed_prefix,
    has_pattern,
)

__all__ = [
    "CHANGED",
    "FoundFiles",
    "Location",
    "Stat",
    "begins_like_url",
    "find_key_terminator",
    "fixed_prefix",
    "has_pattern",
    "is_for_streaming_alone",
    "is_url",
    "locate",
    "map_threads",
    "require_local",
]

T = TypeVar("T")
R = TypeVar("R")

_OPENED = ("s3", "hf", "file")
"The schemes that mdsmix opens."
_MEANT = {"s3": "s3", "s3a": "s3", "s3n": "s3", "hf": "hf", "file": "file"}
"A scheme in lower case, as other tools or slips of the pen write it -> the one that mdsmix opens."
_STREAMING = ("gs", "oci", "azure", "azure-dl", "dbfs", "sftp", "alipan")
"""The schemes that Streaming 0.12 and 0.13 read and mdsmix does not (CloudDownloader in
streaming/base/storage/download.py).
"""
_KNOWN = "|".join([*_MEANT, *_STREAMING, "https", "http"])
_SCHEME = re.compile(
    rf"((?i:{_KNOWN})(?=:)|(?i:s3|gs|hf)(?=//)|[A-Za-z][A-Za-z0-9+.-]*(?=:[/\\\\]))(:?(?://|[/\\\\])?)"
)
"""The scheme at the beginning of a name, such as `s3` of `s3://bucket`, with the signs that follow
it. A known scheme is one too if its slashes are left out (`s3:bucket`), and `s3`, `gs` and `hf`
also if the colon is (`s3//bucket`).
"""
_SLIPS = (":", "//")
"What follows a known scheme if its slashes or its colon are left out."

THREADS = 16
"Requests at a time. Each waits some 20 ms for the store, and costs this machine next to nothing."


def map_threads(request: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of `request` for each item, in the items' order; 16 requests run at a time.
    Raises the error of the first item that failed, and drops requests that have not begun.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(request, items))


def locate(url: str | os.PathLike[str]) -> Location:
    """Return the place that `s3://bucket/key`, `hf://datasets/org/name/file`, `file:///folder/file`
    or a (relative) path names.

    Raises RecipeError for any other URL.
    """
    text = os.fspath(url)
    if "\0" in text:
        raise RecipeError(f"{text!r} names no place: no path can hold a NUL character; take it out")
    if not is_url(text):
        return LocalPath(os.path.abspath(text))
    if text.startswith("file://"):
        return LocalPath(os.path.abspath(unquote(text[len("file://") :])))
    if text.startswith("s3://"):
        from mdsmix.storage.s3 import S3Path

        bucket, _, key = text[len("s3://") :].partition("/")
        if not bucket or has_pattern(bucket):
            raise RecipeError(
                f"{text} names no bucket: write s3://bucket/key, with the bucket's name in full"
            )
        return S3Path(f"{bucket}/{key.strip('/')}".rstrip("/"))
    from mdsmix.storage.hub import hub_path

    return hub_path(text)


def is_url(text: str) -> bool:
    """Whether the text is a URL that mdsmix opens; False for a path.

    Raises RecipeError for another URL, a URL without its colon or one of its slashes (`s3:/bucket`,
    `s3:bucket`, `s3//bucket`), and a path that begins with a drive (`C:/data`). A folder that is
    really named so can be written `./s3:/bucket`.
    """
    found = _SCHEME.match(text)
    if found is None:
        return False
    scheme, signs = found.groups()
    rest = text[found.end() :].lstrip("/\\")
    has_host = scheme == "file" and bool(urlsplit(text).netloc)
    if scheme in _OPENED and signs == "://" and not has_host:
        return True
    if len(scheme) == 1:
        remedy = f"a path has no drive here; write it as this machine names it, such as /mnt/{scheme.lower()}/{rest}"
    elif meant := _MEANT.get(scheme.lower()):
        remedy = f"did you mean {meant}://{'/' if meant == 'file' else ''}{rest}?"
        if signs in _SLIPS:
            remedy += f" Or write ./{text} if it is a local path"
    else:
        remedy = (
            "mdsmix reads and writes local paths, file:///path and s3://bucket/key, and reads hf://datasets/org/name/file; copy the data to "
            "one of these"
        )
        if signs in _SLIPS:
            nearest = f"{scheme.lower()}:{'/' if scheme.lower() == 'dbfs' else '//'}{rest}"
            remedy = f"did you mean {nearest}, which mdsmix does not open? {remedy}"
        if signs != "://":
            remedy += f", or write ./{text} if it is a local path"
    raise RecipeError(f"{text} cannot be opened: {remedy}")


def begins_like_url(name: str | os.PathLike[str]) -> bool:
    """Whether the name is a URL, or one that lacks a colon or slashes."""
    return _SCHEME.match(os.fspath(name)) is not None


def require_local(folder: str | os.PathLike[str]) -> None:
    """Raise RecipeError if the name of a local folder is a URL, or begins like one."""
    if begins_like_url(folder):
        raise RecipeError(f"{os.fspath(folder)} is not a folder of this machine; name one that is.")


def find_key_terminator(url: str) -> str:
    """Return the first `#` or `?` of a URL, at which Streaming's parser of URLs ends the key; blank
    if there is none, and for a path.
    """
    found = re.search("[#?]", url) if "://" in url else None
    return found[0] if found else ""


def is_for_streaming_alone(text: str) -> bool:
    """Whether the text is a URL that Streaming reads and mdsmix does not, such as `gs://bucket/key`
    or `dbfs:/Volumes/a/b/c`.
    """
    found = _SCHEME.match(text)
    if found is None or found[1] not in _STREAMING:
        return False
    return found[2] == "://" or (found[1] == "dbfs" and found[2] == ":/")
