"""The rendered YAML of a recipe: a file of its own, or its sections set into an existing config.

The text depends on the recipe and the streams alone: no time and no host, so that rendering twice gives the same bytes
and a difference under version control is a difference of the mix.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from mdsmix.errors import RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.mix.changes import changes
from mdsmix.mix.head import dump, head
from mdsmix.mix.into import set_into
from mdsmix.mix.node_tokenizer import fetch_line
from mdsmix.mix.resolve import is_recipe, mix_of, mix_of_recipe
from mdsmix.mix.sections import is_train, sections
from mdsmix.mix.streams import Mix
from mdsmix.storage.s3_errors import AWS, shown_endpoint
from mdsmix.training.training_yaml import read_text, unresolved


def refuse_recipe(target: str, option: str) -> None:
    """RecipeError where the file that would be written into is a recipe."""
    if os.path.isfile(target) and is_recipe(target):
        raise RecipeError(
            f"{option} {target}: that file is a recipe, which the sections of a training YAML would spoil; name a config of "
            "LLM-Foundry, or a new file."
        )


def render(
    path: str,
    overrides: Sequence[str],
    into: str | None,
    keep_evals: bool = False,
    may_estimate: bool = False,
) -> tuple[Mix, str]:
    """The mix of a recipe and its YAML, a file of its own or set into the config `into`. Nothing is checked or written.

    Args:
        keep_evals: evaluations of that config which are not the recipe's stay as they are, and are not looked at.
        may_estimate: shares may be worked out from first samples where nobody counted.
    """
    recipe = open_recipe(path, overrides)
    mix = mix_of_recipe(recipe, path, may_estimate)
    streams = {stream.name: stream.settings for stream in mix.streams}
    if into is None:
        return mix, head(mix) + dump(sections(recipe, streams))
    before = read_text(into)
    config = unresolved(before, into)
    text = set_into(before, sections(recipe, streams, config), into)
    ours = [name for name in streams if not is_train(recipe.streams[name])]
    known = {stream.name: stream for stream in mix.streams}
    shares = mix.shares
    mix = mix_of(text, path, known, recipe, into, evals=ours if keep_evals else None)
    changed = changes(config, unresolved(text, into))
    mix = replace(mix, shares=shares, changed=tuple(changed))
    return mix, head(mix) + text


def before_training(mix: Mix) -> str | None:
    """The command that every training node needs first, with the endpoint of this machine; None where it needs none."""
    if mix.tokenizer_home is None:
        return None
    endpoint = shown_endpoint()
    folder = mix.yaml.at("tokenizer", "name")
    return fetch_line(mix.tokenizer_home, folder, None if endpoint == AWS else endpoint)
