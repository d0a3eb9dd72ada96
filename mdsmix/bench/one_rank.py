"""A training YAML -> the config of one loader as one rank has it, set one way or another, its caches where bench wants them.

What is measured is one rank alone, of as many as share the machine. The others are not there: they would share its network, its
disk and a cache that each of them fills.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdsmix.bench.settings import Setting
from mdsmix.errors import RecipeError
from mdsmix.mix.view import is_recipe
from mdsmix.training.keys import whole
from mdsmix.training.read import read_yaml
from mdsmix.training.sections import LoaderSection, StreamSection, TrainingYaml

OF_STREAMS = frozenset({"streams", "remote", "local", "split"})
DEFAULT_BATCH = 8
"Rows of a step where a YAML says none, as a rendered one without `--into`."


@dataclass(frozen=True, kw_only=True)
class OneRank:
    """What is read of a YAML before anything is measured."""

    yaml: TrainingYaml
    section: LoaderSection
    batch: int
    "Rows that a device takes in a step."
    is_batch_own: bool = True
    "Whether it was not asked for, but read of the YAML, or supposed."
    ratio: float | None = None
    "What `packing_ratio: auto` was found to be."

    @property
    def fetched(self) -> list[StreamSection]:
        """Streams of which a rank keeps copies: a cold cache has none of them."""
        return [
            s
            for s in self.section.stream_sections
            if s.settings.get("remote") and not s.is_only_copy
        ]

    @property
    def predownload(self) -> int | None:
        """The YAML's own."""
        return whole(self.section.dataset.get("predownload"))

    @property
    def is_batch_supposed(self) -> bool:
        """Whether nobody said how many rows a step takes."""
        return self.is_batch_own and self.section.trains and self.yaml.batch_size is None

    @property
    def packing(self) -> Any:
        return self.section.dataset.get("packing_ratio")

    @property
    def about(self) -> str:
        streams = self.section.stream_sections
        there = (
            f", {len(self.fetched)} of them with a remote"
            if self.fetched
            else ", all of them local"
        )
        return f"{self.section.label} of {self.yaml.origin}: {len(streams)} streams{there}"

    def config(self, setting: Setting, caches: Path | None) -> dict[str, Any]:
        """A config of this loader alone; `caches` is where copies go, a folder for each stream."""
        streams = {s.name: self._moved(s, caches) for s in self.section.stream_sections}
        dataset = {k: v for k, v in self.section.dataset.items() if k not in OF_STREAMS}
        dataset["streams"] = streams
        if setting.predownload:
            dataset["predownload"] = setting.predownload
        if self.ratio is not None:
            dataset["packing_ratio"] = self.ratio
        # They would stay for a second epoch, and there is none.
        keys = setting.loader_keys | {"persistent_workers": False}
        section = {**self.section.section, "dataset": dataset, **keys}
        section.pop("label", None)
        config = {"tokenizer": self.yaml.config.get("tokenizer"), "train_loader": section}
        return {key: value for key, value in config.items() if value is not None}

    def _moved(self, stream: StreamSection, caches: Path | None) -> Mapping[str, Any]:
        if caches is None or stream not in self.fetched:
            return stream.settings
        return {**stream.settings, "local": str(caches / stream.name)}


def refuse_recipe(path: str) -> None:
    """RecipeError where the file is what a training YAML is rendered from."""
    if os.path.isfile(path) and is_recipe(path):
        raise RecipeError(
            f"{path} is a recipe, which says how streams are made and not how they are loaded: render it with `mdsmix render-yaml "
            f"{path} -o train.yaml`, and bench train.yaml."
        )


def read(path: str, loader: str, batch: int | None, ranks: int) -> OneRank:
    """RecipeError where the YAML cannot be read, has no such loader, or its batch cannot be divided by the ranks."""
    yaml = read_yaml(path, judged=(loader.partition(".")[0], "tokenizer"))
    section = yaml.loader(loader)
    return OneRank(
        yaml=yaml,
        section=section,
        batch=batch or _batch(yaml, section, ranks),
        is_batch_own=batch is None,
    )


def _batch(yaml: TrainingYaml, section: LoaderSection, ranks: int) -> int:
    """As LLM-Foundry divides it: the global batch by its devices, or an evaluation's own."""
    if not section.trains:
        return whole(yaml.config.get("device_eval_batch_size")) or DEFAULT_BATCH
    whole_batch = yaml.batch_size
    if whole_batch is None:
        return DEFAULT_BATCH
    if whole_batch % ranks or whole_batch < ranks:
        raise RecipeError(
            f"global_train_batch_size {whole_batch} of {yaml.origin} cannot be divided by --gpus {ranks}; say --batch ROWS, those "
            "of one device, or another number of GPUs."
        )
    return whole_batch // ranks


def alone() -> None:
    """Forgets the ranks of a run that this process may be a part of: one rank is measured, and it waits for no other."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"):
        os.environ.pop(name, None)
