"""How long streams took to convert, kept in this machine's cache: a manifest holds no time, and the same stream made twice is the same.

What is not there is not known: a stream that another machine made, or a cache that was deleted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from mdsmix import typed
from mdsmix.convert.outcome import Outcome
from mdsmix.encode.tokenizer import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """The last run that did something for a stream."""

    index_hash: str
    "Of what it published: of another publication it says nothing."
    seconds: float
    units: int
    done: int
    "Units that were worked on; the others' records were there already."
    new_tokens: int
    "Of those units."
    peak: int

    @property
    def tokens_per_second(self) -> int:
        return int(self.new_tokens / max(self.seconds, 1e-3))


def keep_took(outcomes: Iterable[Outcome]) -> None:
    """Keeps them. A cache that cannot be written costs a figure of a page, so it is no error."""
    for outcome in outcomes:
        if outcome.done:
            found = Took(
                index_hash=outcome.manifest.index_hash,
                seconds=outcome.seconds,
                units=outcome.units,
                done=outcome.done,
                new_tokens=outcome.new_tokens,
                peak=outcome.peak,
            )
            with suppress(Unreachable):
                keep_in_cache(_file(outcome.target), orjson.dumps(asdict(found)))


def find_took(target: str, index_hash: str) -> Took | None:
    """What is known of the stream that is published there with this index."""
    try:
        found = typed.load(Took, _file(target).read_bytes())
    except (OSError, typed.Misfit):
        return None
    return found if found.index_hash == index_hash else None


def _file(target: str) -> Path:
    return cache_folder() / "took" / f"{hashlib.sha256(target.encode()).hexdigest()[:32]}.json"
