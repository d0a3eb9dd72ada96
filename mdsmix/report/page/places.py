"""Where the streams lie that a recipe, a training YAML or a list of folders names, whether or not anything is published there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mdsmix.kinds import open_recipe
from mdsmix.mix.sections import is_train
from mdsmix.mix.view import is_recipe, place_of
from mdsmix.recipe import Recipe
from mdsmix.recipe.read import parted
from mdsmix.shards.index import BASENAME
from mdsmix.training.read import parse, read_text

TRAINED = "train_loader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A stream by its name, and what reads it."""

    name: str
    url: str
    loader: str = TRAINED
    is_made: bool = False
    "By the recipe that was named."


def places_of(targets: Sequence[str]) -> list[Place]:
    """Each stream that is asked about; RecipeError where the recipe or the YAML is wrong."""
    named, overrides = parted(targets)
    if len(named) == 1 and os.path.isfile(named[0]) and os.path.basename(named[0]) != BASENAME:
        if is_recipe(named[0]):
            return list(_of_recipe(open_recipe(named[0], overrides)))
        return list(_of_yaml(named[0]))
    return [Place(name=url, url=url) for url in named]


def _of_recipe(recipe: Recipe) -> Iterator[Place]:
    for spec in recipe.streams.values():
        loader = TRAINED if is_train(spec) else f"eval_loader {spec.name}"
        url, is_made = place_of(recipe, spec), spec.source is not None
        yield Place(name=spec.name, url=url, loader=loader, is_made=is_made)


def _of_yaml(path: str) -> Iterator[Place]:
    yaml = parse(read_text(path), path)
    for section in (yaml.train, *yaml.evals):
        for stream in section.stream_sections:
            below = "/".join(filter(None, (stream.place, stream.settings.get("split"))))
            yield Place(name=stream.name, url=below, loader=section.label)
