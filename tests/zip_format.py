"""A format that a stranger adds: each member of a zip is a record, and its splits are known without reading one."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from mdsmix.errors import Unreachable
from mdsmix.sources.base import Decoded, Format, Origin
from mdsmix.sources.units import SourceFile, Span


@dataclass(frozen=True)
class Member:
    """A block of one record."""

    file: str
    window: int
    name: str
    text: bytes
    start: tuple[int]
    fields: tuple[str, ...]
    format, count, size = "zip", 1, property(lambda self: len(self.text))

    def content(self) -> bytes:
        return b"%b %d %b" % (self.name.encode(), len(self.text), self.text)

    def first(self, count: int) -> Member:
        return self

    def decode(self) -> Decoded:
        try:
            record = {"name": self.name, "text": self.text.decode()}
        except UnicodeDecodeError:
            return Decoded(records=[], bad=[(0, "invalid_utf8")], blank=[])
        return Decoded(records=[{f: record[f] for f in self.fields or record}], bad=[], blank=[])

    def origin(self, index: int) -> Origin:
        shown, place = f"member {self.name}", {"member": self.name}
        return Origin(self.file, *self.start, shown, place, len(self.text), self.text)


class Zip(Format):
    reads_fields, size_factor = True, 2

    def splits(self, file: SourceFile, window_bytes: int, fields: object) -> list[tuple[int, int]]:
        edges, room = [0], window_bytes
        for n, info in enumerate(members := _opened(file).infolist()):
            if info.file_size > room and n:
                edges, room = [*edges, n], window_bytes
            room -= info.file_size
        return [*pairwise([*edges, len(members)])]

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Member]:
        position, members = 0, _opened(file)
        for n, info in list(enumerate(members.infolist()))[span.start : span.end]:
            text, window = members.read(info), span.window_of(position)
            yield Member(file.name, window, info.filename, text, (n,), span.fields)
            position += len(text)

    def shown(self, ordinal: int) -> str:
        return f"member {ordinal}"


def _opened(file: SourceFile) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file.open_random())
    except zipfile.BadZipFile as error:
        raise Unreachable(f"{file.location.url} is no whole zip ({error}): copy it again") from None
