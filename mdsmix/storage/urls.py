"""Turns a URL or path into its Location. The table of stores is here: a new store is a class in a
file of its own, and an entry in `STORES`.

A store's file is imported at the first URL of that store. All of them and what they need take 15 ms
of the 300 ms of a command that has nothing to do.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import NamedTuple, cast
from urllib.parse import unquote, urlsplit

from mdsmix.errors import RecipeError
from mdsmix.storage.local import LocalPath
from mdsmix.storage.location import Location


class _Store(NamedTuple):
    """A store that mdsmix opens, before its class is imported."""

    scheme: str
    "The same as the class's `scheme`."
    module: str
    "The file of the store's class, in this folder."
    class_name: str
    other_schemes: tuple[str, ...] = ()
    "Schemes of other tools for the same store, such as `s3a`. They are refused with a suggestion."

    def import_class(self) -> type[Location]:
        """Return the store's class."""
        module = import_module(f"mdsmix.storage.{self.module}")
        return cast(type[Location], getattr(module, self.class_name))


STORES = (
    _Store("s3://", "s3", "S3Path", other_schemes=("s3a", "s3n")),
    _Store("gs://", "gcs", "GCSPath", other_schemes=("gcs",)),
    _Store("azure://", "azure", "AzurePath"),
    _Store("hf://buckets/", "hub_buckets", "HubBucketPath"),
    _Store("hf://", "hub", "HubPath"),
)
"""The stores that mdsmix opens. A URL belongs to the first store whose scheme begins it, so a store
with a longer scheme (`hf://buckets/`) comes before one with a shorter (`hf://`).
"""


def _name_scheme(store: _Store) -> str:
    return store.scheme.partition("://")[0]


_STORE_WORDS = tuple(dict.fromkeys(map(_name_scheme, STORES)))
"The schemes of the stores, each once: `s3`, `gs`, `hf`."
_OPENED = (*_STORE_WORDS, "file")
"The schemes that mdsmix opens."
_MEANT = {word: word for word in _OPENED} | {
    alias: _name_scheme(store) for store in STORES for alias in store.other_schemes
}
"Scheme in lower case, as users may write it (`s3a`) -> the scheme that mdsmix opens (`s3`)."
_READ_BY_STREAMING = ("s3", "gs", "oci", "azure", "azure-dl", "hf", "dbfs", "sftp", "alipan")
"""The schemes that Streaming 0.12 and 0.13 read (CloudDownloader in
streaming/base/storage/download.py).
"""
_FOR_STREAMING_ALONE = tuple(word for word in _READ_BY_STREAMING if word not in _OPENED)
_KNOWN = "|".join([*_MEANT, *_FOR_STREAMING_ALONE, "https", "http"])
_SCHEME = re.compile(
    rf"((?i:{_KNOWN})(?=:)|(?i:{'|'.join(_STORE_WORDS)})(?=//)|[A-Za-z][A-Za-z0-9+.-]*(?=:[/\\]))"
    r"(:?(?://|[/\\])?)"
)
"""Matches the scheme at the beginning of a name, such as `s3` of `s3://bucket`, and the signs that
follow it (group 2). A known scheme is also matched if its slashes are left out (`s3:bucket`). The
scheme of a store is also matched if the colon is left out (`s3//bucket`).
"""
_SLIPS = (":", "//")
"The signs after a known scheme if its slashes (`s3:bucket`) or its colon (`s3//`) are missing."


def locate(url: str | os.PathLike[str]) -> Location:
    """Return the location of a path or URL.

    Args:
        url: `s3://bucket/key`, `gs://bucket/key`,
            `azure://account.blob.core.windows.net/container/key`, `hf://datasets/org/name/file`,
            `hf://buckets/org/name/key`, `file:///folder/file`, or an absolute or relative path.

    Raises RecipeError for any other URL.
    """
    text = os.fspath(url)
    if "\0" in text:
        raise RecipeError(f"{text!r} contains a NUL character, which no path can have; remove it")
    if not is_url(text):
        return LocalPath(os.path.abspath(text))
    if text.startswith("file://"):
        return LocalPath(os.path.abspath(unquote(text[len("file://") :])))
    store = find_store(text)
    assert store, "is_url knows the schemes of STORES and file"
    return store.from_url(text)


