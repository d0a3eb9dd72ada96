"""The phases of a recipe: each becomes a recipe of its own, with the phase's mix and budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.messages import join_names
from mdsmix.recipe.amounts import is_lone_share, read_budget, read_share
from mdsmix.recipe.spec import PhaseSpec, Recipe

SHUFFLE_SEED = 9176
"Streaming's default shuffle_seed."


def make_phase_recipe(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe of one phase: the streams that the phase draws, with its mix, budget and
    `max_repeat`. Evaluations are those of the whole recipe, and so is the loader.

    Args:
        recipe: a recipe whose phases are free of contradictions.
        name: the phase.
    """
    phase = recipe.phases[name]
    streams = {
        stream.name: stream
        for stream in recipe.streams.values()
        if stream.name in phase.mix or stream not in recipe.trained
    }
    loader = dict(recipe.train_loader)
    # The loader follows from all streams, and a phase has only some of them.
    loader["name"] = recipe.loader
    dataset = dict(loader.get("dataset") or {})
    dataset["shuffle_seed"] = _choose_seed(recipe, name, dataset.get("shuffle_seed"))
    loader["dataset"] = dataset
    return replace(
        recipe,
        phases={},
        phase=name,
        streams=streams,
        mix=phase.mix,
        budget=_write_budget(recipe, phase),
        max_repeat=recipe.max_repeat if phase.max_repeat is None else phase.max_repeat,
        train_loader=loader,
    )


def _choose_seed(recipe: Recipe, name: str, seed: Any) -> Any:
    """Return the shuffle_seed of a phase. By default each phase has another one: with the same seed
    and epoch, two phases would draw the same samples of a stream.

    Args:
        seed: the shuffle_seed of the recipe's loader; None if it sets none.
    """
    own = recipe.phases[name].shuffle_seed
    if own is not None:
        return own
    base = SHUFFLE_SEED if seed is None else seed
    # The checks report a seed that is not a whole number.
    return base + list(recipe.phases).index(name) if isinstance(base, int) else base


def _write_budget(recipe: Recipe, phase: PhaseSpec) -> str | int | float:
    """Return the budget of a phase as a recipe writes it. A part of the recipe's budget is rounded
    to a whole unit: `10%` of `2B tokens` is `200000000 tokens`.
    """
    if not is_lone_share(phase.budget):
        return phase.budget
    whole = read_budget(recipe.budget or "")
    return f"{round(whole.amount * read_share(phase.budget))} {whole.unit}"


def require_one_phase(recipe: Recipe, path: str) -> None:
    """Raise RecipeError if the recipe has several phases, and none is chosen.

    Args:
        path: the recipe's path, for the message.
    """
    if recipe.phases and recipe.phase is None:
        names = list(recipe.phases)
        raise RecipeError(
            f"{path} has the phases {join_names(names, len(names))}, and this needs the mix of one "
            f"of them: name it as an override, for example phase={names[-1]}."
        )


def list_chosen_phases(recipe: Recipe) -> list[str]:
    """Return the names of the phases that a command is about: the chosen one, or all."""
    return list(recipe.phases) if recipe.phase is None else [recipe.phase]
