"""What a stream that is not converted yet will be like once it is published, as index and manifest would say it.

All of it follows from a survey of its source. A source of less than 2 MiB is read whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

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
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import Index, Shard, StoredFile, make_index
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, Manifest, TokenizerCard
from mdsmix.shards.published import Stream
from mdsmix.shards.shard_files import SHARD_BYTES, SHARD_ROWS, ShardLayout, compressed, shard_of
from mdsmix.sources import SourceFile
from mdsmix.storage import locate
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
    assert spec.source is not None
    if spec.source.shape and is_function(spec.source.shape):
        raise RecipeError(
            f"{spec.name} is not converted, and the function {spec.source.shape} reads its records, which only a conversion runs: "
            f"`mdsmix convert --only {spec.name} --limit 1000` shows what they come to."
        )
    tokenizer = open_tokenizer(recipe.tokenizer)
    encoding = _encoding(recipe, spec, tokenizer)
    files = sources.find(spec.source.path, recipe.folder, sources.ReadAs.of(spec.source))
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
    rates = rates_of(looks)
    if rates is None:
        raise RecipeError(
            f"of {plural(survey.records, 'record')} of {spec.name} that a plan looks at, none becomes a sample ({left_out(survey) or 'no record'}): "
            f"`mdsmix convert --only {spec.name} --limit 100` shows them."
        )
    if spec.sample == BY_BUDGET:
        tokens = rates.each * size
        part = float(tokens_wanted(recipe, spec)) / tokens
        share, _ = taken(part, tokens / rates.mean, rates.error, rates.spread)
        encoding = replace(encoding, sample=None if share == 1 else str(share))
    part = float(Fraction(encoding.sample or 1))
    scale = part if survey.is_all else part * size / sum(each.weight for each in looks)
    totals, raw, packing = _made(encoding, tokenizer, looks, scale)
    index = make_index(list(_shards(encoding, files, totals.samples, raw, packing)))
    manifest = _manifest(encoding, tokenizer, totals, index)
    folder = locate(recipe.published(spec)) / spec.split
    return Stream(folder=folder, index=index, manifest=manifest), survey


def left_out(survey: Survey) -> str:
    """How many records became no sample, for each reason."""
    return ", ".join(f"{n} {reason}" for reason, n in survey.left_out.items())


def _encoding(recipe: Recipe, spec: StreamSpec, tokenizer: Tokenizer) -> Encoding:
    kind = kind_of_stream(spec)
    assert kind is not None, "a recipe that was opened has a kind for each stream with a source"
    for sentence in kind.lacking(recipe, spec, tokenizer):
        raise RecipeError(sentence)
    return make_encoding(recipe, spec, tokenizer)


def _made(
    encoding: Encoding, tokenizer: Tokenizer, looks: Sequence[SplitSample], scale: float
) -> tuple[Totals, float, float | None]:
    """The totals of the stream, the bytes of its samples, and how small compression makes a byte. `scale`: the stream by what was seen."""
    layout = ShardLayout(encoding.columns, encoding.compression)
    rows = kind_of(encoding).open_rows(layout, tokenizer.dtype)
    parts = [part for each in looks for part in rows.add(each.encoded)]
    rest, seen, leftover, _ = rows.finish()
    body = b"".join(part.body.tobytes() for part in (*parts, rest)) + leftover.tobytes()
    samples = seen.samples + len(leftover) / encoding.max_seq_len
    joins, width = kind_of(encoding).joins_units, encoding.max_seq_len
    if joins:  # every unit's rest becomes rows
        samples = round(scale * samples)
        totals = replace(seen, samples=samples, tokens=samples * width, longest=width)
        totals = replace(totals, loss_tokens=samples * (width - 1), lengths={})
    else:
        totals = replace(seen, **{key: round(scale * getattr(seen, key)) for key in SCALED})
    raw = scale * (len(body) + OFFSET_BYTES * (seen.samples + len(leftover) / width))
    if encoding.compression is None:
        return totals, raw, None
    packed = compressed([memoryview(body)], encoding.compression)
    return totals, raw, len(packed) / max(1, len(body))


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


def _shards(
    encoding: Encoding, files: list[SourceFile], samples: int, raw: float, packing: float | None
) -> Iterator[Shard]:
    """As a conversion would cut them: those of each work unit by themselves, none above the largest size."""
    layout, size = ShardLayout(encoding.columns, encoding.compression), sources.size_of(files)
    units = max(1, math.ceil(size / kind_of(encoding).window_bytes))
    pieces = max(1, math.ceil(raw / units / SHARD_BYTES), math.ceil(samples / units / SHARD_ROWS))
    count = units * pieces
    for piece in range(count):
        here = samples * (piece + 1) // count - samples * piece // count
        name, bytes = f"not-yet-{piece}.mds", round(raw / count)
        packed = packing and StoredFile(basename=f"{name}.zstd", bytes=round(bytes * packing))
        if here:
            yield shard_of(layout, here, StoredFile(basename=name, bytes=bytes), packed or None)
