"""Rows as plain StreamingDataset gives them, as hashes, and the totals of their manifest; held
against the file that keeps them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from streaming import Stream, StreamingDataset

from tests.converting import manifest_of
from tests.golden.convert import WAYS

KEPT = Path(__file__).parent / "rows.json"
RECORDS = ("read", "written", "filtered", "quarantined", "duplicates")
TOTALS = (
    *("samples", "tokens", "loss_tokens", "lost_tokens", "largest_id", "longest", "lengths"),
    *("specials", "cut_rows", "cut_tokens", "images", "documents"),
)
"Facts of the data. Hashes, versions, keys and the bytes of images that Pillow wrote are none."
REWRITTEN = ("resized", "reencoded")
"Streams of images that Pillow wrote: their sizes count, not their bytes."
Row = Mapping[str, Any]


class Made:
    """The streams below a folder, open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        indices = sorted(folder.glob("*/*/*/*/index.json"))
        self.names = [str(index.parent.relative_to(folder)) for index in indices]
        streams = [Stream(local=str(index.parent), keep_zip=True) for index in indices]
        self._rows = StreamingDataset(streams=streams, batch_size=1)
        sizes = self._rows.samples_per_stream
        self._starts = dict(zip(self.names, np.cumsum([0, *sizes]).tolist(), strict=False))
        self._sizes = dict(zip(self.names, map(int, sizes), strict=True))

    def rows(self, name: str) -> Iterator[Row]:
        for number in range(self._starts[name], self._starts[name] + self._sizes[name]):
            row = dict(self._rows[number])
            if "images" in row:
                shown = [[image.height, image.width] for image in row["images"]]
                assert shown == row["sizes"], f"{name}: {shown} are stored as {row['sizes']}"
                del row["images"]
                if name.split("/")[2] not in REWRITTEN:
                    row["images"] = _images(self._stored(number))
            yield row

    def _stored(self, number: int) -> bytes:
        shard, at = self._rows.spanner[number]
        return bytes(self._rows.shards[shard].get_sample_data(at))

    def facts(self, name: str) -> dict[str, Any]:
        manifest, hashes = manifest_of(self.folder / name), [_hash(r) for r in self.rows(name)]
        return {
            "columns": manifest.encoding.columns,
            "records": _stated(manifest.records, RECORDS),
            "totals": _stated(manifest.totals, TOTALS),
            "hash": blake2b("".join(hashes).encode(), digest_size=16).hexdigest(),
            "rows": " ".join(each[:4] for each in hashes),
        }


def _stated(section: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key in keys if (value := getattr(section, key))}


def _hash(row: Row) -> str:
    """Of names, dtypes, shapes and values."""
    digest = blake2b(digest_size=16)
    for name in sorted(row):
        value = row[name]
        if isinstance(value, np.ndarray):
            said = f"{value.dtype} {value.shape} ".encode() + value.tobytes()
        else:
            said = json.dumps(value, sort_keys=True).encode()
        digest.update(f"{name} {len(said)} ".encode() + said)
    return digest.hexdigest()


def _images(stored: bytes) -> list[str]:
    """Hashes of the images of a stored row: three sizes of columns, the images first, and of these
    how many and their sizes.
    """
    length = int(np.frombuffer(stored, "<u4", 1)[0])
    column = stored[12 : 12 + length]
    count = int(np.frombuffer(column, "<u4", 1, 4)[0])
    ends = 8 + 4 * count + np.cumsum([0, *np.frombuffer(column, "<u4", count, 8)])
    found = [column[start:end] for start, end in pairwise(ends.tolist())]
    return [blake2b(each, digest_size=8).hexdigest() for each in found]


def differences(made: Made, kept: Mapping[str, Any]) -> Iterator[str]:
    """A paragraph on each stream that is not as it was kept, with the ways in which it was
    made so.
    """
    ways = defaultdict[str, list[str]](list)
    for name in made.names:
        way, _, stream = name.partition("/")
        ways[stream].append(way)
    for stream in sorted(kept.keys() ^ ways.keys()):
        yield f"{stream}: it {'is kept, and was not made' if stream in kept else 'was made, and is not kept'}"
    for stream in sorted(kept.keys() & ways.keys()):
        facts = {way: made.facts(f"{way}/{stream}") for way in ways[stream]}
        if others := [way for way in facts if facts[way] != kept[stream]]:
            said = _told(made, f"{others[0]}/{stream}", facts[others[0]], kept[stream])
            yield "\n".join([f"{stream}, made by {', '.join(others)}:", *said])


def _told(made: Made, name: str, facts: Mapping[str, Any], was: Mapping[str, Any]) -> Iterator[str]:
    for key in ("columns", "records", "totals"):
        if facts[key] != was[key]:
            yield f"  {key} are {facts[key]}\n  and were {was[key]}"
    now, before = facts["rows"].split(), was["rows"].split()
    differ = [n for n in range(max(len(now), len(before))) if now[n : n + 1] != before[n : n + 1]]
    if differ:
        row = next(islice(made.rows(name), differ[0], None), "no such row")
        yield f"  {len(differ)} rows differ of {len(now)}, and there were {len(before)}; first row {differ[0]}, which is {row!s:.2000}"


def read_kept() -> dict[str, Any]:
    return dict(json.loads(KEPT.read_text()))


def write_kept(made: Made) -> None:
    """The streams of the first way, a line each; all ways must agree."""
    facts = {name: made.facts(name) for name in made.names}
    kept = {name.partition("/")[2]: facts[name] for name in made.names if name.startswith(WAYS[0])}
    told = list(differences(made, kept))
    assert not told, "\n".join(told)
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in kept.items())
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