def find_store(url: str) -> type[Location] | None:
    """Return the class of the store that a URL is in, such as S3Path; None for a path, for
    `file://` and for a URL that mdsmix does not open.
    """
    for store in STORES:
        if url.startswith(store.scheme):
            return store.import_class()
    return None


def import_stores() -> tuple[type[Location], ...]:
    """Return the classes of all stores that mdsmix opens."""
    return tuple(store.import_class() for store in STORES)


def is_url(text: str) -> bool:
    """Return whether the string is a URL that mdsmix opens (True) or a path (False).

    Raises RecipeError for another URL, a URL without its colon or one of its slashes (`s3:/bucket`,
    `s3:bucket`, `s3//bucket`), and a path that begins with a drive (`C:/data`). For a folder with
    such a name, users can write `./s3:/bucket`.
    """
    match = _SCHEME.match(text)
    if match is None:
        return False
    scheme, signs = match.groups()
    tail = text[match.end() :].lstrip("/\\")
    names_other_host = scheme == "file" and bool(urlsplit(text).netloc)  # file://host/path
    if scheme in _OPENED and signs == "://" and not names_other_host:
        return True
    raise RecipeError(f"{text} cannot be opened: {_explain_url(text, scheme, signs, tail)}")


def _explain_url(text: str, scheme: str, signs: str, tail: str) -> str:
    """Return what to write in place of a URL that is not opened: the end of a message that begins
    with the URL.

    Args:
        text: the URL, such as `s3:/bucket/key`.
        scheme: the URL's scheme as written: `s3`.
        signs: the signs after the scheme: `:/`.
        tail: the URL after these signs, without leading slashes: `bucket/key`.
    """
    word = scheme.lower()
    local = f"write ./{text} if it is a local path"
    if len(scheme) == 1:  # the drive of a path on Windows
        return (
            "a path has no drive here; write the path as this machine names it, "
            f"such as /mnt/{word}/{tail}"
        )

    # The URL is misspelled: suggest the URL that is opened.
    if word in _MEANT:
        meant = _MEANT[word]
        slash = "/" if meant == "file" else ""  # file:///path
        question = f"did you mean {meant}://{slash}{tail}?"
        return f"{question} Or {local}" if signs in _SLIPS else question

    # mdsmix does not open such URLs.
    stores = import_stores()
    writable = [store.example_url for store in stores if not store.is_read_only]
    read_only = [store.example_url for store in stores if store.is_read_only]
    remedy = (
        f"mdsmix reads and writes local paths, file:///path, {', '.join(writable)}, and reads "
        f"{', '.join(read_only)}; copy the data to one of these"
    )
    if signs in _SLIPS:
        slashes = "/" if word == "dbfs" else "//"
        remedy = f"did you mean {word}:{slashes}{tail}, which mdsmix does not open? {remedy}"
    return remedy if signs == "://" else f"{remedy}, or {local}"


def begins_like_url(name: str | os.PathLike[str]) -> bool:
    """Return whether the name is a URL of any scheme, also one without its colon or slashes."""
    return _SCHEME.match(os.fspath(name)) is not None


def require_local(folder: str | os.PathLike[str]) -> None:
    """Raise RecipeError if the name of a local folder begins like a URL."""
    if begins_like_url(folder):
        raise RecipeError(
            f"{os.fspath(folder)} is not a folder of this machine; name a local folder."
        )


def find_key_terminator(url: str) -> str:
    """Return the first `#` or `?` of a URL, at which Streaming's parser of URLs ends the key. ""
    for a URL without these signs, and for a path.
    """
    match = re.search("[#?]", url) if "://" in url else None
    return match[0] if match else ""


def is_for_streaming_alone(text: str) -> bool:
    """Return whether the string is a URL that Streaming reads and mdsmix does not, such as
    `oci://bucket/key` or `dbfs:/Volumes/a/b/c`.
    """
    match = _SCHEME.match(text)
    if match is None:
        return False
    scheme, signs = match.groups()
    if scheme not in _FOR_STREAMING_ALONE:
        return False
    return signs == "://" or (scheme == "dbfs" and signs == ":/")


def store_addresses() -> dict[str, str]:
    """Return name -> value of the environment variables with the addresses of stores, which are
    passed to the other nodes of a run. Credentials are not passed: each node has its own.
    """
    names = [name for store in import_stores() for name in store.address_variables]
    return {name: os.environ[name] for name in names if os.environ.get(name)}
