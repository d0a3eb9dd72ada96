"""One path type for local folders, S3-compatible stores and the Hugging Face hub: `locate("s3://bucket/key")`.

Nothing else in mdsmix opens a file of a stream or of a source. Operations that a disk or a store
lacks (append, rename, lock) are not offered, so code on top works on both. The hub is only read.
boto3 takes 0.5 s to import, so only the first request to a bucket imports it.
"""

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
    Found,
    Location,
    Stat,
    fixed_prefix,
    has_pattern,
)

__all__ = [
    "CHANGED",
    "Found",
    "Location",
    "Stat",
    "fixed_prefix",
    "has_pattern",
    "locate",
    "together",
]

T = TypeVar("T")
R = TypeVar("R")

THREADS = 16
"Requests at a time. Each waits some 20 ms for the store, and costs this machine next to nothing."


def together(request: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of `request` for each item, in the items' order; 16 requests run at a time. Raises the error of the first item that
    failed, and drops requests that have not begun."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(request, items))


def locate(url: str | os.PathLike[str]) -> Location:
    """The place that `s3://bucket/key`, `hf://datasets/org/name/file`, `file:///folder/file` or a (relative) path names; RecipeError for
    any other URL."""
    text = os.fspath(url)
    if "\0" in text:
        raise RecipeError(f"{text!r} names no place: no path can hold a NUL character; take it out")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme is None:
        return LocalPath(os.path.abspath(text))
    if scheme[1] == "file" and not urlsplit(text).netloc:
        return LocalPath(os.path.abspath(unquote(text[len("file://") :])))
    if scheme[1] == "s3":
        from mdsmix.storage.s3 import S3Path

        bucket, _, key = text[len("s3://") :].partition("/")
        if not bucket or has_pattern(bucket):
            raise RecipeError(
                f"{text} names no bucket: write s3://bucket/key, with the bucket's name in full"
            )
        return S3Path(f"{bucket}/{key.strip('/')}".rstrip("/"))
    if scheme[1] == "hf":
        from mdsmix.storage.hub import hub_path

        return hub_path(text)
    raise RecipeError(
        f"{text} cannot be opened: mdsmix reads and writes local paths, file:///path and "
        "s3://bucket/key, and reads hf://datasets/org/name/file; copy the data to one of these"
    )
