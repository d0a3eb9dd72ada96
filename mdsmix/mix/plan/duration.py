"""How long a run is: `--tokens`, the `max_duration` of a training YAML, or one epoch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from mdsmix.errors import RecipeError
from mdsmix.mix.plan.figures import EpochPlan, RunPlan, StepPlan
from mdsmix.table import UNKNOWN, Estimate, about, is_known
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


def run_plan(
    duration: Duration, epoch: EpochPlan, step: StepPlan, are_alike: bool, speed: float | None
) -> RunPlan:
    """`are_alike`: every step holds equally many tokens; `speed`: positions, padding among them, that all devices train a second."""
    steps = _steps(duration, epoch, step)
    epochs = steps / epoch.steps
    # Of whole epochs it is known what they hold; of a part only how much on average.
    times = about(epochs, are_alike or float(epochs).is_integer())
    return RunPlan(
        budget=duration.said,
        steps=steps,
        epochs=epochs,
        samples=epoch.samples * epochs,
        tokens=epoch.tokens * times,
        trained=epoch.trained * times,
        hours=Estimate(step.positions * steps / speed / 3600) if speed else UNKNOWN,
    )


def _steps(duration: Duration, epoch: EpochPlan, step: StepPlan) -> float:
    if not epoch.steps:
        raise RecipeError(
            f"an epoch of {epoch.dropped:,.0f} samples does not fill one step, which draws {step.drawn:,.0f}: take a smaller batch, or "
            "more data."
        )
    if duration.of == "epochs":
        return about(round(duration.count * epoch.steps), not isinstance(epoch.steps, Estimate))
    if duration.of == "steps":
        return round(duration.count)
    full = epoch.samples / epoch.steps / step.drawn
    one = {
        "rows": step.global_batch * full,
        "tokens": step.tokens,
        "positions": step.positions * full,
    }[duration.of]
    if not is_known(one):
        raise RecipeError(
            f"{duration.said} cannot be turned into steps, since how many tokens a step holds is not known: a stream holds text that the "
            "loader itself tokenizes; convert it, or say the length in epochs (1ep) or steps (1000ba)."
        )
    if duration.count < math.floor(one):
        what = "rows" if duration.of == "rows" else "tokens"
        raise RecipeError(
            f"{duration.said} is less than one step, which holds {one:,.0f} {what}: take a larger budget or a smaller batch."
        )
    # Composer stops after the first step that reaches it; a billionth is the rounding of floats.
    steps = math.ceil(duration.count / float(one) - 1e-9)
    return about(steps, not isinstance(one, Estimate))
