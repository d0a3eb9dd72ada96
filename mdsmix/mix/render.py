"""The rendered YAML of a recipe: a file of its own, or its sections set into an existing config.

The text depends on the recipe and the streams alone: no time and no host, so that rendering twice gives the same bytes
and a difference under version control is a difference of the mix.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdsmix.kinds import open_recipe
from mdsmix.mix.head import dump, head
from mdsmix.mix.into import set_into
from mdsmix.mix.sections import sections
from mdsmix.mix.streams import Mix
from mdsmix.mix.view import mix_of, view_recipe
from mdsmix.training.read import read_text, unresolved


def render(path: str, overrides: Sequence[str], into: str | None) -> tuple[Mix, str]:
    """The mix of a recipe and its YAML, a file of its own or set into the config `into`. Nothing is checked or written."""
    recipe = open_recipe(path, overrides)
    mix = view_recipe(recipe, path)
    streams = {stream.name: stream.settings for stream in mix.streams}
    if into is None:
        return mix, head(mix) + dump(sections(recipe, streams))
    before = read_text(into)
    text = set_into(before, sections(recipe, streams, unresolved(before, into)), into)
    mix = mix_of(text, path, {stream.name: stream for stream in mix.streams}, recipe)
    return mix, head(mix) + text
