"""The figures of a run's streams, from the plan and from what was counted: shares, passes and mean
losses, and the names under which loggers get them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mdsmix.frozen import frozen

MEASURES = ("samples", "tokens", "trained")
"""The measures that have a share. `trained` counts the positions that give a loss: a row's first
token gives none, since nothing predicts it.
"""


@frozen(kw_only=True)
class PlannedStream:
    """A stream as the run's YAML weights it. Figures of tokens are None if they are not known, as
    for a stream without a manifest.
    """

    name: str
    size: int
    "Samples in the stream."
    samples: int
    "Samples that an epoch draws."
    tokens: float | None = None
    "Tokens of these samples as they are trained, without padding."
    trained: float | None = None
    "Positions of these samples that give a loss."


@frozen(kw_only=True)
class StreamCount:
    """What a run has trained on from one stream, on all ranks."""

    samples: int = 0
    "Samples whose row was trained."
    tokens: int = 0
    "Their tokens, without padding."
    trained: int = 0
    "Their positions that gave a loss."
    loss: float = 0.0
    "The sum of the losses of these positions, in nats."

    def __sub__(self, earlier: StreamCount) -> StreamCount:
        return StreamCount(
            samples=self.samples - earlier.samples,
            tokens=self.tokens - earlier.tokens,
            trained=self.trained - earlier.trained,
            loss=self.loss - earlier.loss,
        )


Counts = Mapping[str, StreamCount]
"Name of a stream -> what was counted."
NOTHING = StreamCount()


class StreamFigures(NamedTuple):
    """The figures of one stream at one step of a run. A figure that is not known is None."""

    samples: int
    tokens: int
    trained: int
    passes: float | None
    "How often the run has read the stream: samples / samples in the stream."
    loss: float | None
    """The mean loss in nats since the figures were last logged; None if no position of the stream
    was trained since then, or if losses are not counted.
    """
    mean_loss: float | None
    "The mean loss since the run began."
    shares: Mapping[str, float | None]
    "Measure of MEASURES -> share of the stream in what the run has trained, 0 to 1."
    planned: Mapping[str, float | None]
    "The same shares in an epoch, as the YAML weights the streams."


def compute_planned_shares(streams: Sequence[PlannedStream]) -> dict[str, dict[str, float | None]]:
    """Return name of a stream -> measure -> its share of an epoch; None if a figure is unknown."""
    shares: dict[str, dict[str, float | None]] = {stream.name: {} for stream in streams}
    for measure in MEASURES:
        amounts = {stream.name: getattr(stream, measure) for stream in streams}
        is_known = None not in amounts.values()
        total = sum(amounts.values()) if is_known else 0
        for name, amount in amounts.items():
            shares[name][measure] = amount / total if total else None
    return shares


def compute_figures(
    streams: Sequence[PlannedStream], counts: Counts, logged: Counts, with_losses: bool
) -> dict[str, StreamFigures]:
    """Return the figures of each stream.

    Args:
        streams: the streams of the run.
        counts: what was counted since the run began. It may have streams that the run, resumed on
            other data, no longer has.
        logged: what was counted when figures were last logged.
        with_losses: whether losses were counted.
    """
    planned = compute_planned_shares(streams)
    sizes = {stream.name: stream.size for stream in streams}
    totals = dict[str, int]()
    for measure in MEASURES:
        totals[measure] = sum(getattr(count, measure) for count in counts.values())
    figures = {}
    for name, count in counts.items():
        shares = {}
        for measure, total in totals.items():
            shares[measure] = getattr(count, measure) / total if total else None
        since_logged = count - logged.get(name, NOTHING)
        size = sizes.get(name)
        figures[name] = StreamFigures(
            samples=count.samples,
            tokens=count.tokens,
            trained=count.trained,
            passes=count.samples / size if size else None,
            loss=_mean_loss(since_logged) if with_losses else None,
            mean_loss=_mean_loss(count) if with_losses else None,
            shares=shares,
            planned=planned.get(name, {}),
        )
    return figures


def _mean_loss(count: StreamCount) -> float | None:
    """Return the mean loss of the trained positions, in nats; None if no position was trained."""
    return count.loss / count.trained if count.trained else None


def make_metrics(figures: Mapping[str, StreamFigures]) -> dict[str, float]:
    """Return the figures as a logger takes them: `mdsmix/<stream>/<figure>` -> number. Figures that
    are not known are left out.

    >>> one = StreamFigures(2, 8, 6, None, 1.5, None, {"tokens": 1.0}, {})
    >>> make_metrics({"web": one})["mdsmix/web/loss"]
    1.5
    """
    metrics = {}
    for name, stream in figures.items():
        values = {
            "samples": stream.samples,
            "tokens": stream.tokens,
            "trained_tokens": stream.trained,
            "passes": stream.passes,
            "loss": stream.loss,
            "mean_loss": stream.mean_loss,
        }
        for measure in MEASURES:
            values[f"{measure}_share"] = stream.shares.get(measure)
            values[f"planned_{measure}_share"] = stream.planned.get(measure)
        for figure, value in values.items():
            if value is not None:
                metrics[f"mdsmix/{name}/{figure}"] = value
    return metrics
