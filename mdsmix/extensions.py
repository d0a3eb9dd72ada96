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
    """The entry point of this name; the first one where several packages register it, None without
    one.
    """
    return next(iter(entry_points(group=group, name=name)), None)


@cache
def load_extension(group: str, name: str) -> Any:
    """The object that a package registers under this name; None without such a package. RecipeError
    where its import fails.
    """
    found = find_entry_point(group, name)
    if found is None:
        return None
    try:
        return found.load()
    except Exception as error:
        raise RecipeError(
            f"{name} of {describe_package(group, name)} cannot be imported ({type(error).__name__}: {error}): mend that package, or uninstall it."
        ) from None


def describe_package(group: str, name: str) -> str:
    """Name and version of the package that registers this name: `shapes-of-mine 1.2`; empty without
    such a package.
    """
    found = find_entry_point(group, name)
    return f"{found.dist.name} {found.dist.version}" if found and found.dist else ""
