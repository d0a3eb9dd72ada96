"""The rendered YAML of a recipe: a file of its own, or its sections set into an existing config.

The text depends on the recipe and the streams alone: no time and no host, so that rendering twice gives the same bytes
and a difference under version control is a difference of the mix."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import islice

from mdsmix.errors import MixRefused, RecipeError
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

BATCHES = 2
BATCH_SIZE = 2
SECONDS = 300


def validate(text: str, labels: Sequence[str]) -> str:
    """One line on the batches that LLM-Foundry draws from the loaders of these labels; MixRefused where it draws none."""
    if find_spec("llmfoundry") is None:
        raise RecipeError(
            "--validate builds LLM-Foundry's own loader, and llmfoundry is not installed beside this mdsmix: install "
            "mdsmix into Foundry's environment and run it there, or leave --validate out."
        )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mdsmix.mix.render", *labels],
            input=text,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise MixRefused(
            f"LLM-Foundry's loader gave no batch in {SECONDS} s: a shard or a store does not answer; run `mdsmix check`."
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MixRefused(f"LLM-Foundry's loader fails on the rendered YAML: {reason}")
    return done.stdout.strip().splitlines()[-1]


def _draw(text: str, labels: Sequence[str]) -> str:
    from mdsmix.encode.published_folders import at_hand
    from mdsmix.training.training_yaml import parse

    # By name: LLM-Foundry is no dependency of mdsmix, and only this subprocess may import it.
    build_dataloader = import_module("llmfoundry.data.dataloader").build_dataloader
    build_tokenizer = import_module("llmfoundry.utils.builders").build_tokenizer
    yaml = parse(text, "the rendered YAML")
    spec = yaml.tokenizer
    assert spec is not None, "a rendered YAML names its tokenizer"
    kwargs = yaml.at("tokenizer", "kwargs") or {}
    tokenizer = build_tokenizer(at_hand(spec, yaml.places).name, kwargs)
    told = []
    for loader_section in (s for s in (yaml.train, *yaml.evals) if s.label in labels):
        label = loader_section.label
        section = {k: v for k, v in loader_section.section.items() if k != "label"}
        loader = build_dataloader(section, tokenizer, BATCH_SIZE).dataloader
        shapes = [tuple(batch["input_ids"].shape) for batch in islice(loader, BATCHES)]
        if not shapes:
            raise ValueError(f"{label} gives no batch; look for a lost shard or too few samples")
        told.append(f"{label} {', '.join(map(str, shapes))}")
    return f"LLM-Foundry's loaders give batches of input_ids: {'; '.join(told)}"


if __name__ == "__main__":
    print(_draw(sys.stdin.read(), sys.argv[1:]))


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
