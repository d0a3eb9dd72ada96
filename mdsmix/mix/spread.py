"""How far an epoch's tokens of a stream may be from what is planned: rows of unequal length are drawn at random.

Of n rows, the m of a partial pass are drawn without replacement, so their sum has the standard deviation s * sqrt(m * (1 - m/n)),
s being that of all rows. A manifest counts rows by powers of two of their length, and their tokens altogether. That does not
give s; it gives the largest s that rows so counted can have, and so a bound that holds, some tenths above the figure itself. Rows of
one length have 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mdsmix.shards.counts import Totals
from mdsmix.shards.manifest import Encoding

Rows = tuple[int, int, int]
"Rows, and the least and the most that each of them holds."


def of_draw(deviation: float, drawn: int, samples: int) -> float:
    """Standard deviation of what `drawn` rows hold, where one row's is `deviation`: whole passes have none."""
    partial = drawn % samples if samples else 0
    return deviation * math.sqrt(partial * (1 - partial / samples)) if partial else 0.0


def of_shares(held: Sequence[float], deviations: Sequence[float]) -> list[float]:
    """Standard deviations of the shares of a sum, to first order, from those of its parts, which are drawn apart."""
    total = sum(held) or 1.0
    squares = sum(d**2 for d in deviations)
    return [
        math.hypot((1 - own / total) * d, own / total * math.sqrt(max(0.0, squares - d**2))) / total
        for own, d in zip(held, deviations, strict=True)
    ]


def most_of_tokens(totals: Totals, encoding: Encoding) -> float:
    """The largest standard deviation of a row's tokens, as the loader cuts it."""
    return most(_rows(totals, encoding), totals.seen_tokens)


def most_of_losses(totals: Totals, encoding: Encoding, has_targets: bool) -> float:
    """The same of its tokens with a loss: all but the first, or any number of them, up to its length."""
    if not has_targets:
        return most_of_tokens(totals, encoding)
    rows = [(n, 0, most) for n, _, most in _rows(totals, encoding)]
    return most(rows, totals.loss_tokens)


def most(rows: Sequence[Rows], total: int) -> float:
    """The largest standard deviation of values within these bounds that sum to `total`.

    Squares sum to most where the values with the largest bounds are at the upper one and the others at the lower one.
    """
    count = sum(n for n, _, _ in rows)
    if count < 2:
        return 0.0
    squares = sum(n * low**2 for n, low, _ in rows)
    left = total - sum(n * low for n, low, _ in rows)
    for n, low, high in sorted(rows, key=lambda each: -(each[1] + each[2])):
        moved = max(0, min(left, n * (high - low)))
        squares += moved * (low + high)
        left -= moved
    return math.sqrt(max(0, squares * count - total**2) / (count * (count - 1)))


def _rows(totals: Totals, encoding: Encoding) -> list[Rows]:
    if (
        totals.image_tokens
    ):  # lengths count one token an image; rows that would not fit with theirs are left out
        return [(totals.samples, 0, encoding.max_seq_len)]
    sides = 1 if encoding.decoder_only_format else 2
    top = min(totals.longest, sides * encoding.max_seq_len) if totals.cut_rows else totals.longest
    powers = [(int(key.removeprefix("2^")), n) for key, n in totals.lengths.items()]
    known = [(n, min(top, 2**k), min(top, 2 ** (k + 1) - 1)) for k, n in powers]
    uncounted = totals.samples - sum(n for n, _, _ in known)
    return known + ([(uncounted, 0, top)] if uncounted > 0 else [])
