"""What an epoch comes to, in samples and in tokens, and how many samples it draws where a recipe gives shares.

Weights count samples, never tokens: `proportion: 0.5` for short chats beside 2,048-token rows is far from half of the tokens, so both
shares are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mdsmix.errors import MixRefused
from mdsmix.mix.apportion import Apportioned, StreamShare, asked, drawn
from mdsmix.mix.draws import delivered_of, draws_of
from mdsmix.mix.stream_counts import eos_of, is_seen_alike, row_length, tokens_of, trained_of
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.recipe import Recipe
from mdsmix.recipe.amounts import Unit
from mdsmix.recipe.rules import budget_of, written_shares
from mdsmix.table import Column, Estimate, Table, about, is_known
from mdsmix.words import percent


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInEpoch:
    """One stream in an epoch of its loader. Figures are plain where they are exact, an Estimate where they are not."""

    stream: str
    samples: float
    "In the stream."
    drawn: float
    "Samples an epoch, by its weight."
    delivered: float
    "Of these, what reaches the training loop: all of them, unless the batching method drops some."
    tokens: float
    "Of the delivered samples, without padding and without what the loader cuts off."
    trained: float
    "Positions of theirs that give a loss."
    cut: float
    "Tokens of theirs that the loader cuts off."


def in_epoch(
    stream: StreamInMix, loader: Loader, drawn: int, delivered: int, eos: float = 0
) -> StreamInEpoch:
    """`eos`: EOS tokens of all its samples that the loader adds."""
    samples, is_counted = stream.index.samples, stream.survey is None
    # Which rows a part of a pass draws is left to chance: unless they are alike, what they hold is a mean.
    is_exact = row_length(stream) is not None or not delivered % (samples or 1)
    times = about(delivered / (samples or 1), is_exact)
    tokens, cut = tokens_of(stream, loader)
    return StreamInEpoch(
        stream=stream.name,
        samples=about(samples, is_counted),
        drawn=about(drawn, is_counted),
        delivered=about(delivered, is_counted),
        tokens=(tokens + eos) * times,
        trained=trained_of(stream, loader) * times,
        cut=cut * times,
    )


def epoch_of(loader: Loader, batch: int | None = None) -> list[StreamInEpoch]:
    """An epoch, a stream each; empty where Streaming refuses the weights.

    `batch`: samples that all devices draw together at a time. Without it, nothing is taken to be dropped.
    """
    drawn = draws_of(loader) or []
    counts = zip(loader.streams, drawn, delivered_of(loader, batch) or drawn, strict=False)
    return [in_epoch(stream, loader, n, came) for stream, n, came in counts]


EPOCH = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("an epoch", key="delivered"),
    Column("share", "share", key="share_of_samples"),
    Column("tokens"),
    Column("share", "share", key="share_of_tokens"),
)


def epoch_table(epoch: Sequence[StreamInEpoch]) -> Table:
    """A row a stream, and the sum."""
    samples, tokens = (sum(getattr(s, name) for s in epoch) for name in ("delivered", "tokens"))
    rows = [
        (
            s.stream,
            s.samples,
            s.delivered,
            share_of(s.delivered, samples),
            s.tokens,
            share_of(s.tokens, tokens),
        )
        for s in epoch
    ]
    total = ("all", sum(s.samples for s in epoch), samples, 1.0, tokens, share_of(tokens, tokens))
    return Table(columns=EPOCH, rows=rows, total=total)


def share_of(part: float, whole: float) -> float | None:
    """None where it is not known."""
    return part / whole if is_known(whole) and whole else None


def apportion(recipe: Recipe, loader: Loader, may_estimate: bool = False) -> Apportioned:
    """How many samples of each stream an epoch draws. `loader`: the recipe's, with its streams opened.

    Raises:
        MixRefused: the streams cannot give what is asked, or nobody counted what they hold.
    """
    budget, written = budget_of(recipe), written_shares(recipe)
    unit: Unit = recipe.count or (budget and budget.unit) or "tokens"
    units = (unit, (budget and budget.unit) or unit)
    measured = list[StreamShare]()
    for s in loader.streams:
        (counted, is_exact), (budgeted, too) = (_mean(s, loader, u, may_estimate) for u in units)
        measured.append(
            StreamShare(
                stream=s.name,
                samples=s.index.samples,
                counted=counted,
                budgeted=budgeted,
                is_exact=is_exact and too,
                written=written[s.name],
            )
        )
    parts = asked(measured, Fraction(str(recipe.temperature)), recipe.absolute)
    for part in [part for part in parts if part.asked] or parts:
        if not part.size:
            raise MixRefused(
                f"{part.stream} is to be {percent(part.asked)} of an epoch's {unit}, and holds none: convert it, or take its share "
                "out, or look at what was filtered when it was converted."
            )
    return Apportioned(
        count=unit,
        budget=budget,
        is_absolute=recipe.absolute,
        parts=drawn(parts, budget, unit, Fraction(str(recipe.max_repeat)), recipe.absolute),
    )


def _mean(
    stream: StreamInMix, loader: Loader, unit: Unit, may_estimate: bool
) -> tuple[Fraction, bool]:
    """What a sample of the stream holds of the unit, and whether that was counted."""
    samples = stream.index.samples
    if unit == "samples" or not samples:
        return Fraction(bool(samples)), True
    held = tokens_of(stream, loader)[0] if unit == "tokens" else trained_of(stream, loader)
    is_exact = not isinstance(held, Estimate) and is_seen_alike(stream, loader)
    if not is_exact and not (may_estimate and is_known(held)):
        guess = "the loader itself tokenizes it"
        if is_known(held):
            guess = f"its first samples suggest {held / samples:,.1f} a sample, which --estimate takes for all of them"
        raise MixRefused(
            f"the {unit} of {stream.name} were not counted (it has no manifest, or one that is of another index, another max_seq_len, other "
            f"targets, or a padding token that is not EOS), and {guess}: convert the stream, or write count: samples and a budget of samples."
        )
    added = eos_of(stream, loader) if unit == "tokens" else 0
    return (Fraction(held) + Fraction(added)) / samples, is_exact
