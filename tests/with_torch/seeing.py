"""Recipes of images and their processors, as they are written and rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mdsmix.mix.render.render import render_recipe
from tests.converting import write_jsonl, write_recipe
from tests.pictures import stream

LENGTH = 160
Folders = dict[str, tuple[Path, Path]]
"Family -> folders of tokenizer and processor."


def written(folder: Path, of: tuple[Path, Path], records: list[Any], **settings: Any) -> Path:
    loader = {"num_workers": 0, "dataset": {"shuffle": False, **settings.pop("dataset", {})}}
    streams = {"see": stream(write_jsonl(folder / "a.jsonl", records), **settings.pop("see", {}))}
    given = {"max_seq_len": LENGTH, "processor": str(of[1]), "train_loader": loader}
    return write_recipe(folder, of[0], **({"streams": streams} | given | settings))


def rendered(recipe: Path) -> str:
    path = recipe.with_name("train.yaml")
    path.write_text(render_recipe(recipe, [], None)[0].text)
    return str(path)


def unnamed(recipe: Path) -> str:
    """The rendered YAML without the processor's name."""
    tree = yaml.safe_load(Path(rendered(recipe)).read_text())
    del tree["train_loader"]["dataset"]["processor"]
    path = recipe.with_name("unnamed.yaml")
    path.write_text(yaml.safe_dump(tree))
    return str(path)
