"""Bad records, kept: where each stood, why it is bad, and its bytes.

A worker keeps its unit's bad records beside the unit's record. Where a format counts (lines) the numbers there begin with the
unit, since it does not know what stands before. When the stream is published that is known, and the records are written to
`quarantine/` beside the shards with the numbers that a text editor shows.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping
from itertools import starmap
from typing import Any, NamedTuple

import orjson

from mdsmix.convert.ledger import FOLDER
from mdsmix.encode.base import Detail
from mdsmix.errors import Unreachable
from mdsmix.shards.lease import Lease
from mdsmix.shards.target import write_if_new
from mdsmix.sources import Origin, Window
from mdsmix.storage import Location, together

QUARANTINE = "quarantine"


class BadRecord(NamedTuple):
    """A record that is set aside."""

    origin: Origin
    reason: str
    detail: Detail | None = None
    "What else is known of why."


def described(origin: Origin, reason: str, detail: Detail | None = None) -> dict[str, Any]:
    """One bad record; `raw` is its text, or `raw_base64` its bytes where they are no text."""
    try:
        raw = {"raw": origin.raw.decode()}
    except UnicodeDecodeError:
        raw = {"raw_base64": base64.b64encode(origin.raw).decode()}
    return {
        "file": origin.file,
        **origin.place,
        "length": origin.length,
        "reason": reason,
        **({"detail": detail} if detail else {}),
        **raw,
    }


def bad_name(key: str, window: Window) -> str:
    """The name of a window's bad records. They tell where they stood, so windows of equal content share none."""
    return f"{key}-{window.place}"


def keep(folder: Location, name: str, bad: Iterable[BadRecord]) -> None:
    """Keeps a window's bad records and their reasons, in the order of the source."""
    ordered = sorted(bad, key=lambda each: (each.origin.file, each.origin.ordinal))
    _kept(folder, name).write(_packed(starmap(described, ordered)))


def is_kept(folder: Location, name: str) -> bool:
    """Whether a window's bad records are there."""
    return _kept(folder, name).stat() is not None


def publish_quarantine(folder: Location, name: str, before: Mapping[str, int]) -> None:
    """Writes a window's bad records to the quarantine. `before`: what keys of theirs count, and how much of it their file
    holds before their unit."""
    numbered = [
        record | {key: record[key] + n for key, n in before.items() if key in record}
        for record in _read(_kept(folder, name))
    ]
    write_if_new(folder / QUARANTINE / f"{name}.jsonl.zst", _packed(numbered))


def first_of(folder: Location, reason: str) -> dict[str, Any] | None:
    """A record of the quarantine that is bad for this reason; None where there is none."""
    quarantine = folder / QUARANTINE
    records = (record for name, _ in quarantine.list() for record in _read(quarantine / name))
    return next((record for record in records if record["reason"] == reason), None)


def _read(at: Location) -> list[dict[str, Any]]:
    from zstandard import ZstdDecompressor, ZstdError

    try:
        return [
            orjson.loads(line) for line in ZstdDecompressor().decompress(at.read()).splitlines()
        ]
    except (ZstdError, orjson.JSONDecodeError) as error:
        raise Unreachable(
            f"{at} is damaged ({error}), and it holds the bad records of a work unit; delete it and run the same command "
            "again, which goes through that unit once more."
        ) from None


def stale_files(files: Iterable[str], names: Collection[str]) -> list[str]:
    """Files of the quarantine that bear none of these names: a record that was mended is no longer bad."""
    return [file for file in files if file.partition(".")[0] not in names]


def delete_stale_files(folder: Location, names: Collection[str], held: Lease) -> None:
    """Takes all that out of the quarantine but what bears these names."""
    quarantine = folder / QUARANTINE
    stale = stale_files([file for file, _ in quarantine.list()], names)
    together(lambda name: held.delete(quarantine / name), stale)


def kept_name(name: str) -> str:
    """Of the file beside the unit's record."""
    return f"{name}.bad"


def _kept(folder: Location, name: str) -> Location:
    return folder / FOLDER / kept_name(name)


def _packed(records: Iterable[dict[str, Any]]) -> bytes:
    from zstandard import ZstdCompressor

    return ZstdCompressor().compress(b"".join(orjson.dumps(r) + b"\n" for r in records))
