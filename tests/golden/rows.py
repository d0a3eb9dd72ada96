"""Rows as a plain StreamingDataset gives them, as hashes, and the totals of their manifests,
compared with the file that keeps them (rows.json).
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
"Counts that follow from the data, unlike hashes, versions, keys and bytes of images by Pillow."
REWRITTEN = ("resized", "reencoded")
"Streams of images that Pillow wrote: their sizes count, not their bytes."
Row = Mapping[str, Any]


class Made:
    """The streams below a folder, opened."""

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
        shard, position = self._rows.spanner[number]
        return bytes(self._rows.shards[shard].get_sample_data(position))

    def facts(self, name: str) -> dict[str, Any]:
        manifest = manifest_of(self.folder / name)
        hashes = [_hash(row) for row in self.rows(name)]
        return {
            "columns": manifest.encoding.columns,
            "records": _stated(manifest.records, RECORDS),
            "totals": _stated(manifest.totals, TOTALS),
            "hash": blake2b("".join(hashes).encode(), digest_size=16).hexdigest(),
            "rows": " ".join(digest[:4] for digest in hashes),
        }


def _stated(section: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key in keys if (value := getattr(section, key))}


def _hash(row: Row) -> str:
    """Hash the names, dtypes, shapes and values of a row."""
    digest = blake2b(digest_size=16)
    for name in sorted(row):
        value = row[name]
        if isinstance(value, np.ndarray):
            content = f"{value.dtype} {value.shape} ".encode() + value.tobytes()
        elif isinstance(value, bytes):
            content = value
        elif isinstance(value, np.integer):
            content = f"{value.dtype} {value}".encode()
        else:
            content = json.dumps(value, sort_keys=True).encode()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _images(stored: bytes) -> list[str]:
    """Return hashes of the images of a stored row. The row begins with the sizes of its three
    columns. The first one has the images: their number, the size of each, and their bytes.
    """
    length = int(np.frombuffer(stored, "<u4", 1)[0])
    column = stored[12 : 12 + length]
    count = int(np.frombuffer(column, "<u4", 1, 4)[0])
    ends = 8 + 4 * count + np.cumsum([0, *np.frombuffer(column, "<u4", count, 8)])
    images = [column[start:end] for start, end in pairwise(ends.tolist())]
    return [blake2b(image, digest_size=8).hexdigest() for image in images]


def differences(made: Made, kept: Mapping[str, Any]) -> Iterator[str]:
    """Yield a paragraph on each stream that differs from the kept one, with the ways of converting
    that gave the difference.
    """
    ways = defaultdict[str, list[str]](list)
    for name in made.names:
        way, _, stream = name.partition("/")
        ways[stream].append(way)
    for stream in sorted(kept.keys() ^ ways.keys()):
        fault = "kept, but not converted" if stream in kept else "converted, but not kept"
        yield f"{stream}: {fault}"
    for stream in sorted(kept.keys() & ways.keys()):
        facts = {way: made.facts(f"{way}/{stream}") for way in ways[stream]}
        differing = [way for way in facts if facts[way] != kept[stream]]
        if differing:
            name = f"{differing[0]}/{stream}"
            lines = _describe(made, name, facts[differing[0]], kept[stream])
            yield "\n".join([f"{stream}, converted by {', '.join(differing)}:", *lines])


def _describe(
    made: Made, name: str, facts: Mapping[str, Any], was: Mapping[str, Any]
) -> Iterator[str]:
    for key in ("columns", "records", "totals"):
        if facts[key] != was[key]:
            yield f"  {key} are {facts[key]}\n  and were {was[key]}"
    current = facts["rows"].split()
    before = was["rows"].split()
    count = max(len(current), len(before))
    differ = [n for n in range(count) if current[n : n + 1] != before[n : n + 1]]
    if differ:
        row = next(islice(made.rows(name), differ[0], None), "no such row")
        yield (
            f"  {len(differ)} rows differ of {len(current)}, and there were {len(before)}; first "
            f"row {differ[0]}, which is {row!s:.2000}"
        )


def read_kept() -> dict[str, Any]:
    return dict(json.loads(KEPT.read_text()))


def write_kept(made: Made) -> None:
    """Write the streams of the first way, a line each. All ways must agree."""
    facts = {name: made.facts(name) for name in made.names}
    kept = {name.partition("/")[2]: facts[name] for name in made.names if name.startswith(WAYS[0])}
    faults = list(differences(made, kept))
    assert not faults, "\n".join(faults)
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in kept.items())
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
