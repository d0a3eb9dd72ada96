"""How long the samples of a stream are, as bars of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

BAR = 24
"Characters of the longest bar: with the bounds and the count, a line keeps within 80."
EIGHTHS = " ▏▎▍▌▋▊▉"


def by_power(lengths: Mapping[str, int]) -> dict[int, int]:
    """The manifest's histogram from short to long, gaps filled: {k: samples of 2^k to 2^(k+1) - 1 tokens}."""
    found = {int(key.removeprefix("2^")): count for key, count in lengths.items()}
    return {k: found.get(k, 0) for k in range(min(found), max(found) + 1)} if found else {}


def bars(lengths: Mapping[str, int], longest: int) -> Iterator[str]:
    """A line for each power of two: the bounds in tokens, a bar, the samples and their share."""
    counts = by_power(lengths)
    total, most = sum(counts.values()), max(counts.values(), default=0)
    bounds = [_bounds(1 << k, min((2 << k) - 1, longest)) for k in counts]
    wide = max(map(len, bounds), default=0)
    for bound, count in zip(bounds, counts.values(), strict=True):
        yield f"{bound:>{wide}}  {_bar(count / most):<{BAR}} {count:,} ({count / total:.1%})"


def _bounds(low: int, high: int) -> str:
    return f"{low:,}-{high:,}" if low < high else f"{low:,}"


def _bar(part: float) -> str:
    """At least an eighth of a character, so that what is rare is seen."""
    eighths = max(round(part * BAR * 8), part > 0)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
