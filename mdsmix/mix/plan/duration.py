"""How long a run is: `--tokens`, the `max_duration` of a training YAML, or one epoch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from mdsmix.errors import RecipeError
from mdsmix.mix.plan.figures import UNKNOWN, Figure, RunPlan, StepPlan, weakest
from mdsmix.training.keys import COUNT_UNITS, in_units
from mdsmix.typed import brief

UNITS: dict[str, Literal["epochs", "steps", "rows", "tokens"]] = {
    "ep": "epochs",
    "ba": "steps",
    "sp": "rows",
    "tok": "tokens",
}
"What Composer writes behind a number of `max_duration`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """So much of something."""

    count: float
    of: Literal["epochs", "steps", "rows", "tokens", "positions"]
    said: str


ONE_EPOCH = Duration(count=1, of="epochs", said="one epoch, since nothing says how long the run is")


def of_option(text: str) -> Duration:
    """`--tokens 100B`."""
    count = in_units(text, COUNT_UNITS)
    if not count or count < 1:
        raise RecipeError(
            f"--tokens {text} is no number of tokens: write for example 100B, 1.5T or 400000."
        )
    return Duration(count=count, of="tokens", said=f"--tokens {text}")


def of_yaml(value: Any, is_text: bool) -> Duration | None:
    """`max_duration`; None where there is none, or one that says nothing of the data (seconds, iterations).

    Composer counts the tokens of text batches by their size, padding included, and those of the finetuning loader by their mask.
    """
    if value is None:
        return None
    found = re.fullmatch(r"([\d_.]+(?:e\d+)?)\s*(ep|ba|sp|tok)?", str(value).strip().lower())
    if not found:
        return None
    try:
        count = float(found[1].replace("_", ""))
    except ValueError:
        raise RecipeError(f"max_duration is {brief(value)}, which is no number.") from None
    of = UNITS[found[2] or "ep"]
    return Duration(
        count=count,
        of="positions" if of == "tokens" and is_text else of,
        said=f"max_duration: {value}",
    )


def run_plan(duration: Duration, step: StepPlan, speed: float | None) -> RunPlan:
    """`speed`: positions, padding among them, that all devices together train a second."""
    steps = _steps(duration, step)
    epochs = _over(steps, step.steps)
    scale = _in_full_steps(steps.known, step)
    # Of whole epochs it is known what they hold; of a part, and where samples are dropped, only how much on average.
    is_whole = not steps.known % max(1.0, step.steps.known) and not step.dropped.known
    firm = steps.basis if is_whole or step.is_even else weakest([steps.basis, "estimated"])
    tokens, trained = (each.times(scale, firm) for each in (step.tokens, step.trained))
    return RunPlan(
        budget=duration.said,
        steps=steps,
        epochs=epochs,
        firmness=firm,
        samples=step.drawn.times(scale, steps.basis).rounded(),
        tokens=tokens,
        trained=trained,
        hours=step.positions.times(scale / speed / 3600, "estimated") if speed else UNKNOWN,
    )


def _full_epoch(step: StepPlan) -> float:
    """Steps of an epoch, a last one that is not full (`drop_last: false`) by the part of it that holds samples."""
    return min(step.steps.known, step.samples.known / max(1.0, step.drawn.known))


def _in_full_steps(steps: float, step: StepPlan) -> float:
    epochs, rest = divmod(steps, max(1.0, step.steps.known))
    return epochs * _full_epoch(step) + min(rest, _full_epoch(step))


def _to_hold(count: float, step: StepPlan) -> int:
    """Steps that hold so many full ones; a billionth is the rounding of floats."""
    epochs, rest = divmod(count, _full_epoch(step))
    return round(epochs * step.steps.known) + math.ceil(rest - 1e-9)


def _steps(duration: Duration, step: StepPlan) -> Figure:
    if not step.steps.known:
        raise RecipeError(
            f"an epoch of {step.samples.known:,.0f} samples does not fill one step, which draws {step.drawn.known:,.0f}: take a smaller "
            "batch, or more data."
        )
    if duration.of == "epochs":
        return step.steps.times(duration.count).rounded()
    if duration.of == "steps":
        return Figure(round(duration.count))
    size = {"rows": Figure(step.global_batch), "tokens": step.tokens, "positions": step.positions}[
        duration.of
    ]
    if not size.value:
        raise RecipeError(
            f"{duration.said} cannot be turned into steps, since how many tokens a step holds is not known: a stream holds text that the "
            "loader itself tokenizes; convert it, or say the length in epochs (1ep) or steps (1000ba)."
        )
    one = size.value * min(1.0, _full_epoch(step))
    if duration.count < one:
        what = "rows" if duration.of == "rows" else "tokens"
        raise RecipeError(
            f"{duration.said} is less than one step, which holds {one:,.0f} {what}: take a larger budget or a smaller batch."
        )
    # Composer stops after the first step that reaches it.
    relative = None if size.error is None else size.error / size.value
    steps = _to_hold(duration.count / size.value, step)
    return Figure(steps, size.basis, relative and relative * steps)


def _over(steps: Figure, epoch: Figure) -> Figure:
    return steps.times(1 / max(1.0, epoch.known), epoch.basis)
