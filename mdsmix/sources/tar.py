"""Tar archives as WebDataset writes them: neighbouring members whose names agree up to the first
dot are the fields of one record.

`a/0001.txt` and `a/0001.json` are the fields `txt` and `json` of the record `a/0001`, which is its
field `__key__`. Nothing is unpacked onto a disk. An archive has no directory, so it is one split,
read from its start to its end mark.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.sources import format
from mdsmix.sources.format import (
    CELL_REASONS,
    TOO_LONG,
    Block,
    Format,
    Item,
    make_item_blocks,
    parse_cells,
)
from mdsmix.sources.inflate import open_unpacked
from mdsmix.sources.jsonl import is_utf8
from mdsmix.sources.units import SourceFile, Span, Unit

KEY = "__key__"
_BUFFER_BYTES = 20 * 512
"Bytes of tarfile's buffer, which it copies whole at each read of a header."
_PADDING_BYTES = 1 << 16
"Bytes after the end mark that are read at once."
_MOST_MEMBERS = 1000
"Members after which tarfile's list of members is emptied."
_NOTES = (b"V", b"D")
"""The types of members that GNU tar adds besides files: a volume's label (`tar --label`), and the
names in a folder (`tar --listed-incremental`), in place of the folder.
"""


class Tar(Format):
    """The format of `*.tar`, packed or not. A record is made of consecutive members (files in the
    archive) of one name: `a/0001.jpg` and `a/0001.json`.

    The ordinal of a record (a number that increases through the file) is the uncompressed byte at
    which its first member begins.
    """

    version = 4  # hidden members are skipped; only JSON lists are messages; links are bad
    version_without_messages = 3
    size_factor = 2  # 1 would mean that all stored bytes are read, but unused members are not
    reads_fields = True
    is_never_empty = True
    cells_are_texts = True
    reasons: ClassVar[Mapping[str, str]] = {
        "duplicate_member": "Two members of an archive are the same field of one record.",
        "not_a_file": (
            "A member of an archive is a link or a device, so its content is elsewhere; GNU tar "
            "stores contents in place of links with --dereference --hard-dereference."
        ),
        "no_suffix": "The name of an archive's member has no dot, so it names no field.",
        "unsafe_name": "The name of an archive's member leads out of the archive.",
        **CELL_REASONS,
    }

    def version_for(self, file: SourceFile, fields: tuple[str, ...]) -> int:
        """Return 1 as the version of this format that is hashed into the file's digests, although
        `version` is 4. If a digest changes, its records are converted again.

        Version 2 neither reads nor hashes hidden members, and version 4 hashes links. So an archive
        with such members has new digests anyway. Version 3 decodes other texts only in fields with
        texts or messages, and `Digests` names these fields in the digests. Any other archive has
        the same records as under version 1: with a 4 in its digests it would be converted again for
        nothing.
        """
        return 1

    def blocks(self, file: SourceFile, span: Span) -> Iterator[Block]:
        with _open_archive(file, self.packing, span.memory) as archive:
            yield from make_item_blocks(file, span, "tar", _read_items(archive, span.unit))


class _BadArchive(Exception):
    """Raised at a fault of an archive that tarfile itself would treat as the archive's end."""


class _Header(tarfile.TarInfo):
    """The header of a member. Reading a damaged header raises `_BadArchive`, and so does a missing
    end mark. With tarfile's own class, reading would stop silently there, as at the archive's end.
    """

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Any:
        """Return the next header of the archive.

        Raises EOFHeaderError at the archive's end mark, and _BadArchive if the header is damaged or
        the archive ends without its mark.
        """
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]  # the file has ended
            raise _BadArchive("the end mark is missing") from None
        except tarfile.HeaderError as error:
            raise _BadArchive(str(error)) from None


@contextmanager
def _open_archive(file: SourceFile, packing: str, memory: int) -> Iterator[tarfile.TarFile]:
    """Open the archive for reading from start to end.

    tarfile's errors, also those inside the `with` block, become Unreachable.
    """
    try:
        with (
            open_unpacked(file, packing, memory) as stream,
            tarfile.open(
                fileobj=stream, mode="r|", tarinfo=_Header, bufsize=_BUFFER_BYTES
            ) as archive,
        ):
            yield archive
    except (_BadArchive, tarfile.TarError, ValueError, OSError) as error:
        raise Unreachable(
            f"{file.location.url} is not a complete tar archive ({error}): "
            "records would be lost, so the file is not used; copy or write it again"
        ) from None


class _Member(NamedTuple):
    """A member (a file in an archive), with the record and the field that its name means: the
    member `a/0001.json` is the field `json` of the record `a/0001`.
    """

    key: str
    "The key of the record, such as `a/0001`; the member's whole name if the name is not valid."
    reason: str
    "The reason code if the name is not valid, such as `no_suffix`; otherwise empty."
    field: str
    "The name of the field, such as `json`; empty if the member's name is not valid."
    info: tarfile.TarInfo
    "The member's header."


def _read_items(archive: tarfile.TarFile, unit: Unit) -> Iterator[Item]:
    """Yield the records of the archive in order, as items. Consecutive members (files) whose names
    differ only in their suffix make one record: `a/0001.jpg` and `a/0001.json`.
    """
    members = map(_read_member, _list_members(archive))
    for (key, reason), group in groupby(members, key=attrgetter("key", "reason")):
        record = _Record(key, reason, unit)
        for member in group:
            record.add(member, archive)
        yield record.item()
    _read_padding(archive)


