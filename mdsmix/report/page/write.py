"""The page as a file: whole, or not there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mdsmix.errors import RecipeError, Unreachable


def require_writable(path: Path) -> None:
    """Told before the streams are read: RecipeError of a folder, Unreachable where no file can be written."""
    if path.is_dir():
        raise RecipeError(f"-o {path} is a folder: name the file, for example {path}/report.html.")
    if not path.parent.is_dir():
        raise Unreachable(
            f"cannot write {path}: there is no folder {path.parent}; make it, or name another file by -o."
        )
    if not os.access(path.parent, os.W_OK):
        raise Unreachable(
            f"cannot write {path}: its folder may not be written in; name another file by -o."
        )


def write_page(path: Path, text: str) -> int:
    """Writes by renaming and returns the bytes; Unreachable where that cannot be."""
    temporary, content = path.with_name(f".{path.name}.{os.getpid()}"), text.encode()
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise Unreachable(
            f"cannot write {path} ({error.strerror}): name another file by -o, or make room."
        ) from None
    return len(content)
