"""What the streams of a mix share, by their marks (`mdsmix.overlap`): findings of `mdsmix check`, which refuse nothing.

A mark is one small file a stream. Streams that have none are read where that takes about a second, or where all of them are read
anyway (`--deep`); of all others it is said that they were not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from mdsmix.errors import Unreachable
from mdsmix.mix.findings import Finding
from mdsmix.mix.streams import Mix, Stream, distinct
from mdsmix.overlap.estimate import Estimate, containment
from mdsmix.overlap.marks import Mark, Merged
from mdsmix.overlap.stored import read_mark, work_out
from mdsmix.storage import together

OFFHAND_BYTES = 1 << 27
"128 MiB of shards without marks are read by each check: 0.3 s, of turns in JSON 3 s."
BETWEEN, OF_EVALUATION = 0.1, 0.05
"Shares that are told, where they are that large by twice their error."
UNREAD = "no mark of all of it, and {:,} bytes to read; `mdsmix check --deep` reads them"
WHY = "It is a lower bound, of one tokenizer: what is worded anew is not seen. And any two texts of a kind share phrases."


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two streams, of which one is looked for in the other."""

    stream: str
    within: str
    places: tuple[str, str]
    "The folders of both."
    is_evaluation: bool
    "Whether the first is one, and the other is trained on."
    estimate: Estimate

    @property
    def is_told(self) -> bool:
        told = OF_EVALUATION if self.is_evaluation else BETWEEN
        return not self.estimate.is_few and self.estimate.share - 2 * self.estimate.error > told


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What was compared, and what was not."""

    pairs: tuple[Pair, ...] = ()
    unseen: tuple[tuple[str, str], ...] = ()
    "Streams, and why each was not looked at."


def find_overlap(mix: Mix, evaluations: Sequence[Stream] = ()) -> Overlap:
    """Compares all streams that are trained with each other, and evaluations with those. `evaluations`: beside those of the mix."""
    trained = distinct(mix.train.streams)
    both = [*trained, *distinct([*mix.evaluations, *evaluations])]
    if len(both) < 2:
        return Overlap()
    marks = _marks(both, is_deep=bool(mix.verified))
    merged = {id(s): mark.merged for s, mark in marks if isinstance(mark, Mark)}
    pairs = tuple(
        _pair(one, other, one not in trained, merged)
        for one, other in permutations(both, 2)
        if other in trained and id(one) in merged and id(other) in merged
    )
    return Overlap(pairs=pairs, unseen=tuple((s.name, m) for s, m in marks if isinstance(m, str)))


def _pair(one: Stream, other: Stream, is_evaluation: bool, merged: dict[int, Merged]) -> Pair:
    return Pair(
        stream=one.name,
        within=other.name,
        places=(str(one.folder), str(other.folder)),
        is_evaluation=is_evaluation,
        estimate=containment(merged[id(one)], merged[id(other)]),
    )


def _marks(streams: Sequence[Stream], is_deep: bool) -> list[tuple[Stream, Mark | str]]:
    """Each stream's mark, or why there is none."""
    found = list[tuple[Stream, Mark | str]]()
    left = OFFHAND_BYTES
    hashes = [s.trusted_manifest.tokenizer.hash for s in streams if s.trusted_manifest]
    known = together(lambda stream: _known(stream, (hashes or [""])[0]), streams)
    for stream, mark in sorted(
        zip(streams, known, strict=True), key=lambda pair: pair[0].index.bytes
    ):
        size = stream.index.bytes
        if mark is None and (is_deep or (not stream.folder.is_s3 and size <= left)):
            left -= size
            found.append((stream, _worked_out(stream)))
        elif mark is None:
            found.append((stream, UNREAD.format(size)))
        else:
            found.append((stream, mark))
    return found


def _worked_out(stream: Stream) -> Mark | str:
    try:
        mark = work_out(stream.folder, stream.index, stream.trusted_manifest)
    except Unreachable:  # whether shards are there and whole is for other checks to say
        return "not all of its shards can be read"
    return mark or "its columns hold no token ids"


def _known(stream: Stream, tokenizer: str) -> Mark | str | None:
    """What is there of its mark; None: nothing. A text where it could not be compared."""
    if stream.trusted_manifest is None:
        return "no manifest says which tokenizer made its ids"
    if stream.trusted_manifest.tokenizer.hash != tokenizer:
        return "its ids are of another tokenizer"
    return read_mark(stream.folder, stream.index, stream.trusted_manifest)


def findings(overlap: Overlap) -> Iterator[Finding]:
    """One for each evaluation and stream; of a stream that is trained, for the other that holds most of it."""
    for pair in overlap.pairs:
        if pair.is_told and (pair.is_evaluation or _is_largest(pair, overlap.pairs)):
            yield _finding(pair)


def _is_largest(pair: Pair, pairs: Sequence[Pair]) -> bool:
    """Whether no other stream holds more of this one, and the other way round no more is shared."""
    mine = pair.estimate.share
    if any(p.stream == pair.stream and p.estimate.share > mine for p in pairs):
        return False
    its = [p.estimate.share for p in pairs if (p.stream, p.within) == (pair.within, pair.stream)]
    return (mine, pair.within) > (max(its), pair.stream)


def _finding(pair: Pair) -> Finding:
    each = pair.estimate
    command = f"mdsmix leaks {pair.places[1]} --eval {pair.places[0]}"
    return Finding(
        id="overlap-evaluation" if pair.is_evaluation else "overlap-streams",
        severity="warning" if pair.is_evaluation else "note",
        streams=(pair.stream, pair.within),
        message=f"about {each.share:.1%} (± {each.error:.1%}) of the different 8-grams of {pair.stream} stand in {pair.within} too, "
        f"{each.found:,} of {each.of:,} that were kept of them.",
        why=WHY,
        fix=f"`{command}` looks at all of both and shows the passages; nothing is deleted.",
    )


def said(overlap: Overlap) -> list[str]:
    """What was not looked at, and what could not be told."""
    few = dict.fromkeys(pair.stream for pair in overlap.pairs if pair.estimate.is_few)
    lines = [f"overlap not looked at: {name}: {why}" for name, why in overlap.unseen]
    if few:
        lines.append(
            f"overlap: too little text for an estimate of {', '.join(few)}, which takes about 25,000 tokens; `mdsmix leaks` with --eval looks at all of it"
        )
    return lines


def overlap_json(overlap: Overlap) -> dict[str, Any]:
    """For machines: every pair, told or not."""
    return {
        "pairs": [
            {
                "stream": pair.stream,
                "within": pair.within,
                "is_evaluation": pair.is_evaluation,
                "share": None if pair.estimate.is_few else pair.estimate.share,
                "error": None if pair.estimate.is_few else pair.estimate.error,
                "found": pair.estimate.found,
                "of": pair.estimate.of,
            }
            for pair in overlap.pairs
        ],
        "unseen": [{"stream": name, "why": why} for name, why in overlap.unseen],
    }
