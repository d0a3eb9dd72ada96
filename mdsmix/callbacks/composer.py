"""The callback of Composer and LLM-Foundry: `callbacks: {mdsmix_streams: {}}` in the YAML.

LLM-Foundry finds it by an entry point (`llmfoundry_callbacks` in pyproject.toml).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from mdsmix.callbacks.meter import StreamMeter
from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import STREAMS_CALLBACK

STATE = "mdsmix_streams"
"The key of the callback's state in a checkpoint."


class ComposerStreams(Callback):  # type: ignore[misc]
    """Logs how much of each stream a run has trained, and the loss of each stream.

    The loader gives stream ids as soon as this callback asks for them. They are taken out of each
    microbatch before the model gets it.
    """

    def __init__(self, log_every: int = 10, file: str | None = None, losses: bool = True) -> None:
        """Make the callback; the arguments are the keys in the YAML.

        Args:
            log_every: batches between two steps that are logged.
            file: a file to which rank 0 also writes the figures, for `mdsmix report --run`.
            losses: whether to compute losses, from the logits that the model returned.
        """
        if log_every < 1:
            raise RecipeError(
                f"{STREAMS_CALLBACK}: log_every is {log_every}; it must be 1 batch or more."
            )
        self.log_every = log_every
        self.meter = StreamMeter(STREAMS_CALLBACK, file, losses)

    def fit_start(self, state: State, logger: Logger) -> None:
        del logger
        step = state.timestamp.batch.value
        self.meter.begin(state.train_dataloader, step, dist.get_global_rank() == 0)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Begin a step. Composer begins it again if its microbatches did not fit into memory."""
        del state, logger
        self.meter.discard()

    def before_forward(self, state: State, logger: Logger) -> None:
        del logger
        batch: Any = state.batch
        if not isinstance(batch, MutableMapping):
            raise RecipeError(
                f"{STREAMS_CALLBACK}: the batch is of the type {type(batch).__name__}, but it must "
                "be a dict with stream_id, as the loader of mdsmix yields it: train with these "
                "batches, or leave the callback out."
            )
        self.meter.take(batch)

    def after_forward(self, state: State, logger: Logger) -> None:
        del logger
        self.meter.add(state.batch, state.outputs)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.meter.commit()
        step = state.timestamp.batch.value
        if step % self.log_every == 0:
            logger.log_metrics(self.meter.log(step))

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.meter.has_unlogged:
            logger.log_metrics(self.meter.log(state.timestamp.batch.value))

    def state_dict(self) -> dict[str, Any]:
        return {STATE: self.meter.state_text()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.meter.load_state_text(state[STATE])
