"""The samples and tokens of an epoch, and the samples that a recipe's shares draw.

Weights count samples, never tokens: `proportion: 0.5` for short chats beside 2,048-token rows is
far from half of the tokens, so both shares are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mdsmix.errors import MixRefused
from mdsmix.mix.epoch.apportion import Apportioned, StreamShare, choose_samples, set_asked_shares
from mdsmix.mix.epoch.draws import count_loader_delivered, count_loader_draws
from mdsmix.mix.epoch.stream_counts import (
    count_stored_tokens,
    count_tokens,
    count_trained,
    fixed_row_length,
)
from mdsmix.mix.streams.mix import Loader, StreamInMix
from mdsmix.recipe import Recipe
from mdsmix.recipe.amounts import Unit
from mdsmix.recipe.rules import budget_of, written_shares
from mdsmix.table import Column, Estimate, Table, about, is_known
from mdsmix.words import percent


@dataclass(frozen=True, kw_only=True)
class StreamInEpoch:
    """One stream in an epoch of its loader. Figures are plain where they are exact, an Estimate
    where they are not.
    """

    stream: str
    samples: float
    "Samples in the stream."
    drawn: float
    "Samples that an epoch draws, by the stream's weight."
    delivered: float
    "Drawn samples that reach the training loop: all, unless the batching method drops some."
    tokens: float
    """Tokens of the delivered samples as they are trained: cut, with the EOS that the loader
    appends, without padding.
    """
    trained: float
    "Positions of the delivered samples that give a loss."
    cut: float
    """Tokens of the delivered samples that were cut off when converting, or that the loader cuts
    off.
    """


def measure_stream(
    stream: StreamInMix, loader: Loader, drawn: int, delivered: int
) -> StreamInEpoch:
    """The figures of a stream."""
    samples, is_counted = stream.index.samples, stream.survey is None
    # Chance decides which rows a part of a pass draws: unless rows are equally long, their tokens
    # are a mean.
    is_exact = fixed_row_length(stream) is not None or not delivered % (samples or 1)
    times = about(delivered / (samples or 1), is_exact)
    tokens, cut = count_tokens(stream, loader)
    return StreamInEpoch(
        stream=stream.name,
        samples=about(samples, is_counted),
        drawn=about(drawn, is_counted),
        delivered=about(delivered, is_counted),
        tokens=tokens * times,
        trained=count_trained(stream, loader) * times,
        cut=cut * times,
    )


def measure_epoch(loader: Loader, batch: int | None = None) -> list[StreamInEpoch]:
    """The figures of an epoch for each stream; empty where Streaming refuses the weights.

    `batch`: rows that all devices draw together in a step. Without `batch`, no sample is counted as
    dropped.
    """
    drawn = count_loader_draws(loader) or []
    counts = zip(
        loader.streams, drawn, count_loader_delivered(loader, batch) or drawn, strict=False
    )
    return [measure_stream(stream, loader, n, came) for stream, n, came in counts]


EPOCH = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("an epoch", key="delivered"),
    Column("share", "share", key="share_of_samples"),
    Column("tokens"),
    Column("share", "share", key="share_of_tokens"),
)


def make_epoch_table(epoch: Sequence[StreamInEpoch]) -> Table:
    """A row for each stream, and the sum."""
    samples, tokens = (sum(getattr(s, name) for s in epoch) for name in ("delivered", "tokens"))
    rows = [
        (
            s.stream,
            s.samples,
            s.delivered,
            compute_share(s.delivered, samples),
            s.tokens,
            compute_share(s.tokens, tokens),
        )
        for s in epoch
    ]
    total = (
        "all",
        sum(s.samples for s in epoch),
        samples,
        1.0,
        tokens,
        compute_share(tokens, tokens),
    )
    return Table(columns=EPOCH, rows=rows, total=total)


def compute_share(part: float, whole: float) -> float | None:
    """The share of `part` in `whole`, 0 to 1; None where `whole` is unknown or 0."""
    return part / whole if is_known(whole) and whole else None


def apportion_recipe(recipe: Recipe, loader: Loader, may_estimate: bool) -> Apportioned:
    """The samples of each stream that a recipe's shares come to. `loader`: the recipe's loader,
    with its streams opened.

    Raises:
        MixRefused: a stream cannot give its share, or its tokens were not counted.
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
    parts = set_asked_shares(measured, Fraction(str(recipe.temperature)), recipe.absolute)
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
        parts=choose_samples(
            parts, budget, unit, Fraction(str(recipe.max_repeat)), recipe.absolute
        ),
    )


def _mean(
    stream: StreamInMix, loader: Loader, unit: Unit, may_estimate: bool
) -> tuple[Fraction, bool]:
    """The mean of the unit in a sample of the stream, such as 412.5 tokens, and whether it was
    counted.
    """
    samples = stream.index.samples
    if unit == "samples" or not samples:
        return Fraction(bool(samples)), True
    if unit == "tokens":
        held = count_tokens(stream, loader).kept
        # Earlier commits did not count the EOS that the loader appends, and such a stream is not
        # refused for that.
        is_counted = not isinstance(count_stored_tokens(stream, loader).kept, Estimate)
    else:
        held = count_trained(stream, loader)
        is_counted = not isinstance(held, Estimate)
    if not is_counted and not (may_estimate and is_known(held)):
        guess = "the loader itself tokenizes it"
        if is_known(held):
            guess = f"its first samples suggest {held / samples:,.1f} a sample, which --estimate takes for all of them"
        raise MixRefused(
            f"the {unit} of {stream.name} were not counted (it has no manifest, or one that is of another index, another max_seq_len, other "
            f"targets, or a padding token that is not EOS), and {guess}: convert the stream, or write count: samples and a budget of samples."
        )
    return Fraction(held) / samples, not isinstance(held, Estimate)
