"""The callback of Hugging Face's Trainer.

Trainer shows its callbacks neither batches nor outputs, so two hooks on the model take the streams
out of its arguments and read its logits. Both run within `model(**batch)`, also under
DistributedDataParallel and FSDP.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from mdsmix.callbacks.meter import StreamMeter
from mdsmix.callbacks.stream_tally import take_stream_keys
from mdsmix.errors import RecipeError

log = logging.getLogger(__name__)
STATE = "streams"


class TrainerStreams(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Adds the figures of each stream to what Trainer logs, at its `logging_steps`.

    They are in `trainer.state.log_history` and go to every logger in `report_to`. The loader is one
    of mdsmix.load, as get_train_dataloader returns it (docs/loading.md).
    """

    def __init__(self, file: str | None = None, losses: bool = True) -> None:
        """Make the callback, for `Trainer(callbacks=[...])`.

        Args:
            file: a file to which rank 0 also writes the figures, for `mdsmix report --run`.
            losses: whether to compute losses, from the logits that the model returned.
        """
        self.meter = StreamMeter(type(self).__name__, file, losses)
        self.saved = ""
        "The state of the checkpoint that the run resumes from."
        self._hooks: list[Any] = []

    def state(self) -> dict[str, Any]:
        """Return the state that Trainer writes into trainer_state.json of a checkpoint."""
        arguments = {"file": self.meter.file, "losses": self.meter.losses}
        return {"args": arguments, "attributes": {"saved": self.meter.state_text()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        del control
        self._refuse(args)
        self._go_first(sys._getframe(1).f_locals.get("self"))
        states = state.stateful_callbacks or {}
        saved = states.get(type(self).__name__)
        if state.global_step and isinstance(saved, Mapping):
            self.meter.load_state_text(saved["attributes"]["saved"])
        elif self.saved:
            self.meter.load_state_text(self.saved)
        loader = objects["train_dataloader"]
        self.meter.begin(loader, state.global_step, state.is_world_process_zero)
        model = objects["model"]
        self._remove_hooks()
        before, after = self._before_forward, self._after_forward
        # A compiled model leaves its graph for the hooks. Where nothing is compiled, the import of
        # torch._dynamo would take some seconds.
        if "torch._dynamo" in sys.modules:
            disable: Any = torch.compiler.disable
            before, after = disable(before), disable(after)
        self._hooks = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, with_kwargs=True),
        ]

    def _refuse(self, args: TrainingArguments) -> None:
        """Raise RecipeError if Trainer runs in a way that hides batches or outputs."""
        name = type(self).__name__
        if args.n_gpu > 1:
            raise RecipeError(
                f"{name}: one process drives {args.n_gpu} devices (torch.nn.DataParallel), which "
                "copies the model for each: start one process per device with torchrun."
            )
        if args.label_smoothing_factor:
            raise RecipeError(
                f"{name}: under label_smoothing_factor Trainer takes the labels out of the batch "
                "before the model gets it, so what is trained on each stream is unknown: set it to "
                "0, or leave the callback out."
            )

    def _go_first(self, handler: Any) -> None:
        """Move this callback before those that log, so that they get the figures too.

        Trainer gives each callback the same dict of logs, in the order of the callbacks, and puts
        its own before those of the user.

        Args:
            handler: the CallbackHandler that calls this callback.
        """
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)
            return
        log.warning(
            "%s: this Trainer calls its callbacks in another way than those that were checked, so "
            "loggers such as W&B may not get the figures of streams.",
            type(self).__name__,
        )

    def _before_forward(
        self, model: Any, arguments: tuple[Any, ...], batch: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take the streams out of the arguments of the model."""
        if model.training:
            self.meter.take(batch)
        else:
            take_stream_keys(batch)
        return arguments, batch

    def _after_forward(
        self, model: Any, arguments: tuple[Any, ...], batch: dict[str, Any], outputs: Any
    ) -> None:
        """Count a microbatch."""
        del arguments
        if model.training:
            self.meter.add(batch, outputs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        del args, state, control, objects
        self.meter.commit()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **objects: Any,
    ) -> None:
        """Add the figures to the log of a training step."""
        del args, control, objects
        if logs is None or "loss" not in logs:
            return
        metrics = self.meter.log(state.global_step)
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        del args, control, objects
        if self.meter.has_unlogged:
            self.meter.log(state.global_step)
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
