"""Trains as `llmfoundry train` does, which calls the same function, and tells the loss of every step in full."""

from __future__ import annotations

from collections.abc import Sequence

from composer.loggers import InMemoryLogger
from llmfoundry.command_utils import train_from_yaml


def losses(path: str, steps: int, settings: Sequence[str] = ()) -> list[float]:
    """`settings`: as on the command line of `llmfoundry train`."""
    ours = [f"max_duration={steps}ba", "loggers.inmemory={}", "log_to_console=false"]
    trainer = train_from_yaml(path, [*ours, *settings])
    memory = next(d for d in trainer.logger.destinations if isinstance(d, InMemoryLogger))
    found = [float(loss) for _, loss in memory.data["loss/train/total"]]
    trainer.close()
    return found
