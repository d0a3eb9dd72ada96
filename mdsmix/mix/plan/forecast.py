"""Forecasts the index and manifest that an unconverted stream will have once it is published.

The forecast follows from a survey of the stream's source. A source of less than 2 MiB is read
whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain

from mdsmix import sources
from mdsmix.encode.backends import open_backend
from mdsmix.errors import RecipeError
from mdsmix.kinds import kind_of
from mdsmix.kinds.encodings import fields_parsed, fields_read, make_encoding
from mdsmix.kinds.read_records import open_reading
from mdsmix.kinds.survey import SplitSample, look, rates_of
from mdsmix.messages import join_counts, plural
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.amounts import taken
from mdsmix.recipe.rules import tokens_wanted
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.shapes.functions import is_function
from mdsmix.shards.counts import Records
from mdsmix.shards.index import StoredFile, make_index
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, Manifest, TokenizerCard
from mdsmix.shards.published import PublishedStream
from mdsmix.shards.shard_files import (
    SHARD_BYTES,
    SHARD_ROWS,
    ShardLayout,
    compress_zstd,
    make_shard,
)
from mdsmix.storage import Location, locate
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer

LEAST_WINDOW = 1 << 16
"Bytes of a split of a small source, 64 KiB: 32 splits are the whole of 2 MiB."
BYTES, OF_IMAGES = 1 << 22, 1 << 18
"""Bytes of records that are decoded: 4 MiB, or 256 KiB (some 1,000 records) where records name
images, which are read too.
"""
SCALED = (
    *("tokens", "loss_tokens", "cut_rows", "cut_tokens", "truncated_rows", "truncated_tokens"),
    *("given_eos", "images", "image_tokens"),
)
OFFSET_BYTES = 4
"Bytes of each sample in a shard's table of offsets."


def forecast_stream(recipe: Recipe, spec: StreamSpec) -> tuple[PublishedStream, str]:
    """The stream as it will be published, and a sentence on how far its source was read.
    RecipeError where no record becomes a sample, or the recipe is wrong.
    """
    source = spec.source
    assert source is not None
    if is_function(source.shape):
        raise RecipeError(
            f"{spec.name} is not converted, and the function {source.shape} reads its records, which only a conversion runs: "
            f"`mdsmix convert --only {spec.name} --limit 1000` shows what they come to."
        )
    tokenizer = open_tokenizer(recipe.tokenizer)
    encoding = make_encoding(recipe, spec, tokenizer)
    files = sources.find_files(source.path, recipe.folder, sources.ReadAs.of(source))
    if not (size := sources.estimate_size(files)):
        raise RecipeError(f"the source of {spec.name} holds no byte, so there is nothing to plan with.")  # fmt: skip
    looks = _look(recipe, spec, encoding, tokenizer, files)
    said, rates = f"{spec.name} is not converted yet: {_looked_at(looks, size)}", rates_of(looks)
    if rates is None:
        raise RecipeError(f"{said}, so there is nothing to plan with: `mdsmix convert --only {spec.name} --limit 100` shows them.")  # fmt: skip
    if spec.sample == BY_BUDGET:
        tokens = rates.each * size
        part = float(tokens_wanted(recipe, spec)) / tokens
        share, _ = taken(part, tokens / rates.mean, rates.error, rates.spread)
        encoding = replace(encoding, sample=None if share == 1 else str(share))
    scale = float(Fraction(encoding.sample or 1))
    scale *= max(1.0, size / sum(each.weight for each in looks))
    folder = locate(recipe.published(spec)) / spec.split
    return _stream(folder, encoding, tokenizer, looks, scale, size), said


def _look(
    recipe: Recipe,
    spec: StreamSpec,
    encoding: Encoding,
    tokenizer: Tokenizer,
    files: Sequence[sources.SourceFile],
) -> list[SplitSample]:
    """Reads splits of the source. A stream's `sample` is ignored here, since a small sample of few
    records may be empty. A stream by budget is read at the same places as by its conversion, so
    that both take the same share.
    """
    whole = replace(encoding, sample=None)
    has_images, root = kind_of(whole).has_images, spec.images.root if spec.images else None
    window, decoded = LEAST_WINDOW, OF_IMAGES if has_images else BYTES
    if is_by_budget := spec.sample == BY_BUDGET:
        window, has_images = sources.LEAST_WINDOW, "processor" in whole.images
    read = {"fields": sorted(fields_read(whole)), "parsed": sorted(fields_parsed(whole))}
    units = sources.choose_splits(files, window, **read)
    base = locate(root) if root and has_images else None
    return look(
        units,
        lambda name: open_reading(whole, tokenizer, open_backend(tokenizer, name), base),
        recipe.tokenizer.backend,
        has_images and not base,
        None if is_by_budget else decoded // len(units),
    )


def _looked_at(looks: Sequence[SplitSample], size: int) -> str:
    """A sentence on how many records were read, and how many become no sample. `size`: bytes of all
    files.
    """
    left_out = sum((each.left_out for each in looks), Counter[str]())
    records = sum(len(each.by_record) for each in looks) + left_out.total()
    is_all = sum(each.weight for each in looks) >= size * (1 - 1e-9)
    said = f"{plural(records, 'record')} at {plural(len(looks), 'place')} looked at{', which are all' * is_all}"
    if left_out:
        said += (
            f"; {left_out.total():,} of these records become no sample ({join_counts(left_out)})"
        )
    return said


def _stream(
    folder: Location,
    encoding: Encoding,
    tokenizer: Tokenizer,
    looks: Sequence[SplitSample],
    scale: float,
    size: int,
) -> PublishedStream:
    """The stream of a source of `size` bytes, in equal shards. `scale`: the stream's size as a
    multiple of the part that was read.
    """
    kind, layout = kind_of(encoding), ShardLayout(encoding.columns, encoding.compression)
    rows, width = kind.open_rows(layout, tokenizer.dtype), encoding.max_seq_len
    parts = [part for each in looks for part in rows.add(each.encoded)]
    rest, seen, leftover, _ = rows.finish()
    arrays = [*chain.from_iterable(part.arrays for part in (*parts, rest)), leftover]
    body = b"".join(array.tobytes() for array in arrays)
    # The rest of a unit that fills no row joins the next unit's.
    samples = max(1, round(scale * (seen.samples + len(leftover) / width)))
    raw = scale * len(body) + OFFSET_BYTES * samples
    least = (size / kind.window_bytes, raw / SHARD_BYTES, samples / SHARD_ROWS)
    number = min(samples, max(map(math.ceil, least)))
    stored, packed = StoredFile(basename="not-yet.mds", bytes=round(raw / number)), None
    if codec := layout.compression:
        ratio = len(compress_zstd(body, codec)) / max(1, len(body))
        packed = StoredFile(basename="not-yet.mds.zstd", bytes=round(ratio * stored.bytes))
    index = make_index([make_shard(layout, samples // number, stored, packed)] * number)
    counts = {
        "samples": index.samples,
        **{key: round(scale * getattr(seen, key)) for key in SCALED},
    }
    if kind.gets_eos:
        counts["given_eos"] = min(counts["given_eos"], index.samples)
        counts["not_given_eos"] = index.samples - counts["given_eos"]
    if kind.joins_units:
        n = index.samples
        counts |= {"tokens": n * width, "loss_tokens": n * (width - 1)}
        seen = replace(seen, longest=width, lengths={})
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tool_version="",
        encoding=encoding,
        tokenizer=TokenizerCard.from_tokenizer(tokenizer),
        backend="",
        totals=replace(seen, **counts),
        records=Records(),
        sources=[],
        parts=[],
        index_hash=index.hash,
        complete=True,
    )
    return PublishedStream(folder=folder, index=index, manifest=manifest)
