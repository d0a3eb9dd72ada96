"""The streams that a command line names, whether or not they are published."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mdsmix.errors import RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.mix.foundry_config import is_train
from mdsmix.mix.resolve import is_recipe, place_of
from mdsmix.recipe.read import parted, read_text
from mdsmix.shards.index import INDEX
from mdsmix.training.training_yaml import parse

TRAINED = "train_loader"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStream:
    """A stream: its name, its place, and the loader that reads it."""

    name: str
    url: str
    loader: str = TRAINED
    is_made: bool = False
    "Whether the recipe on the command line has a source for the stream."


def named_streams(words: Sequence[str]) -> list[NamedStream]:
    """Each stream that `words` name: a recipe with overrides, a training YAML, or streams. RecipeError where one of these is wrong."""
    named, overrides = parted(words)
    files = [each for each in named if os.path.isfile(each) and os.path.basename(each) != INDEX]
    if not files and not overrides:
        return [NamedStream(name=url, url=url) for url in named]
    if len(files) != 1 or len(named) != 1:
        raise RecipeError(
            f"`{' '.join(words)}` names neither one recipe (with key=value overrides) nor streams alone: name one recipe, "
            "or folders and s3:// URLs of streams."
        )
    is_of_recipe = overrides or is_recipe(files[0])
    return list(_of_recipe(files[0], overrides) if is_of_recipe else _of_yaml(files[0]))


def _of_recipe(path: str, overrides: Sequence[str]) -> Iterator[NamedStream]:
    recipe = open_recipe(path, overrides)
    for spec in recipe.streams.values():
        loader = TRAINED if is_train(spec) else f"eval_loader {spec.name}"
        url, is_made = place_of(recipe, spec), spec.source is not None
        yield NamedStream(name=spec.name, url=url, loader=loader, is_made=is_made)


def _of_yaml(path: str) -> Iterator[NamedStream]:
    yaml = parse(read_text(path), path)
    for section in (yaml.train, *yaml.evals):
        for stream in section.stream_sections:
            below = "/".join(filter(None, (stream.place, stream.settings.get("split"))))
            yield NamedStream(name=stream.name, url=below, loader=section.label)
