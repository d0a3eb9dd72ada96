"""Records that a format cuts out of a file one by one, such as rows of a table or members of an archive, as blocks of 8 MB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from mdsmix.sources.format import Block, Decoded, Origin
from mdsmix.sources.units import BLOCK_BYTES, SourceFile, Span

LONGEST = 256 << 20
"Bytes of the longest record; what is longer is skipped as it streams by, and kept by its place and length only."
TOO_LONG = "record_too_long"
BLANK = "blank"
"Stands for a reason where an item is nothing at all."


class Item(NamedTuple):
    """What may be a record."""

    ordinal: int
    shown: str
    place: Mapping[str, Any]
    size: int
    "Bytes."
    raw: bytes
    "The bytes; none of them where they are too many."
    record: Any
    reason: str = ""
    "Why it is no record."
    fields: tuple[str, ...] = ()
    "As `Origin` has it."


@dataclass(slots=True, kw_only=True)
class ItemBlock(Block):
    """Consecutive items of one file in one window."""

    items: list[Item]

    @property
    def start(self) -> tuple[int]:
        return (self.items[0].ordinal,)

    def decode(self) -> Decoded:
        decoded = Decoded(records=[], bad=[], blank=[])
        for index, item in enumerate(self.items[: self.count]):
            if not item.reason:
                decoded.records.append(item.record)
            elif item.reason == BLANK:
                decoded.blank.append(index)
            else:
                decoded.bad.append((index, item.reason))
        return decoded

    def origin(self, index: int) -> Origin:
        item = self.items[index]
        return Origin(
            self.file, item.ordinal, item.shown, item.place, item.size, item.raw, item.fields
        )


def blocks(file: SourceFile, span: Span, format: str, items: Iterable[Item]) -> Iterator[ItemBlock]:
    """The items, cut at the edges of windows and at 8 MB. An item is in the window of its first byte."""

    def block() -> ItemBlock:
        raws, sizes = [item.raw for item in held], [item.size for item in held]
        return ItemBlock(
            format=format, file=file.name, window=window, raws=raws, sizes=sizes, items=held
        )

    held, size, position, window = list[Item](), 0, 0, 0
    for item in items:
        its = span.window_of(position)
        if held and (its != window or size + item.size > BLOCK_BYTES):
            yield block()
            held, size = [], 0
        window = its
        held.append(item)
        size += item.size
        position += item.size
    if held:
        yield block()


def parsed(record: dict[str, Any], names: Iterable[str]) -> None:
    """In a record of texts, makes those that are JSON what they say; an empty one is null, and one that is no JSON stays a
    text, which the shape then refuses."""
    for name in names:
        cell = record.get(name)
        if isinstance(cell, str):
            try:
                record[name] = orjson.loads(cell) if cell.strip() else None
            except orjson.JSONDecodeError:
                continue
