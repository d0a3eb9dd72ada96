"""The callback of Lightning.

Lightning shows a callback the batch but not the logits, so a hook reads them where the inner model
of the LightningModule returns them.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mdsmix.callbacks.meter import StreamMeter
from mdsmix.callbacks.stream_tally import take_stream_keys
from mdsmix.errors import RecipeError

STATE = "mdsmix_streams"
"The key of the callback's state in a checkpoint."


def _import_lightning() -> Any:
    """Return Lightning: the one of its two packages that is imported already, otherwise the one
    that is installed. Their classes are different, and a Trainer takes only its own.
    """
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if name in sys.modules:
            return sys.modules[name]
    return import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")


class LightningStreams(_import_lightning().Callback):  # type: ignore[misc]
    """Logs the figures of each stream at the Trainer's `log_every_n_steps`, to all its loggers.

    The callback takes the stream ids out of a batch before training_step gets it.
    """

    def __init__(self, module: str = "", file: str | None = None, losses: bool = True) -> None:
        """Make the callback, for `Trainer(callbacks=[...])`.

        Args:
            module: name of the LightningModule's attribute that is the model: training_step calls
                it once, and it returns logits. It need not be named if the LightningModule has one
                submodule with parameters.
            file: a file to which rank 0 also writes the figures, for `mdsmix report --run`.
            losses: whether to compute losses, from the logits that the model returned.
        """
        self.module = module
        self.meter = StreamMeter(type(self).__name__, file, losses)
        self._batch: Any = None
        "The batch that training_step has now."
        self._is_counted = False
        self._hook: Any = None
        self._last_logged = 0
        "The step that was last logged."

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last_logged = trainer.global_step
        self.meter.begin(trainer.train_dataloader, trainer.global_step, trainer.is_global_zero)
        self._remove_hook()
        if self.meter.losses:
            self._hook = self._find_model(pl_module).register_forward_hook(self._after_forward)

    def _find_model(self, pl_module: Any) -> Any:
        """Return the module that returns logits. Raises RecipeError if it is not known."""
        children = dict(pl_module.named_children())
        names = list[str]()
        for name, child in children.items():
            # Without a name it is the only submodule with parameters.
            has_parameters = next(child.parameters(), None) is not None
            if name == self.module if self.module else has_parameters:
                names.append(name)
        if len(names) != 1:
            raise RecipeError(
                f"LightningStreams: {type(pl_module).__name__} has the submodules "
                f"{', '.join(children) or '(none)'}, and it is unknown which of them returns the "
                f"logits{f' (module: {self.module})' if self.module else ''}: pass "
                "module=<its attribute>, or losses=False to count samples and tokens alone."
            )
        return children[names[0]]

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the streams out of the batch, before training_step gets it."""
        del trainer, pl_module, batch_idx
        if not isinstance(batch, MutableMapping):
            raise RecipeError(
                f"LightningStreams: the batch is of the type {type(batch).__name__}, but it must "
                "be a dict with stream_id, as the loader of mdsmix yields it: train with these "
                "batches, or leave the callback out."
            )
        self._batch = batch
        self._is_counted = False
        self.meter.take(batch)

    def _after_forward(self, model: Any, arguments: Any, outputs: Any) -> None:
        """Count what is trained of each stream in the current batch, and its losses. The hook calls
        this each time that the inner model has returned its outputs.

        Raises RecipeError if training_step calls the model a second time for the same batch.
        """
        del arguments
        if not model.training or self._batch is None:
            return
        if self._is_counted:
            raise RecipeError(
                "LightningStreams: training_step called the model twice, and it is unknown which "
                "call the losses are from: pass module=<the attribute that is called once>, or "
                "losses=False to count samples and tokens alone."
            )
        self.meter.add(self._batch, outputs)
        self._is_counted = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        del pl_module, outputs, batch_idx
        if not self.meter.losses:
            self.meter.add(batch, None)
        elif not self._is_counted:
            raise RecipeError(
                "LightningStreams: training_step did not call the model, so there are no logits: "
                "pass module=<the attribute that it calls>, or losses=False to count samples and "
                "tokens alone."
            )
        self._batch = None
        self.meter.commit()
        step = trainer.global_step
        if step != self._last_logged and step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_validation_batch_start(
        self,
        trainer: Any,
        pl_module: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Take the streams out of a batch that is only evaluated."""
        del trainer, pl_module, batch_idx, dataloader_idx
        if isinstance(batch, MutableMapping):
            take_stream_keys(batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        if self.meter.has_unlogged:
            self._log(trainer)
        self._remove_hook()

    def _log(self, trainer: Any) -> None:
        """Give the figures to the loggers of the run."""
        self._last_logged = trainer.global_step
        metrics = self.meter.log(trainer.global_step)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def _remove_hook(self) -> None:
        if self._hook:
            self._hook.remove()
        self._hook = None

    def state_dict(self) -> dict[str, Any]:
        return {STATE: self.meter.state_text()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.meter.load_state_text(state_dict[STATE])
