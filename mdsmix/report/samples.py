"""A stream's first samples as text, with the trained tokens marked.

A sample is a row of segments, each trained or not, as its kind says by the target policies of the manifest; the finetuning
loader's labels follow the same rule. The first token of a row is never predicted, so it is never marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mdsmix.kinds import Piece, kind_of, stored_pieces
from mdsmix.shards.index import Index
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.sample import read_head
from mdsmix.shards.turns import layout_of
from mdsmix.storage import Location

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens that are all trained, or all not."""

    ids: list[int]
    is_trained: bool


Sample = list[Segment] | Mapping[str, Any]
"A sample of token ids, or one of other columns (raw text, bytes) as it is."


def first_samples(
    folder: Location, index: Index, manifest: Manifest | None, count: int
) -> Iterator[Sample]:
    """The first samples of a published stream."""
    encoding = manifest.encoding if manifest else None
    for sample in read_head(folder, index.shards[0], count) if index.shards and count else ():
        if not _has_tokens(sample):
            yield sample
        elif encoding is None:  # by LLM-Foundry's default policies
            yield segments(stored_pieces(sample))
        else:
            yield segments(kind_of(encoding).pieces(sample, encoding))


def _has_tokens(sample: Mapping[str, Any]) -> bool:
    """Whether the layout is one of ours: bytes columns and raw text are shown as they are."""
    names = layout_of(sample)
    return bool(names) and not any(isinstance(sample[name], bytes) for name in names)


def segments(pieces: Iterable[Piece]) -> list[Segment]:
    """The segments of a stored sample, whose pieces its kind tells."""
    tokens = [(int(token), trained) for ids, trained in pieces for token in ids]
    flags = [trained and place > 0 for place, (_, trained) in enumerate(tokens)]
    paired = zip((token for token, _ in tokens), flags, strict=True)
    return [Segment([t for t, _ in run], flag) for flag, run in groupby(paired, lambda p: p[1])]


def shown(sample: Sample, decode: Decode | None) -> str:
    """The sample for a person, without what steers a terminal: it comes from anyone's data."""
    return printable(str(sample) if isinstance(sample, Mapping) else marked(sample, decode))


def printable(text: str) -> str:
    """The text without what steers a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def marked(parts: Sequence[Segment], decode: Decode | None) -> str:
    """Plain text with the trained tokens in ⟦ ⟧; ids where there is no tokenizer to decode them."""
    return "".join(
        f"⟦{text}⟧" if part.is_trained else text for part in parts for text in [_text(part, decode)]
    )


def sample_json(sample: Sample, decode: Decode | None) -> Any:
    """The sample for programs: its segments with ids and text, or its columns."""
    if isinstance(sample, Mapping):
        return {
            name: value if isinstance(value, str) else repr(value) for name, value in sample.items()
        }
    return [
        {"ids": part.ids, "trained": part.is_trained, "text": decode(part.ids) if decode else None}
        for part in sample
    ]


def _text(part: Segment, decode: Decode | None) -> str:
    return decode(part.ids) if decode else " ".join(map(str, part.ids)) + " "
