"""The JSON Schema next to a recipe that `mdsmix init` writes, and the comment with which editors
find it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mdsmix.errors import Unreachable
from mdsmix.kinds.recipe_schema import SCHEMA_FILE, is_written_by_mdsmix, write_schema
from mdsmix.storage import locate

SCHEMA_COMMENT = f"# yaml-language-server: $schema=./{SCHEMA_FILE}\n"
"The first line of the recipe. Editors read the path from the recipe's folder."


class SchemaNotice(NamedTuple):
    """A message for the user on the schema file."""

    message: str
    is_written: bool
    "Whether the file was written; otherwise another file of its name stays."


def write_schema_file(folder: Path) -> SchemaNotice | None:
    """Write the schema file into the folder of a recipe. Return a message for the user, or None if
    the file was there already and equal.

    A file that differs is replaced if an earlier mdsmix wrote it and nobody changed it. Any other
    file stays.

    Raises Unreachable if the file cannot be read or written.
    """
    path = folder / SCHEMA_FILE
    text = write_schema()
    try:
        earlier = path.read_text("utf-8") if path.exists() else None
    except UnicodeDecodeError:
        earlier = ""  # no text, so mdsmix did not write it
    except OSError as error:
        raise Unreachable(f"cannot read {path}: {error.strerror or error}.") from None
    if earlier == text:
        return None
    if earlier is not None and not is_written_by_mdsmix(earlier):
        message = (
            f"WARNING: {path} stays as it is, since mdsmix did not write it, or it was changed "
            "later: editors check the recipe with it; to replace it, run `mdsmix schema -o "
            f"{path}`"
        )
        return SchemaNotice(message, is_written=False)
    locate(str(path)).write(text.encode())
    message = f"wrote {path}, so that editors check and complete the recipe"
    return SchemaNotice(message, is_written=True)
