"""The mix as bars: what an epoch holds of each stream, and what the positions of a step hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from mdsmix.mix.plan.figures import Figure, Plan, StepPlan, StreamPlan
from mdsmix.mix.streams import Mix
from mdsmix.report.page import svg
from mdsmix.report.page.gather import Gathered
from mdsmix.table import Column
from mdsmix.table import shown as told

PASSES = Column("", "times")


class Measure(NamedTuple):
    """One bar of a stream."""

    key: str
    "What shares may be of: `samples`, `tokens`, `loss_tokens`."
    what: str
    text: Markup | str
    share: float | None
    "Of the epoch; None where it is not known."


class StreamBars(NamedTuple):
    """A stream in an epoch."""

    stream: str
    said: str
    measures: Sequence[Measure]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar, drawn."""

    what: str
    text: Markup | str
    share: float | None
    drawing: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class MixRow:
    """A stream in the mix."""

    stream: str
    css: str
    said: str
    parts: Sequence[Bar]


def figure(found: Figure, form: str, name: str = "") -> Markup:
    """A figure of the plan as `plan` spells it; for programs with its value and what it rests on."""
    text = told(Column("", form), found.shown)
    value = "" if found.value is None else f"{found.value!r}"
    return Markup('<data value="{}" data-figure="{}" title="{}">{}</data>').format(
        value, name, found.basis, text
    )


def mix_rows(page: Gathered, colours: Mapping[str, str]) -> Iterator[MixRow]:
    """A row a stream of the train loader."""
    for name, said, measures in _measured(page):
        css, asked = colours[name], _asked(page.mix, name)
        parts = [
            Bar(what, text, share, svg.bar(f"{name}: {what}", share or 0.0, css, asked.get(key)))
            for key, what, text, share in measures
        ]
        yield MixRow(stream=name, css=css, said=said, parts=parts)


def ribbons(page: Gathered, colours: Mapping[str, str]) -> Iterator[tuple[str, Markup]]:
    """The whole epoch: (what is measured, all streams side by side), where it is known of all."""
    streams = [each.stream for each in _measured(page)]
    for measures in zip(*(each.measures for each in _measured(page)), strict=False):
        shares = [measure.share for measure in measures if measure.share is not None]
        if len(shares) == len(streams):
            yield measures[0].what, _ribbon(measures[0].what, streams, shares, colours)


def _ribbon(
    what: str, streams: Sequence[str], shares: Sequence[float], colours: Mapping[str, str]
) -> Markup:
    told = [f"{name}: {share:.1%}" for name, share in zip(streams, shares, strict=True)]
    css = [colours[name] for name in streams]
    parts = list(zip(css, shares, told, strict=True))
    return svg.ribbon(f"{what} of an epoch: {', '.join(told)}", parts)


def _measured(page: Gathered) -> list[StreamBars]:
    """By the plan."""
    if page.plan is None:
        return []
    return [_planned(n, each, page.plan.step) for n, each in enumerate(page.plan.streams)]


def _planned(number: int, stream: StreamPlan, step: StepPlan) -> StreamBars:
    passes = f"{told(PASSES, stream.passes.shown)} passes"
    said = passes if stream.state == "published" else f"not converted yet, {passes}"
    measures = (
        ("samples", "samples", "epoch_samples", step.samples),
        ("tokens", "tokens", "epoch_tokens", step.epoch_tokens),
        ("loss_tokens", "trained tokens", "epoch_trained", step.epoch_trained),
    )
    of = [(key, what, name, getattr(stream, name), whole) for key, what, name, whole in measures]
    return StreamBars(
        stream.stream,
        said,
        [
            Measure(
                key, what, figure(found, "count", f"streams.{number}.{name}"), _part(found, whole)
            )
            for key, what, name, found, whole in of
        ],
    )


def _part(found: Figure, of: Figure) -> float | None:
    return found.value / of.value if found.value is not None and of.value else None


def _asked(mix: Mix | None, stream: str) -> dict[str, float]:
    """What shares were asked of -> how much, of this stream."""
    if mix is None or mix.shares is None:
        return {}
    asked = {part.stream: part.asked for part in mix.shares.parts}
    return {mix.shares.count: asked[stream]} if stream in asked else {}


def positions_of(plan: Plan | None) -> dict[str, Any] | None:
    """What the positions of a step hold, drawn."""
    if plan is None:
        return None
    row = list(_row(plan.step))
    said = [f"{what} {share:.1%}" for what, _, share in row]
    parts = [(css, share, text) for (_, css, share), text in zip(row, said, strict=True)]
    return {
        "row": row,
        "ribbon": svg.ribbon(f"the positions of a step: {', '.join(said)}", parts, 34),
    }


def _row(step: StepPlan) -> Iterator[tuple[str, str, float]]:
    """(words, class, share of the positions)."""
    positions, trained = step.positions.known, step.trained.value
    if not positions:
        return
    tokens = min(step.tokens.known, positions)
    if trained is None:
        yield "tokens", "read", tokens / positions
    else:
        yield "trained tokens", "trained", trained / positions
        yield "other tokens", "read", max(0.0, tokens - trained) / positions
    yield "padding", "padding", 1 - tokens / positions
