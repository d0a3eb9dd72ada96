"""Finds the shapes, formats and codecs that other packages register as entry points, in
`[project.entry-points."mdsmix.shapes"]` of their pyproject.toml.

In each function `group` is such a group of entry points, for example `mdsmix.shapes`, and `name` is
the name of an entry point.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from mdsmix.errors import RecipeError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def find_entry_point(group: str, name: str) -> EntryPoint | None:
    """Return the entry point of this name. If several packages register the name, return the first
    entry point; if no package does, return None.
    """
    from importlib.metadata import entry_points  # 10 ms, and few commands look for an extension

    for entry_point in entry_points(group=group, name=name):
        return entry_point
    return None


@cache
def load_extension(group: str, name: str) -> Any:
    """Return the object that a package registers under this name, such as a Shape. Return None if
    no package registers the name.

    Raises RecipeError if the object cannot be imported.
    """
    entry_point = find_entry_point(group, name)
    if entry_point is None:
        return None
    try:
        return entry_point.load()
    except Exception as error:
        raise RecipeError(
            f"the extension {name} of {describe_package(group, name)} cannot be imported "
            f"({type(error).__name__}: {error}): fix or uninstall the package."
        ) from None


def describe_package(group: str, name: str) -> str:
    """Return the package that registers this name, with its version: `shapes-of-mine 1.2`. Return
    an empty string if no package registers the name.
    """
    entry_point = find_entry_point(group, name)
    if entry_point is None or entry_point.dist is None:
        return ""
    return f"{entry_point.dist.name} {entry_point.dist.version}"
