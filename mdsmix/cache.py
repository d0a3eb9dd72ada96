"""The cache of this machine: a folder of files that can be deleted at any time.

It contains descriptions of tokenizers and processors, the contents of sources that were read, and
other results that are slow to work out again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import xxhash

from mdsmix.errors import Unreachable


def cache_folder() -> Path:
    """Return the cache's folder.

    It is the value of the environment variable MDSMIX_CACHE. If that is not set, it is the folder
    `mdsmix` in XDG_CACHE_HOME, or in ~/.cache.
    """
    chosen = os.environ.get("MDSMIX_CACHE")
    if chosen:
        return Path(chosen)
    user_cache = os.environ.get("XDG_CACHE_HOME")
    parent = Path(user_cache) if user_cache else Path.home() / ".cache"
    return parent / "mdsmix"


def locate_known_sources(target: str) -> Path:
    """Return the file in the cache with the hashes of the sources of a stream. It exists once a run
    on this machine has converted a part of the stream.

    Args:
        target: the URL or folder where the stream is published.
    """
    return cache_folder() / "seen" / f"{xxhash.xxh128_hexdigest(target)}.jsonl"


def is_in_cache(path: Path) -> bool:
    """Check whether a file of the cache exists.

    Raises Unreachable if the cache cannot be read, such as one in another user's home folder.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise refuse_cache("read", path, error) from None
    return True


def keep_in_cache(path: Path, content: bytes) -> None:
    """Write a file of the cache. It is written under a temporary name and then renamed, so no
    reader sees half of the file.

    Args:
        path: the file, in `cache_folder()`.
        content: its new content.

    Raises Unreachable if the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise refuse_cache("write", path, error) from None


def refuse_cache(verb: str, path: Path, error: OSError) -> Unreachable:
    """Return the error on a file of the cache that cannot be read or written.

    Args:
        verb: `read` or `write`.
        path: the file.
        error: the error of the file system.
    """
    fix = "set the environment variable MDSMIX_CACHE to a folder that mdsmix can write to."
    if os.path.isdir(path):  # Path.is_dir raises OSError, for example for a name that is too long
        fix = f"delete the folder of that name, or {fix}"
    return Unreachable(f"cannot {verb} the file {path} of mdsmix's cache ({error.strerror}): {fix}")
