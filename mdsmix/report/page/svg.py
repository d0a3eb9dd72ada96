"""Drawings of the page: bars of the streams and of lengths, windows of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from mdsmix.mix.epoch import share_of
from mdsmix.mix.plan.figures import Plan, StepPlan, StreamInRun
from mdsmix.mix.streams import Mix
from mdsmix.report.page import svg
from mdsmix.report.page.gather import Gathered
from mdsmix.table import Column, Estimate, is_known
from mdsmix.table import cell_text as told
from mdsmix.words import plural, printable

COLOURS, TEXTURES = 10, 4
THINNEST = 1.2
"Percent of the width that a bar of a histogram has at least."
MOST_TICKS = 7


def colour(number: int) -> str:
    """Classes of the stream with this number: a colour, and from the eleventh stream on a texture over it."""
    texture = number // COLOURS % TEXTURES
    return f"s{number % COLOURS}" + (f" t{texture}" if texture else "")


def _svg(name: str, label: str, height: int, inner: Iterable[Markup]) -> Markup:
    body = Markup("").join(inner)
    return Markup(
        '<svg class="{}" role="img" aria-label="{}" width="100%" height="{}">{}</svg>'
    ).format(name, printable(label), height, body)


def _rect(
    css: str, x: float, width: float, title: str = "", y: float = 0, height: float = 100
) -> Markup:
    told = Markup("<title>{}</title>").format(printable(title)) if title else Markup("")
    return Markup('<rect class="{}" x="{}%" y="{}%" width="{}%" height="{}%">{}</rect>').format(
        css, _n(x), _n(y), _n(width), _n(height), told
    )


def _n(number: float) -> str:
    return f"{number:.3f}".rstrip("0").rstrip(".")


def ribbon(label: str, parts: Sequence[tuple[str, float, str]], height: int = 26) -> Markup:
    """(class, share, title) side by side, 0 to 1 together."""
    drawn, at = list[Markup](), 0.0
    for css, share, title in parts:
        drawn.append(_rect(css, 100 * at, 100 * share, title))
        at += share
    return _svg("ribbon", label, height, [_rect("track", 0, 100), *drawn])


def bar(label: str, share: float, css: str, asked: float | None = None) -> Markup:
    """A share of the whole width, and a mark at what was asked for."""
    drawn = [_rect("track", 0, 100), _rect(css, 0, 100 * min(1.0, share))]
    if asked is not None:
        at = 100 * min(1.0, asked)
        drawn.append(
            Markup('<line class="asked" x1="{0}%" x2="{0}%" y1="0" y2="100%"/>').format(_n(at))
        )
    return _svg("bar", label, 12, drawn)


def histogram(
    label: str, counts: Mapping[int, int], longest: int, limit: int | None, is_cut: bool, css: str
) -> Markup:
    """Samples by powers of two of their length; a line at `limit` tokens, and what may lie beyond it hatched."""
    if not counts:
        return Markup("")
    low, high = min(counts), max(counts) + 1
    if limit:
        low = min(low, math.floor(math.log2(limit)))
        high = max(high, math.ceil(math.log2(limit)))
    low -= 1 if longest == 1 << low else 0

    def at(tokens: float) -> float:
        return 100 * (math.log2(max(1.0, tokens)) - low) / (high - low)

    most, plot = max(counts.values()), list[Markup]()
    total = sum(counts.values())
    for power, count in counts.items():
        first, last = 1 << power, min((2 << power) - 1, longest)
        left, right = at(first), at(min(last + 1, 2 << power))
        if last == first and limit and last <= limit:  # a spike at the limit is within it
            left, right = at(first) - THINNEST, at(first)
        height = 100 * max(count / most, 0.012) if count else 0
        said = f"{first:,} to {last:,} tokens: {plural(count, 'sample')} ({count / total:.1%})"
        width = max(right - left, THINNEST)
        plot.append(_rect(css, left, width, said, 100 - height, height))
        if is_cut and limit and at(limit) < left + width:
            from_ = max(left, at(limit))
            plot.append(_rect("hatch", from_, left + width - from_, "", 100 - height, height))
    if limit:
        plot.append(
            Markup('<line class="limit" x1="{0}%" x2="{0}%" y1="0" y2="100%"/>').format(
                _n(at(limit))
            )
        )
    inner = Markup('<svg y="16" width="100%" height="104">{}</svg>').format(Markup("").join(plot))
    axis = Markup('<line class="axis" x1="0" x2="100%" y1="120" y2="120"/>')
    return _svg("histogram", label, 142, [inner, axis, *_ticks(low, high), *_limit(limit, at)])


def _ticks(low: int, high: int) -> Iterable[Markup]:
    step = max(1, math.ceil((high - low) / MOST_TICKS))
    for power in range(low, high + 1, step):
        place = 100 * (power - low) / (high - low)
        anchor = "start" if place < 4 else "end" if place > 96 else "middle"
        yield Markup('<text class="tick" x="{}%" y="136" text-anchor="{}">{}</text>').format(
            _n(place), anchor, _short(1 << power)
        )


def _limit(limit: int | None, at: Callable[[float], float]) -> Iterable[Markup]:
    if limit:
        place = at(limit)
        anchor, shift = ("end", -5) if place > 50 else ("start", 5)
        yield Markup(
            '<text class="limit" x="{}%" dx="{}" y="11" text-anchor="{}">max_seq_len {:,}</text>'
        ).format(_n(place), shift, anchor, limit)


def _short(tokens: int) -> str:
    """1,024 as 1K, as lengths of powers of two are spoken of."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)


def windows(
    label: str, shares: Sequence[Sequence[float]], titles: Sequence[Sequence[str]]
) -> Markup:
    """A column a window of steps, its streams from the bottom up."""
    wide, drawn = 100 / max(1, len(shares)), list[Markup]()
    for number, column in enumerate(shares):
        top = 100.0
        for stream, share in enumerate(column):
            top -= 100 * share
            title = titles[number][stream]
            drawn.append(_rect(colour(stream), wide * number, wide, title, top, 100 * share))
    return _svg("windows", label, 150, drawn)


def swatch(css: str) -> Markup:
    """What a legend shows of a colour."""
    return Markup(
        '<svg class="swatch" aria-hidden="true" width="12" height="12"><rect class="{}" width="12" height="12" rx="3"/></svg>'
    ).format(escape(css))


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
