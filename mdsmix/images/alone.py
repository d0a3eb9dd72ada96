"""One image at a time on this machine: what takes hundreds of MB to decode is decoded by one worker while the others wait.

The lock is that of a file, so it ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone() -> Iterator[None]:
    """Inside of it no other process of this user holds a large image."""
    path = Path(tempfile.gettempdir()) / f"mdsmix-large-image-{os.getuid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
