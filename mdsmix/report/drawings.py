"""Drawings of figures, which the page of `mdsmix report` and a notebook have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mdsmix.frozen import frozen
from mdsmix.shards.counts import Records

COLOURS = 10
"Colours of streams. The eleventh has the first colour again; names tell them apart."


class RibbonPart(NamedTuple):
    """A part of a ribbon."""

    label: str
    css: str
    "Its class in the style sheet. A stream has the same class everywhere."
    amount: float
    "Such as tokens. The width of the part is in proportion to it."


class Rectangle(NamedTuple):
    """A part of a ribbon as it is drawn."""

    label: str
    "The part's label, with its share: `web: 12.5%`."
    css: str
    start: float
    "The left edge, in percent of the ribbon's width."
    width: float
    "In percent of the ribbon's width."


@frozen
class Ribbon:
    """A bar that is divided into the shares of a whole."""

    label: str
    parts: Sequence[RibbonPart]

    @property
    def rects(self) -> Iterator[Rectangle]:
        """Yield the rectangle of each part, from left to right."""
        total = sum(part.amount for part in self.parts) or 1
        start = 0.0
        for part in self.parts:
            share = part.amount / total
            yield Rectangle(f"{part.label}: {share:.1%}", part.css, 100 * start, 100 * share)
            start += share


def choose_colours(names: Iterable[str]) -> dict[str, str]:
    """Map each stream to a class of the style sheet, `s0` to `s9`."""
    return {name: f"s{number % COLOURS}" for number, name in enumerate(names)}


def make_records_ribbon(label: str, records: Records, css: str) -> Ribbon:
    """Return a ribbon of the written, filtered and quarantined records of a stream.

    Args:
        label: the text next to the ribbon.
        records: the counts.
        css: the class of the stream's colour.
    """
    parts = [RibbonPart(f"written, {records.written:,}", css, records.written)]
    for reason, count in records.filtered.items():
        parts.append(RibbonPart(f"filtered, {reason}, {count:,}", "filtered", count))
    for reason, count in records.quarantined.items():
        parts.append(RibbonPart(f"quarantined, {reason}, {count:,}", "bad", count))
    return Ribbon(label, parts)
