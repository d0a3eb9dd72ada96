"""What a stream that is not converted yet will hold, from a sample survey of its records.

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

import numpy as np

from mdsmix import sources
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.errors import RecipeError
from mdsmix.kinds import kind_of, kind_of_stream
from mdsmix.kinds.registry import make_encoding
from mdsmix.mix.plan.places import (
    LEAST_BYTES,
    PLACES,
    Place,
    Rows,
    chosen_of,
    read_at,
    span_of,
    units_of,
)
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.sampling import BY_BUDGET, tokens_wanted
from mdsmix.recipe.taking import taken
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import Index, Shard, StoredFile, make_index
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, Manifest, TokenizerCard
from mdsmix.shards.mds import SHARD_BYTES, SHARD_ROWS, Layout
from mdsmix.shards.shardfiles import compressed
from mdsmix.sources import SourceFile, Unit
from mdsmix.words import plural

SPREAD = 1.0
"The standard deviation of a record's tokens by their mean, as documents and chats have it: of a large sample it hardly matters."


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was read, and how far it can be trusted."""

    records: int
    places: int
    of_places: int
    "How many such places the source has."
    is_all: bool
    "Every record was read."
    packed: int
    "Compressed files: their size unpacked is guessed, and they are read from their beginning alone."
    left_out: Mapping[str, int]
    "Of the records: reason -> how many became no sample."
    errors: Mapping[str, float | None]
    "Relative standard errors of samples, tokens, trained and cut tokens, and bytes; None where one place tells none."


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the stream will be like once it is published, as index and manifest would say it."""

    index: Index
    manifest: Manifest
    survey: Survey


def forecast(recipe: Recipe, spec: StreamSpec, tokenizer: Tokenizer, limit: int) -> Forecast:
    """Reads about `limit` records of the stream's source. RecipeError where none of them becomes a sample, or the recipe is wrong."""
    encoding = _encoding(recipe, spec, tokenizer)
    assert spec.source is not None
    files = sources.find(spec.source.path, recipe.folder, sources.ReadAs.of(spec.source))
    size = sources.size_of(files)
    units = units_of(files, encoding, max(LEAST_BYTES, size // PLACES))
    if not units:
        raise RecipeError(
            f"the source of {spec.name} holds no byte, so there is nothing to plan with."
        )
    chosen = chosen_of([weight for _, weight in units])
    each = max(1, -(-limit // len(chosen)))
    # A small sample of a few records may be empty: all of them are read, and the share is taken of what they come to.
    rows = Rows(replace(encoding, sample=None), tokenizer, recipe.tokenizer.backend, spec)
    span = span_of([units[number][0] for number in chosen], each)
    if span * PLACES >= size:  # there are hardly more records than were asked for
        chosen = {n: weight / size for n, (_, weight) in enumerate(units)}
    places = [read_at(units[number], share, each, span, rows) for number, share in chosen.items()]
    if not any(place.tokens for place in places):
        raise RecipeError(
            f"of {plural(sum(p.records for p in places), 'record')} of {spec.name} that a plan looks at, none becomes a sample "
            f"({_reasons(places)}): `mdsmix convert --only {spec.name} --limit 100` shows them."
        )
    whole = _forecast(encoding, tokenizer, files, units, places)
    if spec.sample != BY_BUDGET:
        return whole
    share = _share(recipe, spec, whole, places)
    return _forecast(replace(encoding, sample=share), tokenizer, files, units, places)


def _share(
    recipe: Recipe, spec: StreamSpec, whole: Forecast, places: Sequence[Place]
) -> str | None:
    """What a conversion would take of the source for the stream's share of the budget; None: all of it."""
    totals, error = whole.manifest.totals, whole.survey.errors["tokens"] or 0.0
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


def _forecast(
    encoding: Encoding,
    tokenizer: Tokenizer,
    files: list[SourceFile],
    units: Sequence[tuple[Unit, float]],
    places: Sequence[Place],
) -> Forecast:
    part = float(Fraction(encoding.sample or 1))
    is_all = part == 1 and all(p.is_whole for p in places) and len(places) == len(units)
    size = part * sum(weight for _, weight in units)
    figures = _figures(encoding, places)
    found = {what: _sum(places, of, size, is_all) for what, of in figures.items()}
    totals = _totals(encoding, places, {what: value for what, (value, _) in found.items()})
    packing = _packing(encoding, places)
    index = _index(encoding, files, totals.samples, found["bytes"][0], packing)
    survey = Survey(
        records=sum(place.records for place in places),
        places=len(places),
        of_places=len(units),
        is_all=is_all,
        packed=sum(bool(sources.packing_of(file.name)) for file in files),
        left_out=_left_out(places),
        errors={what: error for what, (_, error) in found.items()},
    )
    manifest = _manifest(encoding, tokenizer, totals, index)
    return Forecast(index=index, manifest=manifest, survey=survey)


def _joins(encoding: Encoding) -> bool:
    return kind_of(encoding).joins_units


def _figures(encoding: Encoding, places: Sequence[Place]) -> dict[str, Sequence[float]]:
    """What is summed up over the source -> its value at each place."""
    # A few records pack worse than all of a stream, whose rows are as good as full.
    width, is_full = encoding.max_seq_len, _joins(encoding) or encoding.pack
    totals = [place.totals for place in places]
    rows = [place.tokens / width if is_full else place.totals.samples for place in places]
    trained = (
        [n * (width - 1) for n in rows] if _joins(encoding) else [t.loss_tokens for t in totals]
    )
    return {
        "samples": rows,
        "tokens": [place.tokens for place in places],
        "trained": trained,
        "cut": [t.cut_tokens for t in totals],
        "cut_rows": [t.cut_rows for t in totals],
        "bytes": [place.raw for place in places],
        "images": [t.images for t in totals],
        "image_tokens": [t.image_tokens for t in totals],
    }


def _totals(encoding: Encoding, places: Sequence[Place], found: Mapping[str, float]) -> Totals:
    """The totals of the manifest; `found`: the sums of `_figures` over the whole source."""
    joins, width, samples = _joins(encoding), encoding.max_seq_len, int(found["samples"])
    seen = sum((place.totals for place in places), Totals())
    is_full = joins or encoding.pack
    return Totals(
        samples=samples,
        tokens=samples * width if joins else round(found["tokens"]),
        loss_tokens=samples * (width - 1) if joins else round(found["trained"]),
        largest_id=seen.largest_id,
        longest=width if is_full else seen.longest,
        lengths={} if is_full else seen.lengths,
        cut_rows=round(found["cut_rows"]),
        cut_tokens=round(found["cut"]),
        images=round(found["images"]),
        image_tokens=round(found["image_tokens"]),
    )


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
    places: Sequence[Place], values: Sequence[float], size: float, is_all: bool
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
    window = kind_of(encoding).window_bytes
    units = [(unit, weight) for unit, weight in units_of(files, encoding, window)]
    weights = [
        weight / pieces
        for _, weight in units
        if (pieces := max(1, math.ceil(weight / window)))
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


def _packing(encoding: Encoding, places: Sequence[Place]) -> float | None:
    """How small compression makes a byte; None where shards are not compressed."""
    if encoding.compression is None:
        return None
    body = b"".join(place.body for place in places)
    return len(compressed([memoryview(body)], encoding.compression)) / max(1, len(body))


def _left_out(places: Sequence[Place]) -> Counter[str]:
    return sum((place.left_out for place in places), Counter())


def _reasons(places: Sequence[Place]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in _left_out(places).items()) or "no record"
