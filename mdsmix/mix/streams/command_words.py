"""The words of a command that name a mix: a recipe with overrides, a training YAML, or streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.training_yaml import TRAIN, is_recipe_tree, read_unresolved
from mdsmix.kinds import is_data, open_recipe
from mdsmix.recipe import Recipe
from mdsmix.recipe.read import read_text, split_overrides
from mdsmix.shards.index import INDEX
from mdsmix.shards.published import find_current, find_splits
from mdsmix.storage import Location, locate

MixInput = str | os.PathLike[str] | Sequence[str] | Mapping[Any, Any] | Recipe
"""A mix as a user gives it: a recipe or a training config, as a path or as keys and values, or
published streams.
"""


class NamedYaml(NamedTuple):
    """A recipe or training YAML, as the words of a command name it."""

    path: str
    overrides: list[str]
    'Changes of the recipe, such as "max_seq_len=4096".'


def list_words(mix: MixInput) -> list[str]:
    """Return the words with which a command would name the mix; none if it is not a path."""
    if isinstance(mix, (str, os.PathLike)):
        return [os.fspath(mix)]
    return [] if isinstance(mix, (Mapping, Recipe)) else list(map(os.fspath, mix))


def find_named_yaml(words: Sequence[str]) -> NamedYaml | None:
    """Return the recipe or training YAML that the words of a command name; None if they name
    streams.

    Raises RecipeError if they name a YAML and streams, or several YAMLs.
    """
    targets, overrides = split_overrides(words)
    if len(targets) == 1 and _is_yaml(targets[0]):
        return NamedYaml(targets[0], overrides)
    if overrides or any(map(_is_yaml, targets)):
        raise RecipeError(
            f"`{' '.join(words)}` is neither one recipe (with key=value overrides) nor a list of "
            "streams: name one recipe, or folders and URLs of streams."
        )
    return None


def find_named_recipe(words: Sequence[str]) -> Recipe | None:
    """Return the recipe that the words of a command name, with its overrides; None if they name
    streams or a training YAML.
    """
    named = find_named_yaml(words)
    return _open_if_recipe(named) if named else None


def _open_if_recipe(named: NamedYaml) -> Recipe | None:
    """Open a recipe with its overrides. Return None for a training YAML."""
    if not (named.overrides or is_recipe_file(named.path)):
        return None
    return open_recipe(named.path, named.overrides)


def find_several_phases(words: Sequence[str]) -> NamedYaml | None:
    """Return the recipe that the words of a command name, if it has phases and chooses none of
    them; otherwise None.
    """
    named = find_named_yaml(words)
    if named is None or not _may_have_phases(named):
        return None
    recipe = _open_if_recipe(named)
    if recipe is None or not recipe.phases or recipe.phase is not None:
        return None
    return named


def _may_have_phases(named: NamedYaml) -> bool:
    """Return whether a file or an override of it has the key `phases`. If not, the recipe need not
    be opened to see that it has no phases; the command opens it later, and reports its faults.
    """
    if any("phases" in override for override in named.overrides):
        return True
    try:
        return "phases" in read_unresolved(read_text(named.path), named.path)
    except RecipeError:
        return False


def _is_yaml(name: str) -> bool:
    """Check whether a word of a command names a YAML: a file, though not an index.json, or a name
    that ends like a YAML.
    """
    is_file = os.path.isfile(name) and os.path.basename(name) != INDEX
    return is_file or name.endswith((".yaml", ".yml"))


def is_recipe_file(path: str) -> bool:
    """Check whether a file is to be opened as a recipe, and not as a training YAML.

    Also returns True for a file of data (such as JSONL), since `open_recipe` refuses data with a
    message of its own. Returns False for any other file that cannot be parsed, since the reader of
    training YAMLs reports the line of the error.
    """
    try:
        tree = read_unresolved(read_text(path), path)
    except RecipeError:
        return is_data(path)
    return is_recipe_tree(tree) or (TRAIN not in tree and is_data(path))


def list_stream_urls(urls: Iterable[str]) -> list[str]:
    """Return the URLs of single streams. A local folder that contains the streams of a whole mix is
    replaced by the `train` splits of these streams.
    """
    return _replace_mixes(urls, _list_train_splits)


def list_all_splits(urls: Iterable[str]) -> list[str]:
    """Return the URLs of single streams. A local folder that contains the streams of a whole mix is
    replaced by all streams in it: every split, such as `out/web/train` and `out/web/eval`, and
    streams without a split.
    """
    return _replace_mixes(urls, _list_streams_of_mix)


def _replace_mixes(
    urls: Iterable[str], list_streams: Callable[[str, Location], list[str]]
) -> list[str]:
    """Return the URLs of single streams: a local folder is replaced by the streams that are found
    in it. A folder without any is a stream itself.

    Args:
        urls: folders and URLs of streams or of mixes.
        list_streams: returns the URLs of the streams in a local folder, from its URL and location.
    """
    streams = list[str]()
    for url in urls:
        folder = locate(url)
        inner_streams = [] if folder.is_store else list_streams(url, folder)
        streams += inner_streams or [url]
    return streams


def _list_streams_of_mix(url: str, folder: Location) -> list[str]:
    """Return the URLs of all published streams in a local folder that has a stream with a split in
    it. Empty for other folders.
    """
    streams = list[str]()
    has_splits = False
    for name in folder.folders():
        if find_current(folder / name):
            streams.append(f"{url}/{name}")
            continue
        splits = [f"{url}/{name}/{split}" for split in find_splits(folder / name)]
        has_splits |= bool(splits)
        streams += splits
    return streams if has_splits else []


def _list_train_splits(url: str, folder: Location) -> list[str]:
    """Return the URLs of the published `train` splits of the streams in a local folder, such as
    `out/web/train` for `out`.
    """
    splits = list[str]()
    for name in folder.folders():
        if find_current(folder / name / "train"):
            splits.append(f"{url}/{name}/train")
    return splits
