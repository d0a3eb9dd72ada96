"""Text or mapping -> a training YAML, its variables filled in by OmegaConf as LLM-Foundry does.

Sections that are judged must resolve. Others need not: a model that wants an environment variable of the training node for one of
its keys hinders nobody from looking at the data and at its other keys.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.recipe import read as recipe_file
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
    with _readable(origin):
        config = _parsed(tree, origin)
        filled = {str(key): v for key in config for v in _filled(config, key, judged)}
    return TrainingYaml(origin=origin, config=filled)


def unresolved(text: str, origin: str) -> dict[str, Any]:
    """A config's text as keys and values, every `${...}` as it stands."""
    from omegaconf import OmegaConf

    with _readable(origin):
        found: Any = OmegaConf.to_container(_parsed(text, origin))
        return dict(found)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a YAML; RecipeError where there is none."""
    try:
        return recipe_file.read_text(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RecipeError(f"{path} cannot be read as YAML: {reason}.") from None


def _parsed(tree: Any, origin: str) -> Any:
    from omegaconf import DictConfig

    config = _of_text(tree) if isinstance(tree, str) else _created(tree)
    if not isinstance(config, DictConfig):
        raise RecipeError(f"{origin} is no training YAML: its top level must be keys and values.")
    return config


def _created(tree: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(tree)


_of_text = lru_cache(maxsize=1)(_created)
"""The same text is read two or three times in turn: to tell what it is, and for what it says. That takes 10 ms, more where it
names many streams; nobody changes what is read."""


@contextmanager
def _readable(origin: str) -> Iterator[None]:
    import yaml
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise RecipeError(f"{origin} is not a readable training YAML: {reason}.") from None


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
