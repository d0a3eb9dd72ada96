"""Counts the streams of a config one by one, with the model that `llmfoundry train` builds from it
and the model's own loss.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from llmfoundry.command_utils import train_from_yaml
from omegaconf import OmegaConf

from mdsmix.load import build_loader

QUIET = ("max_duration=1ba", "optimizer.lr=0.0", "log_to_console=false")


def alone(path: str, names: Sequence[str]) -> dict[str, list[float]]:
    """Return name of a stream -> its samples, tokens, trained positions and sum of losses, row by
    row.
    """
    tree: Any = OmegaConf.load(path)
    tree.pop("callbacks")
    trainer = train_from_yaml(_written(tree, path), list(QUIET))
    model = trainer.state.model.eval()
    trainer.close()
    del trainer
    gc.collect()
    found = {}
    for name in names:
        one = OmegaConf.to_container(tree, resolve=True)
        dataset = one["train_loader"]["dataset"]
        dataset["streams"] = {name: dataset["streams"][name]}
        dataset.pop("packing_ratio", None)
        one["train_loader"]["drop_last"] = False
        found[name] = _count(model, build_loader(one, 1))
        gc.collect()
    return found


def _written(tree: Any, path: str) -> str:
    beside = path.replace(".yaml", "-alone.yaml")
    OmegaConf.save(tree, beside)
    return beside


@torch.no_grad()
def _count(model: Any, loader: Any) -> list[float]:
    samples = tokens = trained = 0
    loss = 0.0
    for batch in loader:
        targets = sum(label != -100 for label in batch["labels"][0, 1:].tolist())
        samples += 1
        tokens += sum(batch["attention_mask"][0].tolist())
        trained += targets
        loss += float(model.loss(model(batch), batch)) * targets
    return [samples, tokens, trained, loss]
