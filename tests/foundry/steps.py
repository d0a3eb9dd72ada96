"""The steps of a user: convert a recipe, render it into a config of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.converting import Answer, mdsmix, write_recipe

TINY = Path(__file__).with_name("tiny.yaml")


def does(*arguments: object) -> Answer:
    """A command of mdsmix that succeeds."""
    done = mdsmix(*arguments)
    assert done.code == 0, done.err
    return done


def converted(folder: Path, tokenizer: Path, **settings: Any) -> Path:
    """The recipe, in a folder of its own, whose streams are published in `out` there unless `settings` say otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = write_recipe(folder, tokenizer, **settings)
    does("convert", recipe)
    return recipe


def rendered(recipe: Path) -> Path:
    """train.yaml beside the recipe: the tiny model on its mix."""
    config = recipe.with_name("train.yaml")
    does("render-yaml", recipe, "--into", TINY, "-o", config)
    return config
