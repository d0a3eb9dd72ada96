"""Tar archives of the WebDataset kind: neighbouring members whose names agree up to the first dot
are the fields of one record.

`a/0001.txt` and `a/0001.json` are the fields `txt` and `json` of the record `a/0001`, which is its
field `__key__`. Nothing is unpacked onto a disk. An archive has no directory, so it is one split,
read from its start to its end mark.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any, ClassVar

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.sources import format
from mdsmix.sources.format import TOO_LONG, Block, Format, Item, item_blocks, parse_json_fields
from mdsmix.sources.inflate import opened
from mdsmix.sources.jsonl import is_utf8
from mdsmix.sources.units import SourceFile, Span, Unit

KEY = "__key__"
_BUFFER = 20 * 512
"Bytes of tarfile's buffer, which it copies whole at each read of a header."
_FORGET = 1000
"Members after which tarfile's list of members is emptied."


class Tar(Format):
    """`*.tar`, packed or not. Its ordinals are the uncompressed bytes at which a record's first
    member begins.
    """

    version = 2  # hidden members are passed over
    size_factor = 2  # not 1: members that are not wanted are not read
    reads_fields = True
    cells_are_texts = True
    reasons: ClassVar[Mapping[str, str]] = {
        "duplicate_member": "Two members of an archive are the same field of one record.",
        "no_suffix": "The name of an archive's member has no dot, so it names no field.",
        "unsafe_name": "The name of an archive's member leads out of the archive.",
    }

    def version_for(self, file: SourceFile, fields: tuple[str, ...]) -> int:
        """Return 1: hidden members were part of an archive's content, and are not, so the digests
        of such archives changed, and no others.
        """
        return 1

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        with _opened(file, self.packing, span.memory) as archive:
            yield from item_blocks(file, span, "tar", _items(archive, span.unit))


class _BadArchive(Exception):
    """A fault that tarfile would take for the end of an archive."""


class _Header(tarfile.TarInfo):
    """A header, or the end mark: tarfile itself ends without a word where one is damaged or
    missing.
    """

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


@contextmanager
def _opened(file: SourceFile, packing: str, memory: int) -> Iterator[tarfile.TarFile]:
    """The archive, open. Errors of tarfile become Unreachable with the file's name."""
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


def _items(archive: tarfile.TarFile, unit: Unit) -> Iterator[Item]:
    """The records of the archive, in order, each of neighbouring members of one key."""
    found = ((*_named(member.name), member) for member in _files(archive))
    for (key, reason), members in groupby(found, key=lambda each: each[:2]):
        yield _item(key, reason, ((name, member) for _, _, name, member in members), archive, unit)


def _files(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for number, member in enumerate(archive):
        if number % _FORGET == 0:
            archive.members = []  # type: ignore[attr-defined]
        if member.isfile() and not _is_hidden(member.name):
            yield member


def _is_hidden(name: str) -> bool:
    """Return whether a member is hidden, as those that a Mac adds (`._0001.jpg`, `.DS_Store`): such
    a one is passed over, also between two members of a record, as WebDataset does it.
    """
    *folders, last = name.split("/")
    return last.startswith(".") or "__MACOSX" in folders


def _named(name: str) -> tuple[str, str, str]:
    """The key of a member's record; the reason code of a member that belongs to no record, else
    empty; the member's field.
    """
    *folders, last = name.split("/")
    if name.startswith("/") or ".." in folders:
        return name, "unsafe_name", ""
    first, dot, rest = last.partition(".")
    return ("/".join([*folders, first]), "", rest.lower()) if dot else (name, "no_suffix", "")


def _item(
    key: str,
    reason: str,
    members: Iterator[tuple[str, tarfile.TarInfo]],
    archive: tarfile.TarFile,
    unit: Unit,
) -> Item:
    """A record of texts and bytes. A member that is not read is in it by its size; in the item's
    raw bytes a blob is its hash.
    """
    raw, size, held, offsets = key.encode(errors="replace") + b"\n", 0, 0, list[int]()
    cells, others = dict[str, Any](), dict[str, int]()
    is_none = bool(reason)
    for name, member in members:
        offsets.append(member.offset)
        if is_none:
            continue
        if name in cells or name in others:
            reason = reason or "duplicate_member"
        elif unit.fields and name not in unit.fields:
            others[name] = member.size
        elif held + member.size > format.LONGEST:
            reason = TOO_LONG
        elif content := archive.extractfile(member):
            said = cells[name] = data = content.read()
            held += len(data)
            if name in unit.blobs:
                said, size = xxhash.xxh3_128_hexdigest(data).encode(), size + len(data)
            elif is_utf8(data):
                cells[name] = data.decode()
            elif unit.fields:
                reason = reason or "invalid_utf8"
            raw += b"%b %d\n%b" % (name.encode(errors="replace"), len(data), said)
    record = {KEY: key, **others, **cells}
    parse_json_fields(record, unit.parsed)
    return Item(offsets[0], {"member": key}, size + len(raw), raw, record, reason, tuple(record))
