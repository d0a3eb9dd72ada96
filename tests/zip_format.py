"""A format that a stranger adds: each member of a zip is a record and a block, and its splits are known without reading one."""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

from mdsmix.errors import Unreachable
from mdsmix.sources.base import Decoded, Format, Origin
from mdsmix.sources.units import SourceFile, Span


@dataclass(frozen=True)
class Member:
    at: Origin
    window: int
    start: tuple[int]
    fields: tuple[str, ...]
    format, count, size = "zip", 1, property(lambda self: self.at.length)

    def content(self) -> bytes:
        return b"%b %d %b" % (self.at.shown.encode(), self.size, self.at.raw)

    def first(self, count: int) -> "Member":
        return self

    def decode(self) -> Decoded:
        try:
            record = {"name": self.at.place["member"], "text": self.at.raw.decode()}
        except UnicodeDecodeError:
            return Decoded(records=[], bad=[(0, "invalid_utf8")], blank=[])
        return Decoded(records=[{f: record[f] for f in self.fields or record}], bad=[], blank=[])

    def origin(self, index: int) -> Origin:
        return self.at


class Zip(Format):
    reads_fields, size_factor = True, 2

    def splits(self, file: SourceFile, window_bytes: int, fields: object) -> list[tuple[int, int]]:
        sizes = [member.file_size for member in self._opened(file).infolist()]
        count = 1 + len(sizes) * window_bytes // (1 + sum(sizes))
        return [(n, n + count) for n in range(0, len(sizes), count)]

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Member]:
        zipped = self._opened(file)
        for n, name in list(enumerate(zipped.namelist()))[span.start : span.end]:
            text = zipped.read(name)
            place = Origin(file.name, n, f"member {name}", {"member": name}, len(text), text)
            yield Member(place, span.window_of(0), (n,), span.fields)

    def shown(self, ordinal: int) -> str:
        return f"member {ordinal}"

    def _opened(self, file: SourceFile) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(file.open_random())
        except zipfile.BadZipFile as error:
            raise Unreachable(f"{file.name} is no whole zip ({error}): copy it again") from None
