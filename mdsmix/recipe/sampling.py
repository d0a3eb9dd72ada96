"""`sample: 5%` and `sample: budget`: how much of its source a stream is made of.

`budget` takes as much as the stream's share of the recipe's budget wants. What that comes to in records the source tells, so
`mdsmix.convert.budget` works it out; here stands what the recipe alone says: the tokens that are wanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from mdsmix.recipe.budget import NUMBER, Budget, read_budget, told
from mdsmix.recipe.mix_rules import budget_of, written_shares
from mdsmix.recipe.spec import Recipe, StreamSpec, is_share, share_of

BY_BUDGET = "budget"


def sample_contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    """Sentences on the `sample` of a stream with a source."""
    if stream.sample is None:
        return
    if stream.sample == BY_BUDGET:
        try:
            tokens_wanted(recipe, stream)
        except ValueError as error:
            yield f"sample: budget takes what the stream's share of the budget wants, and {error}."
    elif not is_share(stream.sample) or not share_of(stream.sample):
        yield (
            f"sample is {told(stream.sample)}; it must be a share above 0 of at most 1, such as 5% or 0.05, or budget, which takes "
            "what the recipe's budget wants."
        )


def tokens_wanted(recipe: Recipe, stream: StreamSpec) -> Fraction:
    """What the stream's share of the budget comes to; ValueError says why it is not known before the streams are converted."""
    budget = budget_of(recipe)
    if budget is None:
        raise ValueError("there is none: add budget, for example 2B tokens, or write sample: 5%")
    if budget.unit != "tokens" or recipe.count not in (None, "tokens"):
        counts = budget if budget.unit != "tokens" else f"of {budget}, and shares count {recipe.count}"  # fmt: skip
        raise ValueError(
            f"it is {counts}: how many tokens that comes to only a conversion tells; give budget and shares in tokens, or write sample: 5%"
        )
    shares = written_shares(recipe)
    name = stream.held_out_of or stream.name
    if name not in shares:
        raise ValueError(
            f"a stream of the split {stream.split} is evaluated on and has no share: write sample: 5%, or take it out"
        )
    given = [share for share in shares.values() if share is not None]
    share = shares[name]
    if share is None and len(given) == len(shares) - 1 and not recipe.absolute:
        share = 1 - sum(given, Fraction(0))  # all that the others leave
    if share is None:
        raise ValueError(
            f"it has no share: write mix.{name}.share, since what other streams leave is divided by sizes that only a "
            "conversion tells, or write sample: 5%"
        )
    if not share:
        raise ValueError("its share is 0, so nothing of it is wanted: take the stream out")
    is_normal = len(given) == len(shares) and not recipe.absolute
    return budget.amount * share / (sum(given, Fraction(0)) if is_normal else 1)


def with_budget(recipe: Recipe) -> Recipe:
    """The recipe in which every stream that is converted and trained on takes what the budget wants, where it names no sample."""
    shares = written_shares(recipe)
    streams = {
        s.name: replace(s, sample=BY_BUDGET)
        if s.source and s.sample is None and (s.held_out_of or s.name) in shares
        else s
        for s in recipe.streams.values()
    }
    return replace(recipe, streams=streams)


def bare_budget(written: str) -> Budget:
    """A budget in which a number without a unit is tokens: `2B`; ValueError says what is amiss."""
    is_bare = re.fullmatch(rf"\s*{NUMBER}\s*[kmbt]?\s*", written, re.I)
    return read_budget(f"{written} tokens" if is_bare else written)
