"""What the callbacks of all trainers share: the tally of a run, its state in a checkpoint, the
figures that are logged, and their file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import field
from typing import Any

import orjson

from mdsmix import schema
from mdsmix.callbacks.planned import list_planned_streams
from mdsmix.callbacks.run_file import RunFile
from mdsmix.callbacks.stream_figures import (
    PlannedStream,
    StreamCount,
    compute_figures,
    make_metrics,
)
from mdsmix.callbacks.stream_tally import StreamKeys, StreamTally, take_stream_keys
from mdsmix.errors import RecipeError
from mdsmix.frozen import frozen
from mdsmix.load import MixLoader
from mdsmix.messages import flatten_error

log = logging.getLogger(__name__)
VERSION = 1


@frozen(kw_only=True)
class MeterState:
    """The state of a meter, as a checkpoint stores it."""

    now: dict[str, StreamCount] = field(default_factory=dict)
    """What was counted since the run began. The name is the key in checkpoints of earlier runs."""
    logged: dict[str, StreamCount] = field(default_factory=dict)
    "What was counted when figures were last logged."
    version: int = VERSION


class StreamMeter:
    """Counts what a run trains on from each stream, and gives the figures to log.

    A callback calls `begin` when training begins, then for each microbatch `take` before the model
    gets it and `add` after it, and `commit` after each step. `log` returns metrics.
    """

    def __init__(self, name: str, file: str | None = None, losses: bool = True) -> None:
        """Make the meter of a callback.

        Args:
            name: the callback, for messages.
            file: the file to write figures to; None: only the run's loggers get them.
            losses: whether to compute the losses of streams, from the logits of the model.
        """
        self.name = name
        self.file = file
        self.losses = losses
        self.streams = list[PlannedStream]()
        self.tally: StreamTally | None = None
        self._keys: StreamKeys | None = None
        "The streams of the microbatch that the model has now."
        self._state = MeterState()
        self._run_file: RunFile | None = None

    def begin(self, loader: Any, step: int, writes: bool) -> None:
        """Begin to count the batches of a loader, from the state that was loaded, if any.

        Raises RecipeError if the loader is not one of mdsmix.

        Args:
            loader: the loader of the run.
            step: the steps that the run has taken before.
            writes: whether this rank logs the figures and writes the file: rank 0.
        """
        if not isinstance(loader, MixLoader):
            raise RecipeError(
                f"{self.name} counts batches by their streams, and {type(loader).__name__} does "
                "not name them: train with build_loader of mdsmix.load, or under LLM-Foundry with "
                "train_loader.name: mdsmix (not text or finetuning), or leave the callback out."
            )
        loader.add_stream_ids()
        # A resumed run continues its counts, and a new run begins at 0.
        if not step:
            self._state = MeterState()
        elif self.tally:
            self._state = MeterState(now=self.tally.counts(), logged=self._state.logged)
        # Only the rank that writes logs the plan: a thousand ranks would all read the manifests.
        self.streams = list_planned_streams(loader, with_tokens=writes)
        names = [stream.name for stream in self.streams]
        replication = loader.dataset.replication or 1
        self.tally = StreamTally(names, replication, self.losses)
        self.tally.restore(self._state.now)
        if step and not self._state.now:
            log.warning(
                "%s: the run resumes after step %s, and its checkpoint has no counts of streams: "
                "they begin at 0.",
                self.name,
                step,
            )
        if self.file and writes:
            self._run_file = RunFile(self.file, self.streams, step)

    def take(self, batch: MutableMapping[str, Any]) -> None:
        """Take the streams out of a microbatch, before the model gets it."""
        self._keys = take_stream_keys(batch)

    def add(self, batch: Mapping[str, Any], outputs: Any) -> None:
        """Count the microbatch whose streams `take` has taken out.

        Raises RecipeError if it had no streams, and the errors of `StreamTally.add`.
        """
        assert self.tally is not None, "of a run that began"
        keys = self._keys
        self._keys = None
        if keys is None:
            raise RecipeError(
                f"{self.name}: a batch has no stream_id, so something between the loader and the "
                "model drops it: let it pass, or leave the callback out."
            )
        self.tally.add(keys, batch, outputs)

    def discard(self) -> None:
        """Drop the microbatches since the last step, which is begun again."""
        if self.tally:
            self.tally.discard()

    def commit(self) -> None:
        """Add what was counted since the last step to the counts of the run, and sum these over all
        ranks. All ranks call it.
        """
        if self.tally:
            self.tally.commit()

    def log(self, step: int) -> dict[str, float]:
        """Return the metrics of a step, and write them to the file.

        Every rank gets the same metrics, except planned shares of tokens, which only rank 0 has.
        Losses are means since the last call.
        """
        assert self.tally is not None, "of a run that began"
        counts = self.tally.counts()
        figures = compute_figures(self.streams, counts, self._state.logged, self.losses)
        self._state = MeterState(logged=counts)
        if self._run_file:
            self._run_file.write(step, figures)
        return make_metrics(figures)

    @property
    def has_unlogged(self) -> bool:
        """Whether a step was counted since figures were last logged."""
        return self.tally is not None and self.tally.counts() != self._state.logged

    def state_text(self) -> str:
        """Return the state as one line of JSON. It is one string, since
        torch.distributed.checkpoint reads a checkpoint into a state with the same keys.
        """
        counts = self.tally.counts() if self.tally else self._state.now
        return orjson.dumps(MeterState(now=counts, logged=self._state.logged)).decode()

    def load_state_text(self, text: str) -> None:
        """Continue from the state of a checkpoint. Raises RecipeError if it cannot be read."""
        try:
            self._state = schema.parse_mapping(MeterState, orjson.loads(text))
        except (orjson.JSONDecodeError, schema.Misfit) as error:
            raise RecipeError(
                f"{self.name}: the checkpoint's counts of streams cannot be read "
                f"({flatten_error(error)}); resume with the mdsmix that wrote them, or leave the "
                "callback out."
            ) from None
        if self.tally:
            self.tally.restore(self._state.now)
