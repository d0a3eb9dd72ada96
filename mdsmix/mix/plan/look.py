"""A stream that is not converted yet, from a look at some of its records.

Records are read at places that are spread evenly over the bytes of all files, a few behind one another at each, and go through the
stream's own shape, template and encoder. Neighbours are alike, so the error is that between places, not between records: so many
records at one place would say little. Nothing is written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

from mdsmix import sources
from mdsmix.encode.backends import Unequal, open_backend
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.errors import RecipeError
from mdsmix.kinds import kind_of, kind_of_stream
from mdsmix.kinds.reading import open_reading
from mdsmix.kinds.registry import fields_parsed, fields_read, make_encoding
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.sampling import BY_BUDGET, tokens_wanted
from mdsmix.recipe.taking import taken
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import Index, Shard, StoredFile, make_index
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, Manifest, TokenizerCard
from mdsmix.shards.mds import SHARD_BYTES, SHARD_ROWS, Layout
from mdsmix.shards.shardfiles import compressed
from mdsmix.sources import RecordBatch, SourceFile, Unit
from mdsmix.sources.registry import format_of
from mdsmix.storage import Location, locate

PLACES = 32
"At which records are read. An error from fewer is itself uncertain: from 32 it is right to an eighth."
TRIED = 4
"Units of which some records tell how long one is."
LEAST_BYTES = 1 << 10
"No place is a smaller part of a source."
SPREAD = 1.0
"The standard deviation of a record's tokens by their mean, as documents and chats have it: of a large sample it hardly matters."
OFFSET_BYTES = 4
"Of each sample, in the table of a shard."


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was looked at, and how far it can be trusted."""

    records: int
    places: int
    of_places: int
    "How many such places the source has."
    is_all: bool
    "Every record was looked at."
    packed: int
    "Compressed files: their size unpacked is guessed, and they are read from their beginning alone."
    left_out: Mapping[str, int]
    "Of the records: reason -> how many became no sample."
    errors: Mapping[str, float | None]
    "Relative standard errors of samples, tokens, trained and cut tokens, and bytes; None where one place tells none."


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What the stream will be like once it is published, as index and manifest would say it."""

    index: Index
    manifest: Manifest
    look: Look


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Records of one unit, and what they became."""

    weight: float = 0
    "The share of the places that it stands for."
    covered: float = 0
    "Bytes of the source that its records stand for."
    records: int = 0
    is_whole: bool = False
    totals: Totals
    tokens: float
    raw: float
    "Bytes of its rows in a shard."
    body: bytes
    left_out: Counter[str]


