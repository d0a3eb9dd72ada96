"""Shapes, formats and codecs that other packages register as entry points:
`[project.entry-points."mdsmix.shapes"]` of their pyproject.toml.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mdsmix.errors import RecipeError


@cache
def find_entry_point(group: str, name: str) -> EntryPoint | None:
    """Return the entry point of this name, the first one if several packages register it; None if
    there is none.
    """
    return next(iter(entry_points(group=group, name=name)), None)


@cache
def load_extension(group: str, name: str) -> Any:
    """Return the object that a package registers under this name; None without such a package.

    Raises RecipeError if its import fails.
    """
    entry_point = find_entry_point(group, name)
    if entry_point is None:
        return None
    try:
        return entry_point.load()
    except Exception as error:
        raise RecipeError(
            f"{name} of {describe_package(group, name)} cannot be imported "
            f"({type(error).__name__}: {error}): fix that package, or uninstall it."
        ) from None


def describe_package(group: str, name: str) -> str:
    """Return name and version of the package that registers this name: `shapes-of-mine 1.2`; blank
    without such a package.
    """
    entry_point = find_entry_point(group, name)
    if entry_point is None or entry_point.dist is None:
        return ""
    return f"{entry_point.dist.name} {entry_point.dist.version}"
