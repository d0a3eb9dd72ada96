"""Files packed by gzip, Zstandard, bzip2 or xz, of any number of members or frames, as a stream of
uncompressed bytes.

A file whose first bytes are those of another sort of file, packed ones or UTF-16 under a name that
does not say so, is refused with a sentence: each of its lines would be a bad record.

A decoder gets few bytes at once, so that a file which expands a thousandfold costs time and not
memory. A file that ends inside a member is an error: half a source must not pass for a whole one.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import zstandard

from mdsmix.errors import Unreachable
from mdsmix.sources.units import SourceFile

_STORED = 4 << 10
"""Bytes that a decoder gets at once. They expand to 4 MB at most by gzip, and to 128 MiB by
Zstandard, where 4 bytes may stand for 128 KiB.
"""
_OUTPUT = 1 << 20
"Bytes that bzip2 and xz give back at once; gzip and Zstandard have no limit of output."


@contextmanager
def opened(
    file: SourceFile, packing: str, memory: int = 4 << 30, start: int = 0, until: int | None = None
) -> Iterator[BinaryIO]:
    """A sequential reader of a file's uncompressed bytes. `start` and `until` (the likely end of
    reading) are for files that are not packed. A frame may want half of `memory`. Raises
    Unreachable if the first bytes are those of another sort of file.
    """
    with file.open(start, until) as stored:
        found: Any = stored
        if packing:
            packed = Inflated(stored, packing, file.location.url, memory // 2)
            found = io.BufferedReader(packed, _OUTPUT)
        if not start:
            found = found if hasattr(found, "peek") else io.BufferedReader(found)
            if why := other_sort(found.peek(_HEAD)[:_HEAD], packing):
                raise Unreachable(f"{file.location.url} {why}")
        yield cast(BinaryIO, found)


_HEAD = 8
"First bytes of a file that tell what it is."
_PACKED = {
    b"\x1f\x8b\x08": "gzip (.gz)",
    b"\x28\xb5\x2f\xfd": "Zstandard (.zst)",
    b"\xfd7zXZ\0": "xz (.xz)",
    **{b"BZh%d1AY&" % level: "bzip2 (.bz2)" for level in range(1, 10)},
}
_WRITTEN = {b"PAR1\x15": "parquet", b"ARROW1\0\0": "arrow"}
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def other_sort(head: bytes, packing: str) -> str:
    """Return what is wrong with a file that begins so, and what to do; empty if nothing is."""
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            again = " once more" if packing else ""
            return f"is packed{again} by {name}, and its name does not say so: unpack it, or add that suffix to its name"
    if head.startswith(b"PK\x03\x04"):
        return "is a zip archive, which mdsmix does not read: unpack it, and name the files in it"
    for magic, name in _WRITTEN.items():
        if head.startswith(magic):
            return f"is a file of {name}: say source.format: {name}, or name it .{name}"
    one, other = head[::2], head[1::2]
    is_half_empty = len(head) == _HEAD and any(one) != any(other)
    if head.startswith(_UTF_16) or (is_half_empty and (all(one) or all(other))):
        return "is written in UTF-16, and mdsmix reads UTF-8: convert it, as iconv -f UTF-16 -t UTF-8 does"
    return ""


class Inflated(io.RawIOBase):
    """Reads the uncompressed bytes of a packed file. A frame may want `most` bytes of memory."""

    def __init__(self, file: BinaryIO, packing: str, url: str, most: int) -> None:
        self._pieces, self._url = _inflate(file, _DECODERS[packing], most), url
        self._position, self._rest = 0, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._rest and (piece := self._next()) is not None:
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        self._position += count
        return count

    def _next(self) -> bytes | None:
        try:
            return next(self._pieces, None)
        except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError) as error:
            if "limit" in str(error) or "too much memory" in str(error):
                raise Unreachable(
                    f"{self._url} was compressed with a window of more than half of the run's memory: give it more (--memory; zstd "
                    "--long=31 wants 4 GB), or compress it again (zstd without --long and --ultra needs 8 MB, xz -6 the same)"
                ) from None
            if "ictionary" in str(error):
                raise Unreachable(
                    f"{self._url} was compressed with a dictionary, which is not in the file, so it cannot be unpacked here: unpack it by "
                    "zstd -d -D DICTIONARY, or compress it again without one"
                ) from None
            raise Unreachable(
                f"{self._url} is damaged after {self._position} uncompressed bytes ({error}): "
                "its records would be lost, so nothing of it is used; copy or compress it again"
            ) from error


def _inflate(file: BinaryIO, new: Callable[[int], Any], most: int) -> Iterator[bytes]:
    """The uncompressed bytes of any number of members or frames; zeros between them, as tapes and
    some tools pad, are passed over.
    """
    stored, decoder = b"", None
    while stored := stored or file.read(_STORED):
        if decoder is None:
            stored = stored.lstrip(b"\0")
            if not stored:
                continue
            decoder = new(most)
            limit = (_OUTPUT,) if hasattr(decoder, "needs_input") else ()
        yield decoder.decompress(stored, *limit)
        while not decoder.eof and not getattr(decoder, "needs_input", True):
            yield decoder.decompress(b"", *limit)
        stored = decoder.unused_data
        decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise EOFError("it ends too early")


def _new_zstd(most: int) -> Any:
    return zstandard.ZstdDecompressor(max_window_size=min(most, 1 << 31)).decompressobj()


_DECODERS: dict[str, Callable[[int], Any]] = {
    ".gz": lambda most: zlib.decompressobj(wbits=31),
    ".zst": _new_zstd,
    ".bz2": lambda most: bz2.BZ2Decompressor(),
    ".xz": lambda most: lzma.LZMADecompressor(memlimit=most),
}
PACKINGS = tuple(_DECODERS)