def look_at(recipe: Recipe, spec: StreamSpec, tokenizer: Tokenizer, limit: int) -> Looked:
    """Reads about `limit` records of the stream's source. RecipeError where none of them becomes a sample, or the recipe is wrong."""
    encoding = _encoding(recipe, spec, tokenizer)
    assert spec.source is not None
    files = sources.find(spec.source.path, recipe.folder, sources.ReadAs.of(spec.source))
    size = sources.size_of(files)
    units = _units(files, encoding, max(LEAST_BYTES, size // PLACES))
    if not units:
        raise RecipeError(
            f"the source of {spec.name} holds no byte, so there is nothing to plan with."
        )
    chosen = _chosen([weight for _, weight in units])
    each = max(1, -(-limit // len(chosen)))
    # Of a few records a small sample is none: all of them are looked at, and the share of what they come to is taken.
    rows = _Rows(replace(encoding, sample=None), tokenizer, recipe.tokenizer.backend, spec)
    span = _span([units[number][0] for number in chosen], each)
    if span * PLACES >= size:  # there are hardly more records than were asked for
        chosen = {n: weight / size for n, (_, weight) in enumerate(units)}
    places = [_read(units[number], share, each, span, rows) for number, share in chosen.items()]
    if not any(place.tokens for place in places):
        raise RecipeError(
            f"{sum(p.records for p in places)} records of {spec.name} were looked at, and none becomes a sample "
            f"({_reasons(places)}): `mdsmix convert --only {spec.name} --limit 100` shows them."
        )
    looked = _looked(encoding, tokenizer, files, units, places)
    if spec.sample != BY_BUDGET:
        return looked
    share = _share(recipe, spec, looked, places)
    return _looked(replace(encoding, sample=share), tokenizer, files, units, places)


def _share(
    recipe: Recipe, spec: StreamSpec, all_of_it: Looked, places: Sequence[_Place]
) -> str | None:
    """What a conversion would take of the source for the stream's share of the budget; None: all of it."""
    totals, error = all_of_it.manifest.totals, all_of_it.look.errors["tokens"] or 0.0
    each = sum(place.records for place in places) / sum(place.tokens for place in places)
    part = float(tokens_wanted(recipe, spec)) / max(1, totals.seen_tokens)
    share, _ = taken(part, each * totals.tokens, error, SPREAD)
    return None if share == 1 else str(share)


def _encoding(recipe: Recipe, spec: StreamSpec, tokenizer: Tokenizer) -> Encoding:
    kind = kind_of_stream(spec)
    assert kind is not None, "a recipe that was opened has a kind for each stream with a source"
    for sentence in kind.lacking(recipe, spec, tokenizer):
        raise RecipeError(sentence)
    return make_encoding(recipe, spec, tokenizer)


def _units(files: list[SourceFile], encoding: Encoding, window: int) -> list[tuple[Unit, float]]:
    """Places to read at, in the order of the source, and the bytes of each: parts of a file are taken for equal."""
    # What is passed over counts where the size of a file is all that tells how far reading has come.
    has_counts = all(
        format_of(f).records(f) is not None for f in files if format_of(f).reads_fields
    )
    units = sources.plan(
        files,
        window_bytes=window,
        fields=sorted(fields_read(encoding)) if has_counts else (),
        parsed=sorted(fields_parsed(encoding)),
    )
    parts = Counter(unit.files[0].location.url for unit in units)
    return [(u, sources.size_of(u.files) / parts[u.files[0].location.url]) for u in units]


def _chosen(weights: Sequence[float]) -> dict[int, float]:
    """Numbers of the units to read, evenly over all bytes, and the share of the places that each stands for."""
    ends = np.array(list(accumulate(weights)))
    if len(weights) <= PLACES:  # all of them, by their size
        return {n: weight / ends[-1] for n, weight in enumerate(weights)}
    at = np.searchsorted(ends, (np.arange(PLACES) + 0.5) / PLACES * ends[-1], "right")
    numbers, hits = np.unique(np.minimum(at, len(weights) - 1), return_counts=True)
    return {int(n): int(k) / PLACES for n, k in zip(numbers, hits, strict=True)}


class _Rows:
    """What makes rows of records; opened once, since the fast tokenizer is proved equal each time. Where it turns out to differ,
    the reference does the rest."""

    def __init__(
        self, encoding: Encoding, tokenizer: Tokenizer, backend: str, spec: StreamSpec
    ) -> None:
        self._encoding, self._tokenizer = encoding, tokenizer
        root = spec.images.root if spec.images else None
        self._root = locate(root) if root else None
        self._open(backend)

    def _open(self, backend: str) -> None:
        opened = open_backend(self._tokenizer, backend)
        self._reading = open_reading(self._encoding, self._tokenizer, opened, root=self._root)

    def of(self, batches: Sequence[RecordBatch], files: Sequence[SourceFile]) -> _Place:
        records = [record for batch in batches for record in batch.records]
        beside = {file.name: file.location.parent for file in files}
        folders = list[Location]()
        if kind_of(self._encoding).has_images and not self._root:
            names = (name for batch in batches for name in batch.files(range(len(batch.records))))
            folders = [beside[name] for name in names]
        try:
            return self._of(records, folders)
        except Unequal:
            self._open("reference")
            return self._of(records, folders)

    def _of(self, records: Sequence[Any], folders: Sequence[Location]) -> _Place:
        encoding = self._encoding
        layout = Layout.of(encoding.columns, encoding.compression)
        encoded = self._reading.encode(records, folders=folders)
        rows = kind_of(encoding).open_rows(encoding, layout, self._tokenizer.dtype)
        parts = [*rows.add(encoded)]
        rest, totals, leftover, _ = rows.finish()
        parts.append(rest)
        body = b"".join(part.body.tobytes() for part in parts) + leftover.tobytes()
        count = sum(map(len, parts)) + len(leftover) / encoding.max_seq_len
        return _Place(
            totals=totals,
            tokens=totals.tokens + len(leftover),
            raw=len(body) + OFFSET_BYTES * count,
            body=body,
            left_out=Counter(each.reason for each in encoded.rejected),
        )


def _span(units: Sequence[Unit], records: int) -> int:
    """The bytes that so many records take, by the first ones of some units."""
    some = units[:: max(1, len(units) // TRIED)]
    batches = [batch for unit in some for batch in sources.read(unit, records)]
    count = sum(len(batch.records) for batch in batches)
    return max(LEAST_BYTES, sum(batch.size for batch in batches) * records // max(1, count))


def _read(unit: tuple[Unit, float], share: float, limit: int, span: int, rows: _Rows) -> _Place:
    """What becomes of the first records of a unit.

    Where a file can be cut anywhere these are all that begin in so many bytes: as many records at each place would count a place of short
    ones too high.
    """
    where, weight = unit
    cut = sources.cut(where, span)
    most = None if cut else limit + 1
    batches = list(sources.read(cut or where, most))
    bad = Counter(each.reason for batch in batches for each in batch.bad)
    count = sum(len(batch.records) for batch in batches) + bad.total()
    is_whole = cut == where if cut else count <= limit
    size = sum(batch.size for batch in batches)
    covered = sources.length_of(cut) if cut else _covered(where, weight, count, size, is_whole)
    made = rows.of(batches, where.files)
    return replace(
        made,
        weight=share,
        covered=covered,
        records=count,
        is_whole=is_whole,
        left_out=made.left_out + bad,
    )


def _covered(unit: Unit, weight: float, count: int, read: int, is_whole: bool) -> float:
    """How many bytes of the source, as it is planned, the records that were read stand for."""
    held = [format_of(file).records(file) for file in unit.files]
    known = [each for each in held if each is not None]
    if known and len(known) == len(held):
        return sources.size_of(unit.files) * count / max(1, sum(known))
    file = unit.files[0]
    planned = sources.size_of([file]) / max(1, file.stat.size)
    if planned == 1:
        return float(read)
    return weight if is_whole else read * planned / sources.expansion(file)


def _looked(
    encoding: Encoding,
    tokenizer: Tokenizer,
    files: list[SourceFile],
    units: Sequence[tuple[Unit, float]],
    places: Sequence[_Place],
) -> Looked:
    part = float(Fraction(encoding.sample or 1))
    is_all = part == 1 and all(p.is_whole for p in places) and len(places) == len(units)
    size, width = part * sum(weight for _, weight in units), encoding.max_seq_len
    joins = kind_of(encoding).joins_units(encoding)
    # A few records pack worse than all of a stream, whose rows are as good as full.
    is_full = joins or encoding.pack
    rows = [place.tokens / width if is_full else place.totals.samples for place in places]
    losses = [n * (width - 1) for n in rows] if joins else [p.totals.loss_tokens for p in places]
    values = {
        "samples": rows,
        "tokens": [place.tokens for place in places],
        "trained": losses,
        "cut": [place.totals.cut_tokens for place in places],
        "cut_rows": [place.totals.cut_rows for place in places],
        "bytes": [place.raw for place in places],
        "images": [place.totals.images for place in places],
        "image_tokens": [place.totals.image_tokens for place in places],
    }
    found = {what: _sum(places, of, size, is_all) for what, of in values.items()}
    seen = sum((place.totals for place in places), Totals())
    samples = int(found["samples"][0])
    totals = Totals(
        samples=samples,
        tokens=samples * width if joins else round(found["tokens"][0]),
        loss_tokens=samples * (width - 1) if joins else round(found["trained"][0]),
        largest_id=seen.largest_id,
        longest=width if is_full else seen.longest,
        lengths={} if is_full else seen.lengths,
        cut_rows=round(found["cut_rows"][0]),
        cut_tokens=round(found["cut"][0]),
        images=round(found["images"][0]),
        image_tokens=round(found["image_tokens"][0]),
    )
    look = Look(
        records=sum(place.records for place in places),
        places=len(places),
        of_places=len(units),
        is_all=is_all,
        packed=sum(bool(sources.packing_of(file.name)) for file in files),
        left_out=_left_out(places),
        errors={what: error for what, (_, error) in found.items()},
    )
    index = _index(encoding, files, samples, found["bytes"][0], _packing(encoding, places))
    return Looked(index=index, manifest=_manifest(encoding, tokenizer, totals, index), look=look)


def _manifest(encoding: Encoding, tokenizer: Tokenizer, totals: Totals, index: Index) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        tool_version="",
        encoding=encoding,
        tokenizer=TokenizerCard.of(tokenizer),
        backend="",
        totals=totals,
        records=Records(),
        sources=[],
        parts=[],
        index_hash=index.hash,
        complete=True,
    )


def _sum(
    places: Sequence[_Place], values: Sequence[float], size: float, is_all: bool
) -> tuple[float, float | None]:
    """The sum over the whole source, and its relative standard error.

    Places are drawn by their bytes, so the mean of their rates is that of the source. Records of one place are alike: a place
    counts as one observation, however many records it gave. A place without a record lies inside a long one.
    """
    if is_all:
        return float(sum(values)), 0.0
    seen = [(p.weight, v / p.covered) for p, v in zip(places, values, strict=True) if p.covered]
    shares, rates = np.array(seen).T
    shares, n = shares / shares.sum(), len(seen)
    mean = float(shares @ rates)
    if n < 2 or not mean:
        return mean * size, None
    error = math.sqrt(n / (n - 1) * float(shares**2 @ (rates - mean) ** 2))
    return mean * size, error / mean


def _index(
    encoding: Encoding, files: list[SourceFile], samples: int, raw: float, packing: float | None
) -> Index:
    """Shards as a conversion would cut them: those of each work unit by themselves, none above the largest size."""
    units = [(unit, weight) for unit, weight in _units(files, encoding, sources.WINDOW_BYTES)]
    weights = [
        weight / pieces
        for _, weight in units
        if (pieces := max(1, math.ceil(weight / sources.WINDOW_BYTES)))
        for _ in range(pieces)
    ]
    layout, total = Layout.of(encoding.columns, encoding.compression), sum(weights)
    shards, before, done = list[Shard](), 0, 0.0
    for weight in weights:
        done += weight
        of_unit = round(samples * done / total) - before
        before += of_unit
        size = raw * weight / total
        pieces = max(1, math.ceil(size / SHARD_BYTES), math.ceil(of_unit / SHARD_ROWS))
        shards += _shards(layout, of_unit, size, pieces, packing, len(shards))
    return make_index(shards)


def _shards(
    layout: Layout, samples: int, size: float, pieces: int, packing: float | None, first: int
) -> Iterator[Shard]:
    for piece in range(pieces):
        count = samples * (piece + 1) // pieces - samples * piece // pieces
        name, raw = f"not-yet-{first + piece}.mds", round(size / pieces)
        packed = packing and StoredFile(basename=f"{name}.zstd", bytes=round(raw * packing))
        if count:
            yield Shard.of(layout, count, StoredFile(basename=name, bytes=raw), packed or None)


def _packing(encoding: Encoding, places: Sequence[_Place]) -> float | None:
    """How small compression makes a byte; None where shards are not compressed."""
    if encoding.compression is None:
        return None
    body = b"".join(place.body for place in places)
    return len(compressed([memoryview(body)], encoding.compression)) / max(1, len(body))


def _left_out(places: Sequence[_Place]) -> Counter[str]:
    return sum((place.left_out for place in places), Counter())


def _reasons(places: Sequence[_Place]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in _left_out(places).items()) or "no record"
