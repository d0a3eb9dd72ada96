"""What a stream that is not converted yet will be like once it is published, as index and manifest would say it.

All of it follows from a survey of its source. A source of less than 2 MiB is read whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from mdsmix import sources
from mdsmix.encode.backends import open_backend
from mdsmix.encode.pretrained import Tokenizer, open_tokenizer
from mdsmix.errors import RecipeError
from mdsmix.kinds import kind_of, kind_of_stream
from mdsmix.kinds.encodings import fields_parsed, fields_read, make_encoding
from mdsmix.kinds.survey import SplitSample, Survey, look, rates_of, survey_of
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.amounts import taken
from mdsmix.recipe.rules import tokens_wanted
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.shapes.functions import is_function
from mdsmix.shards.counts import Records
from mdsmix.shards.index import Shard, StoredFile, make_index
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, Manifest, TokenizerCard
from mdsmix.shards.published import Stream
from mdsmix.shards.shard_files import SHARD_BYTES, SHARD_ROWS, ShardLayout, compressed, shard_of
from mdsmix.storage import Location, locate
from mdsmix.words import plural

LEAST_WINDOW = 1 << 16
"Of small sources, splits of 64 KiB: 32 of them are all of it."
BYTES, OF_IMAGES = 1 << 22, 1 << 18
"Bytes that are decoded, 4 MiB, and of records that name images, some 1,000: they are read."
SCALED = ("samples", "tokens", "loss_tokens", "cut_rows", "cut_tokens", "images", "image_tokens")
OFFSET_BYTES = 4
"Of each sample, in the table of a shard."


def forecast(recipe: Recipe, spec: StreamSpec) -> tuple[Stream, Survey]:
    """The stream as it will be published. RecipeError where no record that is looked at becomes a sample, or the recipe is wrong."""
    source = spec.source
    assert source is not None
    if source.shape and is_function(source.shape):
        raise RecipeError(
            f"{spec.name} is not converted, and the function {source.shape} reads its records, which only a conversion runs: "
            f"`mdsmix convert --only {spec.name} --limit 1000` shows what they come to."
        )
    tokenizer = open_tokenizer(recipe.tokenizer)
    encoding = _encoding(recipe, spec, tokenizer)
    files = sources.find(source.path, recipe.folder, sources.ReadAs.of(source))
    size = sources.size_of(files)
    if not size:
        raise RecipeError(
            f"the source of {spec.name} holds no byte, so there is nothing to plan with."
        )
    # Of few records a small sample may be empty: all of them are read, and the share is taken of what they come to.
    whole = replace(encoding, sample=None)
    has_images, root = kind_of(whole).has_images, spec.images.root if spec.images else None
    # Then what the conversion looks at: it takes the same share.
    is_by_budget = spec.sample == BY_BUDGET
    units = sources.chosen(
        files,
        sources.LEAST_WINDOW if is_by_budget else LEAST_WINDOW,
        fields=sorted(fields_read(whole)),
        parsed=sorted(fields_parsed(whole)),
    )
    looks = look(
        units,
        whole,
        tokenizer,
        recipe.tokenizer.backend,
        lambda name: open_backend(tokenizer, name),
        locate(root) if root else None,
        "processor" in whole.images if is_by_budget else has_images,
        None if is_by_budget else (OF_IMAGES if has_images else BYTES) // len(units),
    )
    survey = survey_of(looks, size)
    if (rates := rates_of(looks)) is None:
        raise RecipeError(
            f"of {plural(survey.records, 'record')} of {spec.name} that a plan looks at, none becomes a sample ({left_out(survey) or 'no record'}): "
            f"`mdsmix convert --only {spec.name} --limit 100` shows them."
        )
    if is_by_budget:
        tokens = rates.each * size
        part = float(tokens_wanted(recipe, spec)) / tokens
        share, _ = taken(part, tokens / rates.mean, rates.error, rates.spread)
        encoding = replace(encoding, sample=None if share == 1 else str(share))
    scale = float(Fraction(encoding.sample or 1))
    if not survey.is_all:
        scale *= size / sum(each.weight for each in looks)
    folder = locate(recipe.published(spec)) / spec.split
    return _stream(folder, encoding, tokenizer, looks, scale, size), survey


def left_out(survey: Survey) -> str:
    """How many records became no sample, for each reason."""
    return ", ".join(f"{n} {reason}" for reason, n in survey.left_out.items())


def _encoding(recipe: Recipe, spec: StreamSpec, tokenizer: Tokenizer) -> Encoding:
    kind = kind_of_stream(spec)
    assert kind is not None, "a recipe that was opened has a kind for each stream with a source"
    for sentence in kind.lacking(recipe, spec, tokenizer):
        raise RecipeError(sentence)
    return make_encoding(recipe, spec, tokenizer)


def _stream(
    folder: Location,
    encoding: Encoding,
    tokenizer: Tokenizer,
    looks: Sequence[SplitSample],
    scale: float,
    size: int,
) -> Stream:
    """The stream of a source of so many bytes. `scale`: by how much it is larger than what was looked at."""
    kind, layout = kind_of(encoding), ShardLayout(encoding.columns, encoding.compression)
    rows, width = kind.open_rows(layout, tokenizer.dtype), encoding.max_seq_len
    parts = [part for each in looks for part in rows.add(each.encoded)]
    rest, seen, leftover, _ = rows.finish()
    body = b"".join(part.values.tobytes() for part in (*parts, rest)) + leftover.tobytes()
    # Where units join, every unit's rest becomes rows.
    samples = scale * (seen.samples + len(leftover) / width)
    counts = {key: round(scale * getattr(seen, key)) for key in SCALED}
    if kind.joins_units:
        n = round(samples)
        counts |= {"samples": n, "tokens": n * width, "loss_tokens": n * (width - 1)}
        seen = replace(seen, longest=width, lengths={})
    units = max(1, math.ceil(size / kind.window_bytes))
    raw = scale * len(body) + OFFSET_BYTES * samples
    index = make_index(list(_shards(layout, counts["samples"], raw, units, body)))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        tool_version="",
        encoding=encoding,
        tokenizer=TokenizerCard.of(tokenizer),
        backend="",
        totals=replace(seen, **counts),
        records=Records(),
        sources=[],
        parts=[],
        index_hash=index.hash,
        complete=True,
    )
    return Stream(folder=folder, index=index, manifest=manifest)


def _shards(
    layout: ShardLayout, samples: int, raw: float, units: int, body: bytes
) -> Iterator[Shard]:
    """As a conversion would cut them: those of each work unit by themselves, none above the largest size. `body`: some of what they hold."""
    pieces = units * max(
        1, math.ceil(raw / units / SHARD_BYTES), math.ceil(samples / units / SHARD_ROWS)
    )
    codec, size, packed = layout.compression, round(raw / pieces), None
    ratio = len(compressed([memoryview(body)], codec)) / max(1, len(body)) if codec else 1
    ends = np.linspace(0, samples, pieces + 1).astype(np.int64)
    for piece, here in enumerate(np.diff(ends).tolist()):
        stored = StoredFile(basename=f"not-yet-{piece}.mds", bytes=size)
        if codec:
            packed = StoredFile(basename=f"{stored.basename}.zstd", bytes=round(size * ratio))
        if here:
            yield shard_of(layout, here, stored, packed)
