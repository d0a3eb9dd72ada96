"""Links inside of a published stream: writing through one would write outside of the folder that a recipe names.

The folder itself, and whatever is above it, is the user's own and may be a link to another disk.
"""

from __future__ import annotations

import os

from mdsmix.errors import RecipeError
from mdsmix.storage import Location

INNER = (".mdsmix", "quarantine")
"The folders beneath a split's own."


def refuse_links(root: Location, *names: str) -> None:
    """RecipeError where `root`/name/... or a folder beneath the last of them is a link."""
    folder = root
    for name in names:
        folder = folder / name
        _refuse_link(folder)
    for name in INNER:
        _refuse_link(folder / name)


def _refuse_link(folder: Location) -> None:
    if not folder.is_store and os.path.islink(folder.url):
        raise RecipeError(
            f"{folder} is a link to {os.path.realpath(folder.url)}, outside of the folder that the stream is published "
            "in, where nothing is to be written: take the link away, or publish to that place by its own name."
        )
