"""Files packed by gzip, Zstandard, bzip2 or xz as a stream of uncompressed bytes, of any number of members or frames.

Output is taken in small steps, so that a file which expands a thousandfold costs time and not
memory. A file that ends inside a member is an error: half a source must not pass for a whole one.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import zstandard

from mdsmix.errors import Unreachable
from mdsmix.sources.units import SourceFile

_STORED = 64 << 10
_OUTPUT = 1 << 20
# A Zstandard block of 4 bytes may stand for 128 KiB and its decoder has no limit of output: 4 KiB
# of such blocks are 128 MiB, at most.
_ZSTD_STORED = 4 << 10


_ZSTD_HEADER = 18
"Bytes of the longest header of a frame."


class _WindowTooLarge(Exception):
    """A frame wants more memory than there is."""


@contextmanager
def opened(
    file: SourceFile, packing: str, memory: int = 4 << 30, start: int = 0, until: int | None = None
) -> Iterator[Callable[[int], bytes]]:
    """What reads a file's uncompressed bytes, one after the other: of one that is not packed from `start`, and most likely to
    `until`. It may want half of `memory`."""
    with file.open(start, until) as stored:
        yield Inflated(stored, packing, file.location.url, memory).read if packing else stored.read


class Inflated:
    """Reads like a file; `read(n)` is shorter than `n` only at the end. A frame may want half of `memory`."""

    def __init__(self, file: BinaryIO, packing: str, url: str, memory: int) -> None:
        self._pieces = _inflate(file, packing, memory // 2)
        self._url, self._position = url, 0
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        taken: list[memoryview] = []
        while size > 0:
            if not self._rest:
                piece = self._next()
                if piece is None:
                    break
                self._rest = memoryview(piece)
            taken.append(self._rest[:size])
            self._rest = self._rest[size:]
            size -= len(taken[-1])
        return b"".join(taken)

    def _next(self) -> bytes | None:
        try:
            piece = next(self._pieces, None)
        except _WindowTooLarge as window:
            raise Unreachable(
                f"{self._url} was compressed with a window of {window}: give the run more memory (--memory), or compress "
                "it again with a smaller window (zstd without --long and --ultra needs 8 MB, xz -6 the same)"
            ) from None
        except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError) as error:
            raise Unreachable(
                f"{self._url} is damaged after {self._position} uncompressed bytes ({error}): "
                "its records would be lost, so nothing of it is used; copy or compress it again"
            ) from error
        self._position += len(piece or b"")
        return piece


def _inflate(file: BinaryIO, packing: str, most: int) -> Iterator[bytes]:
    """The uncompressed bytes of any number of members or frames; zeros between them, as tapes and some tools pad, are passed over."""
    new, step = _DECODERS[packing], _ZSTD_STORED if packing == ".zst" else _STORED
    limit = () if packing == ".zst" else (_OUTPUT,)
    stored, decoder = b"", None
    while stored := stored or file.read(step):
        if decoder is None:
            stored = stored.lstrip(b"\0")
            if not stored:
                continue
            stored += file.read(_ZSTD_HEADER)  # of the header there may be a byte so far
            decoder = new(stored, most)
        yield _decompressed(decoder, stored, limit)
        while not decoder.eof and not getattr(decoder, "needs_input", True):
            yield _decompressed(decoder, b"", limit)
        stored = decoder.unused_data if decoder.eof else getattr(decoder, "unconsumed_tail", b"")
        decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise EOFError("it ends too early")


def _decompressed(decoder: Any, stored: bytes, limit: tuple[int, ...]) -> bytes:
    try:
        data: bytes = decoder.decompress(stored, *limit)
    except lzma.LZMAError as error:
        if "limit" in str(error):
            raise _WindowTooLarge("more than it was allowed") from None
        raise
    return data


def _new_zstd(header: bytes, most: int) -> Any:
    window = zstandard.get_frame_parameters(header).window_size
    if window > most:
        raise _WindowTooLarge(
            f"{window / 1e6:,.0f} MB, and no more than {most / 1e6:,.0f} MB may be taken to read it"
        )
    # Its own default is 128 MB, beyond which a frame would pass for a damaged one.
    return zstandard.ZstdDecompressor(max_window_size=max(window, 1 << 27)).decompressobj()


_DECODERS: dict[str, Callable[[bytes, int], Any]] = {
    ".gz": lambda header, most: zlib.decompressobj(wbits=31),
    ".zst": _new_zstd,
    ".bz2": lambda header, most: bz2.BZ2Decompressor(),
    ".xz": lambda header, most: lzma.LZMADecompressor(memlimit=most),
}
PACKINGS = tuple(_DECODERS)
