"""Shapes, formats and codecs of other packages, by entry points: `[project.entry-points."mdsmix.shapes"]` of their pyproject.toml."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mdsmix.errors import RecipeError


@cache
def entry(group: str, name: str) -> EntryPoint | None:
    """The entry point of this name, of the package that is first where several have one."""
    return next(iter(entry_points(group=group, name=name)), None)


@cache
def extension(group: str, name: str) -> Any:
    """What a package registers under this name; None where none does. RecipeError where it cannot be imported."""
    found = entry(group, name)
    if found is None:
        return None
    try:
        return found.load()
    except Exception as error:
        raise RecipeError(
            f"{name} of {version_of(group, name)} cannot be imported ({type(error).__name__}: {error}): mend that package, or uninstall it."
        ) from None


def version_of(group: str, name: str) -> str:
    """Name and version of the package that registers it: `shapes-of-mine 1.2`; nothing where none does."""
    found = entry(group, name)
    return f"{found.dist.name} {found.dist.version}" if found and found.dist else ""
