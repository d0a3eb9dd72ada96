"""The writes that make a stream what is published, each only over what lay there when the lease was last confirmed.

A lease alone fences nothing: its holder may be stopped right after he has asked whether he holds it, and wake when another
has taken it over and published. So first it is read what lies there, then the lease is confirmed, and then every write is
conditional on what was read: whoever was overtaken is refused by the store, and says so.

Of a stream in place these are two writes, card and index, and no store writes two files as one. A card that was written
before its index was refused is therefore taken back: whoever overwrote the card of the index that stands puts it there
again (`_settle`). Each keeps every card that it has overwritten, and looks, after its own last write, whether card and
index fit; so when all have ended they do. One that was killed in between leaves what every interrupted publication
leaves, and the next conversion completes it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.shards import index as index_file
from mdsmix.shards import manifest as manifest_file
from mdsmix.shards.index import Index
from mdsmix.shards.lease import Lease, await_others
from mdsmix.shards.manifest import parse_manifest
from mdsmix.shards.writing import keep_index
from mdsmix.storage import Location

TRIES = 10
"More writers than that at one moment there are not."


class Overtaken(Unreachable):
    """Another run has published since this one looked."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A file as it lay there; without stamp and content where there was none."""

    at: Location
    stamp: str | None
    content: bytes | None

    @classmethod
    def of(cls, at: Location) -> Seen:
        found = at.fetch()
        return cls(at, found[0].stamp, found[1]) if found else cls(at, None, None)


def publish_in_place(folder: Location, index: Index, card: bytes | None, held: Lease) -> None:
    """Makes this the index of the stream, and this its card or none. The index before is kept for a while, and its shards
    with it (`mdsmix gc`): caches may hold it, and running jobs read by it. Overtaken where another published first."""
    old_card = Seen.of(folder / manifest_file.BASENAME)
    old_index = Seen.of(folder / index_file.BASENAME)
    held.confirm()
    new_card = swap(old_card, card) if card is not None else _deleted(old_card)
    try:
        if old_index.content not in (None, index.content):
            keep_index(folder, old_index.content or b"")
        stand(swap(old_index, index.content), held)
    except Overtaken:
        _settle(folder, old_card.content, card)
        raise
    if _stamp(new_card.at) != new_card.stamp:
        _settle(folder, old_card.content, card)


def swap(seen: Seen, content: bytes) -> Seen:
    """Puts `content` where what was seen still lies; Overtaken where something else does."""
    if seen.content == content:
        return seen
    for _ in range(TRIES):
        put = (
            seen.at.create(content) if seen.stamp is None else seen.at.replace(seen.stamp, content)
        )
        if put:
            return Seen(seen.at, put.stamp, content)
        now = Seen.of(seen.at)
        if (
            now.content == content
        ):  # one's own, whose answer was lost; or another's, who made the same
            return now
        if now.stamp != seen.stamp:
            break
    raise _overtaken(seen.at)


def stand(written: Seen, held: Lease) -> None:
    """Overtaken where, in a store that keeps no conditions, another write crossed this one and stands."""
    if not held.is_sure:
        await_others()
        if Seen.of(written.at).content != written.content:
            raise _overtaken(written.at)


def _overtaken(at: Location) -> Overtaken:
    return Overtaken(
        f"{at.parent} was published by another run while this one stood still, or {at.name} was changed by hand; what stands "
        "there stays, this run publishes nothing, finished work units are kept: run the same command again when no other "
        "is at work."
    )


def _deleted(seen: Seen) -> Seen:
    if seen.stamp is not None:
        seen.at.delete()
    return Seen(seen.at, None, None)


def _stamp(at: Location) -> str | None:
    found = at.stat()
    return found.stamp if found else None


def _settle(folder: Location, *known: bytes | None) -> None:
    """Puts the card of the index that stands back, where another lies there and this run knows the right one."""
    cards = {index: card for each in known for index, card in _by_index(each).items()}
    for _ in range(TRIES):
        card = Seen.of(
            folder / manifest_file.BASENAME
        )  # before the index: what is found to fit, fitted together
        index = Seen.of(folder / index_file.BASENAME)
        found = _by_index(card.content)
        standing = xxhash.xxh128_hexdigest(index.content or b"")
        if standing in found or standing not in cards:
            return
        cards |= found
        with suppress(Overtaken):
            swap(card, cards[standing])


def _by_index(card: bytes | None) -> dict[str, bytes]:
    """The card by the hash of its index; nothing of none, or of a damaged one."""
    with suppress(Unreachable):
        return {parse_manifest(card, "").index_hash: card} if card else {}
    return {}
