"""Trains as `llmfoundry train` does, which calls the same function, and tells the loss of every
step in full.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from typing import Any

import torch
from composer.loggers import InMemoryLogger
from llmfoundry.command_utils import train_from_yaml
from llmfoundry.command_utils.train import TRAIN_CONFIG_KEYS
from transformers import LlamaConfig, LlamaForCausalLM

METRICS = (
    "loss/train/total",
    "time/token",
    "metrics/eval/.*LanguageCrossEntropy",
    "mdsmix/.*/loss",
)


def losses(path: str, steps: int, settings: Sequence[str] = ()) -> list[float]:
    return list(metrics(path, steps, settings)["loss/train/total"])


def metrics(path: str, steps: int, settings: Sequence[str] = ()) -> dict[str, list[float]]:
    """The values of a metric in turn. `settings`: as on the command line of `llmfoundry train`."""
    ours = [f"max_duration={steps}ba", "loggers.inmemory={}", "log_to_console=false"]
    trainer = train_from_yaml(path, [*ours, *settings])
    memory = next(d for d in trainer.logger.destinations if isinstance(d, InMemoryLogger))
    found = {
        name: [float(value) for _, value in values]
        for name, values in memory.data.items()
        if any(re.fullmatch(metric, name) for metric in METRICS)
    }
    trainer.close()
    return found


def failure(path: str, steps: int, settings: Sequence[str] = ()) -> str:
    """The error that ends the run."""
    try:
        metrics(path, steps, settings)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    else:
        told = ""
    gc.collect()
    return told


def run(code: str) -> int:
    """How many batches the `trainer` of a page's block was given, with a model that has learned
    nothing.
    """
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=2048, num_hidden_layers=1, num_key_value_heads=1, **shape)
    names: dict[str, Any] = {"model": LlamaForCausalLM(config)}
    exec(code, names)
    return int(names["trainer"].state.timestamp.batch.value)


def list_top_level_keys() -> list[str]:
    """The keys that a YAML may have at its top level: with another one `llmfoundry train` ends."""
    return sorted(TRAIN_CONFIG_KEYS)