def _read_padding(archive: tarfile.TarFile) -> None:
    """Read the bytes after the archive's end mark to the file's end. Writers fill a last block with
    zeros. Only at the end of a compressed file it is known that nothing of the file is damaged.

    Raises _BadArchive if a byte is not zero, as if `cat` has joined archives: tarfile silently ends
    at the first end mark.
    """
    stream: Any = archive.fileobj
    while padding := stream.read(_PADDING_BYTES):
        if padding.strip(b"\0"):
            raise _BadArchive(
                "other bytes follow its end mark, as if archives were joined by cat, which tar "
                "--concatenate joins"
            )


def _list_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of the archive's members, without folders, GNU tar's notes and hidden
    members.
    """
    for number, member in enumerate(archive):
        # tarfile keeps all headers in a list; empty it now and then to bound the memory.
        if number % _MOST_MEMBERS == 0:
            archive.members = []  # type: ignore[attr-defined]
        is_left_out = member.isdir() or member.type in _NOTES or _is_hidden(member.name)
        if not is_left_out:
            yield member


def _is_hidden(name: str) -> bool:
    """Return whether a member with this name is hidden, such as the files that a Mac adds
    (`._0001.jpg`, `.DS_Store`).

    Like WebDataset, mdsmix skips hidden members, even between two members of a record.
    """
    *folders, last = name.split("/")
    return last.startswith(".") or "__MACOSX" in folders


def _read_member(info: tarfile.TarInfo) -> _Member:
    """Return the member with this header. It has a reason code if its name is not valid."""
    *folders, last = info.name.split("/")
    if info.name.startswith("/") or ".." in folders:
        return _Member(key=info.name, reason="unsafe_name", field="", info=info)
    stem, dot, suffix = last.partition(".")
    if not dot:
        return _Member(key=info.name, reason="no_suffix", field="", info=info)
    return _Member(key="/".join([*folders, stem]), reason="", field=suffix.lower(), info=info)


class _Record:
    """Collects the members of one record. The value of a field is a string, or bytes.

    The member of a field that the stream does not read is skipped, and the value is the member's
    size. A record's raw bytes decide whether it has changed. For a blob (a field of bytes, such as
    an image) they contain its hash instead of its content.
    """

    def __init__(self, key: str, reason: str, unit: Unit) -> None:
        """Begin a record without members.

        Args:
            key: the key of the record, such as `a/0001`.
            reason: a reason code if the members' names are not valid; otherwise empty.
            unit: the work unit, which names the fields to read.
        """
        self._key = key
        self._is_named = not reason
        "Whether the members' names are valid; if not, none of them is read."
        self._reason = reason
        self._unit = unit
        self._offset: int | None = None
        self._cells = dict[str, Any]()
        self._unread_sizes = dict[str, int]()
        self._bytes_read = 0
        self._blob_bytes = 0
        self._raws = [key.encode(errors="replace") + b"\n"]

    def add(self, member: _Member, archive: tarfile.TarFile) -> None:
        """Add the next member to the record, and read it if its field is needed."""
        if self._offset is None:
            self._offset = member.info.offset
        if not self._is_named:
            return
        # Add the field, or set a reason code if the record cannot have it.
        field = member.field
        if field in self._cells or field in self._unread_sizes:
            self._set_reason("duplicate_member")
        elif self._unit.fields and field not in self._unit.fields:
            self._unread_sizes[field] = member.info.size or len(member.info.linkname)
        elif not member.info.isfile():
            # The record is bad. The line makes its bytes unlike those of a record without a link.
            self._set_reason("not_a_file")
            self._raws.append(b"%b is a link\n" % field.encode(errors="replace"))
        elif self._bytes_read + member.info.size > format.LONGEST:
            self._reason = TOO_LONG  # counts more than an earlier reason
        elif content := archive.extractfile(member.info):
            self._add_cell(field, content.read())

    def _add_cell(self, field: str, data: bytes) -> None:
        """Store the value of a field, and the bytes that are hashed for it.

        Args:
            field: the field's name.
            data: the bytes of its member.
        """
        self._bytes_read += len(data)
        self._cells[field] = data
        hashed = data
        # A blob stays bytes, and its hash replaces it in the raw bytes. Any other value becomes a
        # string. A value that is not UTF-8 makes the record bad, unless the unit reads all fields.
        if field in self._unit.blobs:
            hashed = xxhash.xxh3_128_hexdigest(data).encode()
            self._blob_bytes += len(data)
        elif is_utf8(data):
            self._cells[field] = data.decode()
        elif self._unit.fields:
            self._set_reason("invalid_utf8")
        self._raws += (b"%b %d\n" % (field.encode(errors="replace"), len(data)), hashed)

    def _set_reason(self, reason: str) -> None:
        """Set the reason code, unless one was set before."""
        self._reason = self._reason or reason

    def item(self) -> Item:
        """Return the collected record as an Item, with its place and bytes in the archive."""
        # The raw bytes have a hash in place of each blob. The item's length counts the blob too.
        raw = b"".join(self._raws)
        record = {KEY: self._key, **self._unread_sizes, **self._cells}
        reason = parse_cells(record, self._unit.parsed, self._unit.text_or_messages)
        self._set_reason(reason)
        assert self._offset is not None, "a record has a member"
        return Item(
            ordinal=self._offset,
            place={"member": self._key},
            length=self._blob_bytes + len(raw),
            raw=raw,
            record=record,
            reason=self._reason,
            fields=tuple(record),
        )
