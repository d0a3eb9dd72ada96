"""The mix as bars: how much of an epoch each stream gives, and how much of a step is trained, read and padded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from mdsmix.mix.epoch import share_of
from mdsmix.mix.plan.figures import Plan, StepPlan, StreamPlan
from mdsmix.mix.streams import Mix
from mdsmix.report.page import svg
from mdsmix.report.page.gather import Gathered
from mdsmix.table import Column, Estimate, is_known
from mdsmix.table import cell_text as told

PASSES = Column("", "times")
MEASURES = (
    ("delivered", "samples", "samples"),
    ("tokens", "tokens", "tokens"),
    ("trained", "trained tokens", "loss_tokens"),
)
"Fields of a stream in an epoch, in words, and as shares count them."


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


def figure(found: float, form: str, name: str = "") -> Markup:
    """A figure of the plan as `plan` spells it; for programs with its value."""
    text, is_exact = told(Column("", form), found), not isinstance(found, Estimate)
    value = f"{float(found)!r}" if is_known(found) else ""
    return Markup('<data value="{}" data-figure="{}" title="{}">{}</data>').format(
        value, name, "exact" if is_exact else "estimated", text
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
    streams = page.plan.streams if page.plan else ()
    sums = {key: sum(getattr(each, key) for each in streams) for key, _, _ in MEASURES}
    return [
        StreamBars(
            each.stream,
            _said(each),
            [
                Measure(
                    unit,
                    what,
                    figure(getattr(each, key), "count", f"streams.{number}.{key}"),
                    share_of(getattr(each, key), sums[key]),
                )
                for key, what, unit in MEASURES
            ],
        )
        for number, each in enumerate(streams)
    ]


def _said(stream: StreamPlan) -> str:
    passes = f"{told(PASSES, stream.passes)} passes"
    return passes if stream.state == "published" else f"not converted yet, {passes}"


def _asked(mix: Mix | None, stream: str) -> dict[str, float]:
    """{what the shares are of: the share that the recipe asks for this stream}; {} without one."""
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
    positions = step.positions
    if not positions:
        return
    tokens = min(step.tokens, positions) if is_known(step.tokens) else 0.0
    if not is_known(step.trained):
        yield "tokens", "read", tokens / positions
    else:
        yield "trained tokens", "trained", step.trained / positions
        yield "other tokens", "read", max(0.0, tokens - step.trained) / positions
    yield "padding", "padding", 1 - tokens / positions
