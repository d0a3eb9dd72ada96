"""The mix as bars: how much of an epoch each stream gives, and how much of a step is trained, read and padded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mdsmix.mix.epoch import share_of
from mdsmix.mix.plan.figures import Plan, StepPlan, StreamInRun
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


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of a stream in an epoch, drawn."""

    what: str
    text: Markup
    share: float | None
    "Of the epoch; None: not known."
    drawing: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class MixRow:
    """A stream of the mix."""

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
    """A row for each stream of the train loader, by the plan."""
    streams = page.plan.streams if page.plan else ()
    for number, stream in enumerate(streams):
        css, asked, parts = colours[stream.stream], _asked(page.mix, stream.stream), list[Bar]()
        for key, what, unit in MEASURES:
            value = getattr(stream, key)
            share = share_of(value, sum(getattr(each, key) for each in streams))
            drawing = svg.bar(f"{stream.stream}: {what}", share or 0.0, css, asked.get(unit))
            text = figure(value, "count", f"streams.{number}.{key}")
            parts.append(Bar(what, text, share, drawing))
        yield MixRow(stream=stream.stream, css=css, said=_said(stream), parts=parts)


def ribbons(rows: Sequence[MixRow]) -> Iterator[tuple[str, Markup]]:
    """(figure, all streams side by side) of the whole epoch, if the figure is known of all streams."""
    for bars in zip(*(row.parts for row in rows), strict=True):
        shares = [bar.share for bar in bars if bar.share is not None]
        if len(shares) == len(rows):
            said = [f"{r.stream}: {share:.1%}" for r, share in zip(rows, shares, strict=True)]
            parts = list(zip([row.css for row in rows], shares, said, strict=True))
            what = bars[0].what
            yield what, svg.ribbon(f"{what} of an epoch: {', '.join(said)}", parts)


def _said(stream: StreamInRun) -> str:
    passes = f"{told(PASSES, stream.passes)} passes"
    return passes if stream.state == "published" else f"not converted yet, {passes}"


def _asked(mix: Mix | None, stream: str) -> dict[str, float]:
    """{what the shares are of: the share that the recipe asks for this stream}; {} without one."""
    if mix is None or mix.shares is None:
        return {}
    asked = {part.stream: float(part.asked) for part in mix.shares.parts}
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
