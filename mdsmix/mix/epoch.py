"""What an epoch comes to, in samples and in tokens.

Weights count samples, never tokens: `proportion: 0.5` for short chats beside 2,048-token rows is far from half of the tokens, so both
shares are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdsmix.mix.draws import delivered_of, draws_of
from mdsmix.mix.stream_counts import row_length, tokens_of, trained_of
from mdsmix.mix.streams import Loader, StreamInMix
from mdsmix.table import Column, Table, about, is_known


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
    samples = stream.index.samples
    # Which rows a part of a pass draws is left to chance: unless they are alike, what they hold is a mean.
    is_exact = not samples or delivered % samples == 0 or row_length(stream) is not None
    times = about(delivered / max(1, samples), is_exact)
    is_counted = stream.survey is None
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
    came = delivered_of(loader, batch) or drawn
    return [
        in_epoch(stream, loader, *counts)
        for stream, *counts in zip(loader.streams, drawn, came, strict=False)
    ]


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
