"""The streams that a command line names, whether or not they are published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mdsmix.foundry_yaml.training_yaml import parse_training_yaml
from mdsmix.kinds import open_recipe
from mdsmix.mix.render.foundry_config import is_train_stream
from mdsmix.mix.streams.resolve import find_named_yaml, is_recipe_file, list_stream_urls
from mdsmix.recipe.read import read_text
from mdsmix.shards.published import find_current
from mdsmix.storage import locate

TRAINED = "train_loader"


@dataclass(frozen=True, kw_only=True)
class NamedStream:
    """A stream: its name, its place, and the loader that reads it."""

    name: str
    url: str
    loader: str = TRAINED
    is_made: bool = False
    "Whether the recipe on the command line has a source for the stream."


def named_streams(words: Sequence[str]) -> list[NamedStream]:
    """Each stream that `words` name: a recipe with overrides, a training YAML, or streams.
    RecipeError where one of these is wrong.
    """
    if (found := find_named_yaml(words)) is None:
        return [NamedStream(name=url, url=url) for url in list_stream_urls(words)]
    is_of_recipe = found.overrides or is_recipe_file(found.path)
    return list(_of_recipe(*found) if is_of_recipe else _of_yaml(found.path))


def _of_recipe(path: str, overrides: Sequence[str]) -> Iterator[NamedStream]:
    recipe = open_recipe(path, overrides)
    for spec in recipe.streams.values():
        url, is_made = recipe.published(spec), spec.source is not None
        if is_made or find_current(locate(url) / spec.split):  # else it lies flat, without a split
            url = f"{url}/{spec.split}"
        yield NamedStream(
            name=spec.name,
            url=url,
            loader=TRAINED if is_train_stream(spec) else f"eval_loader {spec.name}",
            is_made=is_made,
        )


def _of_yaml(path: str) -> Iterator[NamedStream]:
    yaml = parse_training_yaml(read_text(path), path)
    for section in (yaml.train, *yaml.evals):
        for stream in section.stream_sections:
            below = "/".join(filter(None, (stream.url, stream.settings.get("split"))))
            yield NamedStream(name=stream.name, url=below, loader=section.label)
