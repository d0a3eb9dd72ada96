"""Keys that stand in another section of a recipe than their own: the refusal names the place where each belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from mdsmix import typed
from mdsmix.recipe.spec import ImagesSpec, Recipe, SourceSpec, StreamSpec, TokenizerSpec, WeightSpec

SECTIONS: Mapping[str, Any] = {
    "": Recipe,
    "streams.{}.": StreamSpec,
    "streams.{}.source.": SourceSpec,
    "streams.{}.images.": ImagesSpec,
    "mix.{}.": WeightSpec,
    "tokenizer.": TokenizerSpec,
}
"Where a section stands, a stream's with its name, and what it holds. A key that several have is told of the first."


def refuse_misplaced(tree: Mapping[str, Any]) -> None:
    """Misfit for a key that its section does not know and another one does; what none knows is told with its nearest."""
    for section, stream, values in _sections(tree):
        for key in values:
            found = None if _takes(section, key) else _home(key)
            if found is not None:
                at, to = (f"{place.format(stream or 'NAME')}{key}" for place in (section, found))
                where = to if found else f"it at the top: {key} is of the whole recipe"
                many = ", under each stream that it is for" if "NAME" in to else ""
                raise typed.Misfit(f"{at} is not a known key; write {where}{many}.")


def _sections(tree: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Each section that holds keys: its place, its stream's name, and what stands there."""
    streams, mix = _keys(tree.get("streams")), _keys(tree.get("mix"))
    only = str(*streams) if len(streams) == 1 else ""
    found = [("", only, tree), ("tokenizer.", only, tree.get("tokenizer"))]
    for name, section in streams.items():
        inner = _keys(section)
        found.append(("streams.{}.", str(name), section))
        found += [(f"streams.{{}}.{key}.", str(name), inner.get(key)) for key in ("source", "images")]  # fmt: skip
    found += [("mix.{}.", str(name), weight) for name, weight in mix.items()]
    yield from ((place, name, _keys(values)) for place, name, values in found)


def _keys(section: Any) -> Mapping[Any, Any]:
    """The section, or none where something else stands there, which is refused as what it is."""
    return section if isinstance(section, Mapping) else {}


@cache
def _known(section: str) -> tuple[frozenset[str], frozenset[str]]:
    """The keys that a section takes, and the other words for them."""
    own = fields(SECTIONS[section])
    taken = frozenset(f.name for f in own if "set by" not in f.metadata)
    return taken, frozenset(word for f in own for word in f.metadata.get("also called", ()))


def _takes(section: str, key: Any) -> bool:
    return any(key in words for words in _known(section))


def _home(key: Any) -> str | None:
    return next((section for section in SECTIONS if key in _known(section)[0]), None)
