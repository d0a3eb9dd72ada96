"""Writing the file that a user named: as a shell redirection treats it, and yet never half of one.

A stream's files are nobody's to link or to chmod, so storage replaces them by a rename and makes their folders. A config
is its owner's: a symlink is followed, the mode is kept, a FIFO or a device is written into, and a folder that does not
exist is a slip of the pen.
"""

from __future__ import annotations

import os
from pathlib import Path

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.storage import locate


def require_place(target: str) -> None:
    """RecipeError where the target cannot be a file, before any work is done for it."""
    place = locate(target)
    path = os.path.realpath(place.url)
    is_lost = not os.path.exists(place.url) and not os.path.isdir(os.path.dirname(path))
    if not place.is_store and (is_lost or os.path.isdir(path)):
        raise RecipeError(
            f"{target} cannot be written: it is a folder, or there is no folder {os.path.dirname(path)}; correct the path."
        )


def write(target: str, text: str) -> None:
    """The text into the target: one PUT, straight into a FIFO or device, else by a rename behind the symlinks."""
    require_place(target)
    place, content = locate(target), text.encode()
    if place.is_store:
        place.write(content)
        return
    path = os.path.realpath(place.url)
    try:
        if is_device(path):
            Path(path).write_bytes(content)
            return
        mode = os.stat(path).st_mode if os.path.exists(path) else None
        locate(path).write(content)
        if mode is not None:
            os.chmod(path, mode)
    except BrokenPipeError:
        raise  # who reads the FIFO has gone: the end that main gives every pipe
    except OSError as error:
        raise Unreachable(f"cannot write {target}: {error.strerror or error}.") from None


def is_device(path: str) -> bool:
    """Whether it is written into, and no file that lies there."""
    return os.path.exists(path) and not os.path.isfile(path)
