"""The journal of an export: a file in its folder that lists the pieces that are complete.

It is a line of JSON for the settings, then one for each piece, and at the end one that says that
the export is finished. Lines are appended and flushed. A line that a kill or a power cut left
incomplete is ignored, and its piece is written again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, field
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

import orjson

from mdsmix import schema
from mdsmix.errors import Unreachable
from mdsmix.exporting.writer import Piece, flush_file
from mdsmix.frozen import frozen
from mdsmix.storage.local import LocalPath, explain_errors

JOURNAL = "mdsmix.export"
"The name of the journal in the folder of an export."


@frozen(kw_only=True)
class Header:
    """The first line: what the export is made of."""

    format: str
    key: str
    "Hash of all settings that the bytes depend on, besides the shards."
    index_hash: str
    "The hash of the stream's index."
    names: str
    "A regular expression that the names of the export's files match, and no other file's name."
    stale: list[str] = field(default_factory=list)
    "Files of an earlier export that are deleted when this one is finished."
    stream: str = ""
    "The stream and its split, such as `chat/train`. Earlier commits of mdsmix did not write it."
    replaced: list[str] = field(default_factory=list)
    "Other streams whose exports were in the folder when this one began."


@frozen(kw_only=True)
class Journal:
    """The content of an export's journal."""

    header: Header
    pieces: dict[int, Piece]
    is_finished: bool


def read_journal(folder: Path) -> Journal | None:
    """Return the journal of an export; None if it is missing, if its first line cannot be read, or
    if it names files that no export writes, such as those of another folder.
    """
    fetched = LocalPath(str(folder / JOURNAL)).fetch()
    if fetched is None:
        return None
    _, content = fetched
    lines = content.split(b"\n")[:-1]  # what follows the last line break is incomplete
    if not lines:
        return None
    header = schema.parse_json_if_fit(Header, lines[0])
    if header is None:
        return None
    names = _compile_names(header)
    if names is None or any("/" in name for name in header.stale):
        return None
    pieces = dict[int, Piece]()
    is_finished = False
    for line in lines[1:]:
        piece = schema.parse_json_if_fit(Piece, line)
        if piece:
            if not all(names.fullmatch(name) and "/" not in name for name in piece.files):
                return None
            pieces[piece.number] = piece
        else:
            is_finished = line == FINISHED
    return Journal(header=header, pieces=pieces, is_finished=is_finished)


def _compile_names(header: Header) -> re.Pattern[str] | None:
    """Return the regular expression of the header; None if it is not a valid one."""
    try:
        return re.compile(header.names)
    except (re.error, OverflowError):  # such as a{99999999999}
        return None


FINISHED = b'{"finished":true}'


def begin_journal(folder: Path, header: Header, pieces: Sequence[Piece]) -> None:
    """Replace the journal by a new one, with the pieces that are kept."""
    lines = [_write_line(asdict(header)), *(_write_line(asdict(piece)) for piece in pieces)]
    LocalPath(str(folder / JOURNAL)).write(*lines)


def append_piece(folder: Path, piece: Piece) -> None:
    """Note that a piece is complete."""
    _append(folder, _write_line(asdict(piece)))


def finish_journal(folder: Path) -> None:
    """Note that the export is finished."""
    _append(folder, FINISHED + b"\n")


def _write_line(tree: Any) -> bytes:
    return orjson.dumps(tree, option=orjson.OPT_APPEND_NEWLINE)


def _append(folder: Path, line: bytes) -> None:
    path = folder / JOURNAL
    with explain_errors("write", str(path)), path.open("ab") as file:
        file.write(line)
        flush_file(file)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Let no other export write to the folder during the `with` block.

    Raises Unreachable if another export is writing to it.
    """
    with explain_errors("write", str(folder)):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                raise Unreachable(
                    f"another export is writing to {folder}: wait until it ends, or name another "
                    "folder with --out."
                ) from None
        yield
    finally:
        os.close(descriptor)
