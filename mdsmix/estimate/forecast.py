"""Forecasts of the index and manifest that an unconverted stream will have once it is published.

A forecast follows from a survey of the stream's source. A source of less than 2 MiB is read whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

from mdsmix import sources
from mdsmix.encode.backends import open_backend
from mdsmix.errors import RecipeError
from mdsmix.estimate.budget_share import SourceEstimate, choose_sampling_share
from mdsmix.estimate.survey import SplitSample, Survey, estimate_rates
from mdsmix.kinds.assemble import Assembled
from mdsmix.kinds.encodings import resolve_stream
from mdsmix.kinds.kind import Kind
from mdsmix.kinds.resolved_stream import ResolvedStream
from mdsmix.lazy_numpy import NDArray
from mdsmix.messages import join_counts, plural
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.rules import count_budget_tokens
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.shapes.functions import is_function
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import Index, StoredFile, make_index
from mdsmix.shards.manifest import FORMAT_VERSION, Manifest, TokenizerCard
from mdsmix.shards.published import PublishedStream
from mdsmix.shards.shard_files import (
    SHARD_BYTES,
    SHARD_ROWS,
    ShardLayout,
    compress_zstd,
    make_shard,
)
from mdsmix.sources import SourceFile
from mdsmix.storage import Location, locate
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer

LEAST_WINDOW = 1 << 16
"""The fewest bytes of a split (a part of a source file): 64 KiB. A survey reads from up to 32
splits, so it reads a source of up to 2 MiB whole.
"""
BYTES = 1 << 22
"Bytes of records that a survey decodes: 4 MiB over all splits."
BYTES_WITH_IMAGES = 1 << 18
"""The same for records with images: 256 KiB, about 1,000 records. It is less, since the images must
be read too.
"""
SCALED = (
    "tokens",
    "loss_tokens",
    "cut_rows",
    "cut_tokens",
    "truncated_rows",
    "truncated_tokens",
    "left_out_turns",
    "given_eos",
    "images",
    "image_tokens",
)
"Fields of Totals that grow in proportion to the size of the stream."
OFFSET_BYTES = 4
"Bytes that each sample takes in a shard's table of offsets."


class Forecast(NamedTuple):
    """A stream as it will probably be published."""

    stream: PublishedStream
    "Its index and manifest."
    note: str
    "A sentence for the user on how much of the source was read."


def forecast_stream(recipe: Recipe, spec: StreamSpec) -> Forecast:
    """Forecast the index and manifest with which a stream will be published.

    Raises RecipeError if no record becomes a sample, a user's function makes the records, or the
    recipe is wrong.

    Args:
        recipe: the recipe.
        spec: a stream of the recipe that is not converted yet.
    """
    source = spec.source
    assert source is not None
    if is_function(source.shape):
        raise RecipeError(
            f"stream {spec.name} is not converted yet, and its tokens cannot be estimated, because "
            f"only a conversion runs the function {source.shape}, which makes its records. To "
            "count the tokens of the first 1,000 records, run "
            f"`mdsmix convert --only {spec.name} --limit 1000`."
        )
    # Survey the source.
    tokenizer = open_tokenizer(recipe.tokenizer)
    stream = resolve_stream(recipe, spec, tokenizer)
    files = sources.find_files(source.path, recipe.folder, sources.ReadAs.of(source))
    size = sources.estimate_size(files)
    if not size:
        raise RecipeError(
            f"the source of stream {spec.name} is empty, so its tokens cannot be estimated: check "
            "the path of its source in the recipe."
        )
    samples = _survey(recipe, spec, stream, tokenizer, files)
    note = f"{spec.name} is not converted yet; {_describe_survey(samples, size)}"
    rates = estimate_rates(samples)
    if rates is None:
        raise RecipeError(
            f"{note}. These records give no token, so the tokens of the stream cannot be "
            f"estimated. To see why, run `mdsmix convert --only {spec.name} --limit 100`."
        )
    # For `sample: budget`, choose the share of records that the budget needs.
    if spec.sample == BY_BUDGET:
        tokens = count_budget_tokens(recipe, spec)
        sampling = choose_sampling_share(SourceEstimate.of(rates, files), tokens)
        stream = stream.with_settings(sample=sampling.setting)
    # Scale the surveyed part to the whole stream.
    scale = float(Fraction(stream.encoding.sample or 1))
    scale *= max(1.0, size / sum(sample.weight for sample in samples))
    folder = locate(recipe.published(spec)) / spec.split
    forecast = _scale_up(folder, stream, tokenizer, samples, scale, size)
    return Forecast(forecast, note)


def _survey(
    recipe: Recipe,
    spec: StreamSpec,
    stream: ResolvedStream,
    tokenizer: Tokenizer,
    files: Sequence[SourceFile],
) -> list[SplitSample]:
    """Read and encode the first records of some splits (parts of the source's files). Return the
    encoded records of each split.

    All records at the beginning of a split are read, even if the stream takes only a sample of
    them, since a small sample of a few records may be empty. If the sample's size comes from a
    budget, the same splits are read as by the conversion, so that both choose the same share.

    Args:
        recipe: the recipe, which names the tokenizer backend.
        spec: the stream as the recipe describes it.
        stream: the stream's settings after all defaults are filled in.
        tokenizer: the recipe's tokenizer.
        files: all files of the source.
    """
    # Read records that are not in the stream's sample too.
    stream = stream.with_settings(sample=None)
    root = spec.images.root if spec.images else None
    is_by_budget = spec.sample == BY_BUDGET
    has_images = stream.kind.has_images
    reads_images = has_images
    if is_by_budget:  # a conversion then reads images only if there is a processor
        reads_images = "processor" in stream.encoding.images
    survey = Survey(
        stream=stream,
        tokenizer=tokenizer,
        open_backend=partial(open_backend, tokenizer),
        backend=recipe.tokenizer.backend,
        images_root=locate(root) if root else None,
        reads_images=reads_images,
    )
    if is_by_budget:
        return survey.read(survey.choose_units(files))
    units = survey.choose_units(files, LEAST_WINDOW)
    bytes_of_all_splits = BYTES_WITH_IMAGES if has_images else BYTES
    return survey.read(units, bytes_of_all_splits // len(units))


def _describe_survey(samples: Sequence[SplitSample], size: int) -> str:
    """Return a phrase on the records that were read: `90 records at 3 places of its source were
    read; 2 of these records become no sample (2 not_json)`.

    Args:
        samples: the splits (parts of source files) that were read.
        size: bytes of all source files.
    """
    left_out = sum((sample.left_out for sample in samples), Counter[str]())
    records = sum(len(sample.by_record) for sample in samples) + left_out.total()
    # Weights are floating-point numbers, so their sum may be a little less than the size.
    is_whole = sum(sample.weight for sample in samples) >= size * (1 - 1e-9)
    were = "was" if records == 1 else "were"
    phrase = (
        f"{plural(records, 'record')} at {plural(len(samples), 'place')} of its source {were} read"
    )
    if is_whole:
        phrase += ", which is all of the source"
    if left_out:
        reasons = join_counts(left_out)
        phrase += f"; {left_out.total():,} of these records become no sample ({reasons})"
    return phrase


def _scale_up(
    folder: Location,
    stream: ResolvedStream,
    tokenizer: Tokenizer,
    samples: Sequence[SplitSample],
    scale: float,
    size: int,
) -> PublishedStream:
    """Multiply the counts of the splits that were read, and return the forecast of the whole
    stream. All its shards have the same size.

    Args:
        folder: where the stream will be published.
        stream: its settings.
        tokenizer: its tokenizer.
        samples: the splits that were read.
        scale: the size of the stream divided by the size of the splits.
        size: bytes of the whole source.
    """
    kind = stream.kind
    layout = ShardLayout(stream.encoding.columns, stream.encoding.compression)
    # Lay out the surveyed rows as a conversion does, and join their bytes.
    assembler = kind.open_rows(layout, tokenizer.dtype)
    arrays = list[NDArray[Any]]()
    for sample in samples:
        for rows in assembler.add(sample.encoded):
            arrays += rows.arrays
    assembled = assembler.finish()
    arrays += [*assembled.rows.arrays, assembled.leftover]
    body = b"".join(array.tobytes() for array in arrays)
    # Scale them to the whole stream.
    index = _scale_index(kind, layout, assembled, body, scale, size)
    totals = _scale_totals(kind, assembled.totals, index, scale)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tool_version="",
        encoding=stream.encoding,
        tokenizer=TokenizerCard.from_tokenizer(tokenizer),
        backend="",
        totals=totals,
        records=Records(),
        sources=[],
        parts=[],
        index_hash=index.hash,
        complete=True,
    )
    return PublishedStream(folder=folder, index=index, manifest=manifest)


def _scale_index(
    kind: Kind,
    layout: ShardLayout,
    assembled: Assembled,
    body: bytes,
    scale: float,
    size: int,
) -> Index:
    """Return the forecast index (index.json) of the whole stream. Its shards are equal, and as many
    as the stream's bytes, samples and work units (parts of the source, converted one by one)
    require.

    Args:
        kind: how the stream's records become rows; it has the row length and the size of a work
            unit.
        layout: the stream's columns and compression.
        assembled: the rows of the splits that were read, and the tokens that filled no row.
        body: the bytes of these rows as they are stored.
        scale: the size of the stream divided by the size of the splits.
        size: bytes of the whole source.
    """
    # Leftover tokens that do not fill a row count as a fraction of a row, since a conversion joins
    # them to the leftover tokens of other work units.
    leftover_rows = len(assembled.leftover) / kind.encoding.max_seq_len
    samples = max(1, round(scale * (assembled.totals.samples + leftover_rows)))
    raw_bytes = scale * len(body) + OFFSET_BYTES * samples
    # Each work unit has at least one shard, and a shard has at most SHARD_BYTES and SHARD_ROWS.
    units = math.ceil(size / kind.window_bytes)
    shards_by_bytes = math.ceil(raw_bytes / SHARD_BYTES)
    shards_by_rows = math.ceil(samples / SHARD_ROWS)
    shards = min(samples, max(units, shards_by_bytes, shards_by_rows))
    # Make one shard, and repeat it.
    stored = StoredFile(basename="not-yet.mds", bytes=round(raw_bytes / shards))
    packed = None
    if layout.compression:
        ratio = len(compress_zstd(body, layout.compression)) / max(1, len(body))
        packed = StoredFile(basename="not-yet.mds.zstd", bytes=round(ratio * stored.bytes))
    shard = make_shard(layout, samples // shards, stored, packed)
    return make_index([*repeat(shard, shards)])


def _scale_totals(kind: Kind, totals: Totals, index: Index, scale: float) -> Totals:
    """Return the forecast counts of samples and tokens for the whole stream.

    Args:
        kind: how the stream's records become rows.
        totals: the counts of the splits (parts of source files) that were read. They are multiplied
            by `scale`.
        index: the forecast index of the whole stream, for the number of its samples.
        scale: the size of the stream divided by the size of the splits.
    """
    counts = {key: round(scale * getattr(totals, key)) for key in SCALED}
    counts["samples"] = index.samples
    labels = {label: round(scale * count) for label, count in totals.labels.items()}
    if kind.gets_eos:
        counts["given_eos"] = min(counts["given_eos"], index.samples)
        counts["not_given_eos"] = index.samples - counts["given_eos"]
    # Rows split from joined documents are all full. All tokens of a row but the first give a loss.
    if kind.joins_units:
        width = kind.encoding.max_seq_len
        counts["tokens"] = index.samples * width
        counts["loss_tokens"] = index.samples * (width - 1)
        totals = replace(totals, longest=width, lengths={})
    return replace(totals, labels=labels, **counts)
