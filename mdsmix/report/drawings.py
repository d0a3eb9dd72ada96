"""Drawings of figures, which the page of `mdsmix report` and a notebook have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mdsmix.frozen import frozen
from mdsmix.shards.counts import Records

COLOURS = 10
"Colours of streams. The eleventh has the first colour again; names tell them apart."


@frozen
class Ribbon:
    """A bar that is divided into the shares of a whole."""

    label: str
    parts: Sequence[tuple[str, str, float]]
    "(label, class of the style sheet, count). A stream has the same class everywhere."

    @property
    def rects(self) -> Iterator[tuple[str, str, float, float]]:
        """Yield (label, class, left edge in percent, width in percent) of each share."""
        total = sum(count for _, _, count in self.parts) or 1
        start = 0.0
        for label, css, count in self.parts:
            share = count / total
            yield f"{label}: {share:.1%}", css, 100 * start, 100 * share
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
    parts = [(f"written, {records.written:,}", css, float(records.written))]
    for reason, count in records.filtered.items():
        parts.append((f"filtered, {reason}, {count:,}", "filtered", float(count)))
    for reason, count in records.quarantined.items():
        parts.append((f"quarantined, {reason}, {count:,}", "bad", float(count)))
    return Ribbon(label, parts)
