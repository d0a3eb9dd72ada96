"""The cache of this machine: a folder of files that can be deleted at any time.

It contains descriptions of tokenizers and processors, the contents of sources that were read, and
other results that are slow to work out again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mdsmix.errors import Unreachable


def cache_folder() -> Path:
    """Return the cache's folder: MDSMIX_CACHE if it is set, otherwise `mdsmix` in XDG_CACHE_HOME or
    in ~/.cache.
    """
    chosen = os.environ.get("MDSMIX_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdsmix"


def keep_in_cache(path: Path, content: bytes) -> None:
    """Write a file of the cache. It is renamed into place, so a reader never sees half of it.

    Raises Unreachable if it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise Unreachable(
            f"cannot write {path} ({error.strerror}), a file of mdsmix's cache: "
            "set MDSMIX_CACHE to a folder that can be written."
        ) from None
