"""A format that a stranger adds: each member of a zip is a record, and its splits are known without reading one."""

import zipfile
from collections.abc import Iterator

from mdsmix.errors import Unreachable
from mdsmix.sources.format import Block, Format, Item, item_blocks
from mdsmix.sources.units import SourceFile, Span


class Zip(Format):
    reads_fields, size_factor, ordinals = True, 2, "member"

    def splits(self, file: SourceFile, window_bytes: int, fields: object) -> list[tuple[int, int]]:
        sizes = [member.file_size for member in self._opened(file).infolist()]
        count = 1 + len(sizes) * window_bytes // (1 + sum(sizes))
        return [(n, n + count) for n in range(0, len(sizes), count)]

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        return item_blocks(file, span, "zip", self._members(file, span))

    def _members(self, file: SourceFile, span: Span) -> Iterator[Item]:
        zipped = self._opened(file)
        for n, name in list(enumerate(zipped.namelist()))[span.start : span.end]:
            raw, record, reason = zipped.read(name), {}, ""
            try:
                record = {"name": name, "text": raw.decode()}
            except UnicodeDecodeError:
                reason = "invalid_utf8"
            asked = {field: record.get(field) for field in span.unit.fields or record}
            said = f"{name} ".encode() + raw
            yield Item(n, {"member": name}, len(raw), said, asked, reason)

    def _opened(self, file: SourceFile) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(file.open_random())
        except zipfile.BadZipFile as error:
            raise Unreachable(f"{file.name} is no whole zip ({error}): copy it again") from None
