"""A stream's samples as text, with the trained tokens marked.

A sample is a row of segments, each trained or not, as its kind says by the target policies of the manifest; the finetuning
loader's labels follow the same rule. The first token of a row is never predicted, so it is never marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mdsmix.kinds import Piece

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens that are all trained, or all not."""

    ids: list[int]
    is_trained: bool


def segments(pieces: Iterable[Piece]) -> list[Segment]:
    """The segments of a stored sample, whose pieces its kind tells."""
    tokens = [(int(token), trained) for ids, trained in pieces for token in ids]
    flags = [trained and place > 0 for place, (_, trained) in enumerate(tokens)]
    paired = zip((token for token, _ in tokens), flags, strict=True)
    return [Segment([t for t, _ in run], flag) for flag, run in groupby(paired, lambda p: p[1])]


def marked(parts: Sequence[Segment], decode: Decode | None) -> str:
    """Plain text with the trained tokens in ⟦ ⟧; ids where there is no tokenizer to decode them."""
    return "".join(
        f"⟦{text}⟧" if part.is_trained else text for part in parts for text in [_text(part, decode)]
    )


def _text(part: Segment, decode: Decode | None) -> str:
    return decode(part.ids) if decode else " ".join(map(str, part.ids)) + " "
