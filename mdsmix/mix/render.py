"""The rendered YAML of a recipe: a file of its own, or its sections set into an existing config.

The text depends on the recipe and the streams alone: no time and no host, so that rendering twice gives the same bytes
and a difference under version control is a difference of the mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mdsmix.kinds import open_recipe
from mdsmix.mix.head import dump, head
from mdsmix.mix.into import set_into
from mdsmix.mix.sections import sections
from mdsmix.mix.streams import Mix
from mdsmix.mix.view import mix_of, view_recipe
from mdsmix.recipe import Recipe
from mdsmix.training.read import read_text, unresolved


def render(path: str, overrides: Sequence[str], into: str | None) -> tuple[Mix, str]:
    """The mix of a recipe and its YAML, a file of its own or set into the config `into`. Nothing is checked or written."""
    recipe = open_recipe(path, overrides)
    mix = view_recipe(recipe, path)
    if into is None:
        return mix, document(recipe, mix)
    before = read_text(into)
    text = set_into(before, tree_of(recipe, mix, unresolved(before, into)), into)
    known = {stream.name: stream for stream in mix.streams}
    mix = mix_of(text, path, known, recipe)
    return mix, head(mix) + text


def tree_of(recipe: Recipe, mix: Mix, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The sections that the recipe sets, in `config` if any, with `${max_seq_len}` not yet filled in."""
    return sections(recipe, {stream.name: stream.settings for stream in mix.streams}, config)


def document(recipe: Recipe, mix: Mix) -> str:
    """A whole file that resolves by itself: max_seq_len, tokenizer, train_loader, eval_loader."""
    return head(mix) + dump(tree_of(recipe, mix))
