"""Text or mapping -> a training YAML, its variables filled in by OmegaConf as LLM-Foundry does.

Sections that are judged must resolve. Others need not: a model that wants an environment variable of the training node for one of
its keys hinders nobody from looking at the data and at its other keys.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

from mdsmix.recipe.read import config_of, read_text, readable
from mdsmix.training.sections import TrainingYaml

JUDGED = ("max_seq_len", "tokenizer", "train_loader", "eval_loader")
Config = str | os.PathLike[str] | Mapping[str, Any]


def read_yaml(config: Config, judged: Collection[str] = JUDGED) -> TrainingYaml:
    """A training YAML by its path, or a mapping of the same keys; relative paths in it are the current folder's."""
    if isinstance(config, Mapping):
        return parse(dict(config), "the config", judged)
    return parse(read_text(config), str(config), judged)


def parse(tree: Any, origin: str, judged: Collection[str] = JUDGED) -> TrainingYaml:
    """A training YAML from its text or tree; RecipeError where it cannot be read, or a judged section does not resolve."""
    with readable(origin, "training YAML"):
        config = _of_text(tree) if isinstance(tree, str) else config_of(tree)
        filled = {str(key): v for key in config for v in _filled(config, key, judged)}
    return TrainingYaml(origin=origin, config=filled)


def unresolved(text: str, origin: str) -> dict[str, Any]:
    """A config's text as keys and values, every `${...}` as it stands."""
    from omegaconf import OmegaConf

    with readable(origin, "training YAML"):
        found: Any = OmegaConf.to_container(_of_text(text))
        return dict(found)


_of_text = lru_cache(maxsize=1)(config_of)
"""The same text is read two or three times in turn: to tell what it is, and for what it says. That takes 10 ms, more where it
names many streams; nobody changes what is read."""


def _filled(config: Any, key: Any, judged: Collection[str]) -> Iterator[Any]:
    """The section's value; what of it cannot be filled in is left out where nobody judges it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    is_judged = key in judged
    try:
        section = config[key]
        if OmegaConf.is_dict(section) and not is_judged:
            section = {str(name): v for name in section for v in _filled(section, name, ())}
        elif OmegaConf.is_config(section):
            section = OmegaConf.to_container(section, resolve=True, throw_on_missing=is_judged)
        yield section
    except OmegaConfBaseException:
        if is_judged:
            raise
