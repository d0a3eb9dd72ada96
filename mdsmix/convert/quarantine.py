"""Bad records, kept: where each stood, why it is bad, and its bytes.

A worker keeps its unit's bad records beside the unit's record, with line numbers counted from the unit's first line,
since it does not know what stands before. When the stream is published the lines before are known, and the records are
written to `quarantine/<unit key>.jsonl.zst` beside the shards with the numbers that a text editor shows.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import orjson

from mdsmix.convert.ledger import FOLDER
from mdsmix.shards.target import write_if_new
from mdsmix.sources import Origin
from mdsmix.storage import Location

QUARANTINE = "quarantine"


def described(origin: Origin, reason: str) -> dict[str, Any]:
    """One bad record; `raw` is its text, or `raw_base64` its bytes where they are no text."""
    try:
        raw = {"raw": origin.raw.decode()}
    except UnicodeDecodeError:
        raw = {"raw_base64": base64.b64encode(origin.raw).decode()}
    return {
        "file": origin.file,
        "line": origin.line,
        "offset": origin.offset,
        "length": origin.length,
        "reason": reason,
        **raw,
    }


def keep(folder: Location, key: str, bad: list[dict[str, Any]]) -> None:
    """Keeps a unit's bad records, in the order of the source."""
    bad = sorted(bad, key=lambda record: (record["file"], record["offset"]))
    _kept(folder, key).write(_packed(bad))


def release(folder: Location, key: str, lines_before: int) -> None:
    """Writes a unit's bad records to the quarantine, counted from the first line of their file."""
    from zstandard import ZstdDecompressor

    kept = ZstdDecompressor().decompress(_kept(folder, key).read())
    records = [orjson.loads(line) for line in kept.splitlines()]
    numbered = (record | {"line": record["line"] + lines_before} for record in records)
    write_if_new(folder / QUARANTINE / f"{key}.jsonl.zst", _packed(numbered))


def forget_others(folder: Location, keys: set[str]) -> None:
    """Removes what was released of units that the stream no longer has: a record that was mended is no longer bad."""
    quarantine = folder / QUARANTINE
    for name, _ in quarantine.list():
        if name.partition(".")[0] not in keys:
            (quarantine / name).delete()


def _kept(folder: Location, key: str) -> Location:
    return folder / FOLDER / f"{key}.bad"


def _packed(records: Iterable[dict[str, Any]]) -> bytes:
    from zstandard import ZstdCompressor

    return ZstdCompressor().compress(b"".join(orjson.dumps(r) + b"\n" for r in records))
