"""The streams that a recipe, a training YAML or a list of folders names, whether or not anything is published there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mdsmix.errors import RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.mix.resolve import is_recipe, place_of
from mdsmix.mix.sections import is_train
from mdsmix.recipe import Recipe
from mdsmix.recipe.read import parted
from mdsmix.shards.index import BASENAME
from mdsmix.training.training_yaml import parse, read_text

TRAINED = "train_loader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A stream by its name, and what reads it."""

    name: str
    url: str
    loader: str = TRAINED
    is_made: bool = False
    "The recipe of the command line has a source for it."


def targets_of(words: Sequence[str]) -> list[Target]:
    """Each stream that is asked about; RecipeError where the recipe, the YAML or the command line is wrong."""
    named, overrides = parted(words)
    files = [each for each in named if os.path.isfile(each) and os.path.basename(each) != BASENAME]
    if not files and not overrides:
        return [Target(name=url, url=url) for url in named]
    if len(files) != 1 or len(named) != 1:
        raise RecipeError(
            f"`{' '.join(words)}` names neither one recipe (with key=value overrides) nor streams alone: name one recipe, "
            "or folders and s3:// URLs of streams."
        )
    if overrides or is_recipe(files[0]):
        return list(_of_recipe(open_recipe(files[0], overrides)))
    return list(_of_yaml(files[0]))


def _of_recipe(recipe: Recipe) -> Iterator[Target]:
    for spec in recipe.streams.values():
        loader = TRAINED if is_train(spec) else f"eval_loader {spec.name}"
        url, is_made = place_of(recipe, spec), spec.source is not None
        yield Target(name=spec.name, url=url, loader=loader, is_made=is_made)


def _of_yaml(path: str) -> Iterator[Target]:
    yaml = parse(read_text(path), path)
    for section in (yaml.train, *yaml.evals):
        for stream in section.stream_sections:
            below = "/".join(filter(None, (stream.place, stream.settings.get("split"))))
            yield Target(name=stream.name, url=below, loader=section.label)
