"""Tar archives of the WebDataset kind: members beside one another that have one name, up to its first dot, are the fields of a record.

`a/0001.txt` and `a/0001.json` are the fields `txt` and `json` of the record `a/0001`, which is its field `__key__`. Nothing is
unpacked onto a disk. An archive has no directory, so it is one split, read from its start to its end mark.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.sources import format
from mdsmix.sources.format import BLANK, TOO_LONG, Block, Format, Item, item_blocks, parsed
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import is_utf8
from mdsmix.sources.units import SourceFile, Span

KEY = "__key__"
_BUFFER = 20 * 512
"Bytes that tarfile holds: it copies all of them at each read of a header."
_FORGET = 1000
"Members after which the list of them that tarfile keeps is emptied."


class Tar(Format):
    """`*.tar`, packed or not. Its ordinals are the uncompressed bytes at which a record's first member begins."""

    size_factor = 2  # 1 would say that all of it is read
    reads_fields = True
    cells_are_texts = True

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        with _opened(file, self.packing, span.memory) as archive:
            found = (_item(sample, span) for sample in _samples(archive, span.unit.fields))
            yield from item_blocks(file, span, "tar", found)


class _BadArchive(Exception):
    """What tarfile would take for the end of an archive."""


class _Header(tarfile.TarInfo):
    """A header, or the end mark: tarfile itself ends without a word where one is damaged or missing."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise _BadArchive("its end mark is missing") from None
        except tarfile.HeaderError as error:
            raise _BadArchive(str(error)) from None


@dataclass(slots=True)
class _Sample:
    """Members of one key that stand beside one another."""

    key: str
    offset: int
    cells: dict[str, bytes] = field(default_factory=dict)
    "By field, those that are read."
    others: dict[str, int] = field(default_factory=dict)
    "Bytes of those that are not."
    reason: str = ""


@contextmanager
def _opened(file: SourceFile, packing: str, memory: int) -> Iterator[tarfile.TarFile]:
    """The archive; whatever tarfile says of damaged bytes names the file."""
    try:
        with (
            opened(file, packing, memory) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header, bufsize=_BUFFER) as found,
        ):
            yield found
    except (_BadArchive, tarfile.TarError, ValueError, OSError) as error:
        raise Unreachable(
            f"{file.location.url} is no whole tar archive ({error}): records would be lost, so nothing of it is used; copy or write "
            "it again"
        ) from None


def _samples(archive: tarfile.TarFile, fields: tuple[str, ...]) -> Iterator[_Sample]:
    """The records of the archive, in order."""
    sample: _Sample | None = None
    for number, member in enumerate(archive):
        if number % _FORGET == 0:
            archive.members = []  # type: ignore[attr-defined]
        if not member.isfile():
            continue
        key, name, reason = _named(member.name)
        if sample is None or sample.key != key or reason:
            yield from [sample] if sample else []
            sample = _Sample(key, member.offset, reason=reason)
        if not reason:
            _add(sample, name, member, archive, fields)
    yield from [sample] if sample else []


def _named(name: str) -> tuple[str, str, str]:
    """Key and field of a member, and the reason code of why it is of no record."""
    *folders, last = name.split("/")
    if last.startswith("."):
        return name, "", BLANK
    if name.startswith("/") or ".." in folders:
        return name, "", "unsafe_name"
    first, dot, rest = last.partition(".")
    return ("/".join([*folders, first]), rest.lower(), "") if dot else (name, "", "no_suffix")


def _add(
    sample: _Sample,
    name: str,
    member: tarfile.TarInfo,
    archive: tarfile.TarFile,
    fields: tuple[str, ...],
) -> None:
    if name in sample.cells or name in sample.others:
        sample.reason = sample.reason or "duplicate_member"
    elif fields and name not in fields:
        sample.others[name] = member.size
    elif sum(map(len, sample.cells.values())) + member.size > format.LONGEST:
        sample.reason = TOO_LONG
    elif content := archive.extractfile(member):
        sample.cells[name] = content.read()


def _item(sample: _Sample, span: Span) -> Item:
    """A sample as a record of texts. Of members that are not read the size stands for what is in them, of an image a hash."""
    raw, size, reason = sample.key.encode(errors="replace") + b"\n", 0, sample.reason
    record: dict[str, Any] = {KEY: sample.key, **sample.others}
    for name, data in sample.cells.items():
        said, record[name] = data, data
        if name in span.unit.blobs:
            said, size = xxhash.xxh3_128_hexdigest(data).encode(), size + len(data)
        elif is_utf8(data):
            record[name] = data.decode()
        elif span.unit.fields:
            reason = reason or "invalid_utf8"
        raw += b"%b %d\n%b" % (name.encode(errors="replace"), len(data), said)
    parsed(record, span.unit.parsed)
    place = {"member": sample.key}
    return Item(sample.offset, place, size + len(raw), raw, record, reason, tuple(record))
