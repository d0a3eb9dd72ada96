"""What cannot be right in a recipe's weights, shares and budget, whatever the streams hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from fractions import Fraction

from mdsmix.recipe.budget import Budget, read_budget, read_share, told
from mdsmix.recipe.spec import Recipe, WeightSpec
from mdsmix.words import hint, listed

OF_SHARES = ("count", "max_repeat", "absolute")
"Keys that say something of shares alone."


def mix_contradictions(recipe: Recipe) -> Iterator[str]:
    """Sentences on `mix` and the keys beside it."""
    for name, weight in recipe.mix.items():
        if name not in recipe.streams:
            yield f"mix.{name} names no stream; {hint(name, list(recipe.streams), 'streams holds')}"
        if len(weight.given) != 1:
            yield f"mix.{name} must give exactly one of repeat, proportion, choose and share; it gives {list(weight.given) or 'none'}."
        yield from _value_contradictions(name, weight)
    if recipe.is_by_share:
        yield from _beside_weights(recipe)
        yield from _share_contradictions(recipe)
        yield from _budget_contradictions(recipe)
        return
    for key in OF_SHARES:
        if getattr(recipe, key) != getattr(Recipe, key):
            yield (
                f"{key} speaks of shares, and the recipe has neither a share nor a budget: add mix.<stream>.share or budget, or "
                f"take {key} out."
            )


def written_shares(recipe: Recipe) -> dict[str, Fraction | None]:
    """Each stream that is trained on, with its share as it is written; None where it has none."""
    weights: Mapping[str, WeightSpec] = recipe.mix
    found = {s.name: weights[s.name].share if s.name in weights else None for s in recipe.trained}
    return {name: None if share is None else read_share(share) for name, share in found.items()}


def budget_of(recipe: Recipe) -> Budget | None:
    return None if recipe.budget is None else read_budget(recipe.budget)


def _value_contradictions(name: str, weight: WeightSpec) -> Iterator[str]:
    numbers = {
        k: v for k, v in weight.given.items() if k != "share" and isinstance(v, (int, float))
    }
    if any(not value >= 0 for value in numbers.values()):
        yield f"mix.{name} gives a weight below 0: {numbers}."
    if weight.share is not None:
        try:
            read_share(weight.share)
        except ValueError as error:
            yield f"mix.{name}.share is {told(weight.share)}; {error}."


def _beside_weights(recipe: Recipe) -> Iterator[str]:
    """Shares decide all streams, so no other weight has a place beside them."""
    others = [n for n, w in recipe.mix.items() if set(w.given) - {"share"}]
    has_shares = any(w.share is not None for w in recipe.mix.values())
    by = "share" if has_shares else "temperature" if recipe.budget is None else "budget"
    if others:
        yield (
            f"{by} stands beside the {', '.join(recipe.mix[others[0]].given)} of {listed(others)}: one of the two decides how "
            "often a stream is drawn; give every stream a share, or none."
        )
    dataset = recipe.train_loader.get("dataset")
    if isinstance(dataset, Mapping) and dataset.get("epoch_size"):
        yield (
            f"train_loader.dataset.epoch_size stands beside {by}, and budget says how long an epoch is: take "
            "epoch_size out."
        )


def _share_contradictions(recipe: Recipe) -> Iterator[str]:
    for name, weight in recipe.mix.items():
        spec = recipe.streams.get(name)
        if weight.share is not None and spec is not None and spec not in recipe.trained:
            yield f"mix.{name} is the share of a stream of the split {spec.split}, which is evaluated on and not mixed: take it out."
    with suppress(ValueError):  # a share that is none is told above
        yield from _sum_contradictions(recipe, written_shares(recipe))


def _sum_contradictions(recipe: Recipe, written: Mapping[str, Fraction | None]) -> Iterator[str]:
    given = {name: share for name, share in written.items() if share is not None}
    without, total = [n for n in written if n not in given], sum(given.values(), Fraction(0))
    percents = [n for n in given if str(recipe.mix[n].share).strip().endswith("%")]
    large = [n for n, share in given.items() if share > 1 and n not in percents]
    if large and (percents or recipe.absolute):
        yield (
            f"mix.{large[0]}.share is {told(recipe.mix[large[0]].share)}, more than the whole; where it is meant in percent, write "
            f"{told(recipe.mix[large[0]].share)}%."
        )
    if without and recipe.absolute:
        yield (
            f"absolute: true takes every share of the whole budget, and without a share: {listed(without)}. Give each stream one; "
            "0 leaves a stream out."
        )
    elif without and given and total >= 1:
        yield (
            f"the shares of {listed(list(given))} come to {float(total):.0%}, and nothing is left for {listed(without)}: lower them, "
            "or give each stream a share; 0 leaves a stream out."
        )
    if not without and given and not total:
        yield f"the shares of {listed(list(given))} sum to 0, so no sample would be drawn: give one of them a share above 0."
    if not without and given and recipe.temperature != 1:
        yield (
            f"temperature is {recipe.temperature}, and every stream has a share, so it decides nothing: take it out, or the shares "
            "that it is to decide."
        )


def _budget_contradictions(recipe: Recipe) -> Iterator[str]:
    if recipe.budget is None:
        if recipe.absolute:
            yield "absolute: true takes shares of the budget, and there is none: add budget, for example 2B tokens."
        return
    try:
        budget = read_budget(recipe.budget)
    except ValueError as error:
        yield f"budget is {told(recipe.budget)}; {error}."
        return
    names = [s.name for s in recipe.trained]
    if budget.stream and budget.stream not in names:
        yield f"budget counts passes of {budget.stream}, which is no stream that is trained on; {hint(budget.stream, names, 'these are')}"
    if recipe.absolute and recipe.count and budget.unit and recipe.count != budget.unit:
        yield (
            f"absolute: true takes shares of the budget, which is in {budget.unit}, and count is {recipe.count}: leave count out, "
            f"or give the budget in {recipe.count}."
        )
