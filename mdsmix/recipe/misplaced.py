"""A key that stands in another section of a recipe than its own: the refusal names the place where it belongs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from mdsmix.recipe.spec import ImagesSpec, Recipe, SourceSpec, StreamSpec, TokenizerSpec, WeightSpec
from mdsmix.typed import UnknownKey

SECTIONS: dict[str, Any] = {
    "": Recipe,
    "streams.{}.": StreamSpec,
    "streams.{}.source.": SourceSpec,
    "streams.{}.images.": ImagesSpec,
    "mix.{}.": WeightSpec,
    "tokenizer.": TokenizerSpec,
}
"Where a section stands, a stream's with its name, and what it holds. A key that several have is told of the first."


def placed(unknown: UnknownKey, streams: Collection[str]) -> str:
    """The sentence on a key that its section does not know, with the section that does. `streams`: all names."""
    top, _, rest = unknown.where.partition(".")
    name, _, section = rest.partition(".") if top in ("streams", "mix") else ("", "", "")
    homes = (at for at, of in SECTIONS.items() if unknown.key in _keys(of))
    home = None if unknown.is_synonym or "." in section else next(homes, None)
    if home is None:
        return str(unknown)
    only = next(iter(streams)) if len(streams) == 1 else "NAME"
    at = f"{unknown.where}.{unknown.key}".lstrip(".")
    to = f"{home.format(name or only)}{unknown.key}"
    where = to if home else f"it at the top: {to} is of the whole recipe"
    many = ", under each stream that it is for" if "NAME" in to else ""
    return f"{at} is not a known key; write {where}{many}."


def _keys(section: Any) -> list[str]:
    return [f.name for f in fields(section) if "set by" not in f.metadata]
