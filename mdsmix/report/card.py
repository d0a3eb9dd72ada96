"""A published stream as JSON and as (name, value) lines: from its manifest, or from its index alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mdsmix.report.length_bars import bars
from mdsmix.shapes import find_shape
from mdsmix.shards.manifest import Encoding, Manifest
from mdsmix.shards.published import Stream
from mdsmix.table import grouped
from mdsmix.words import listed, percent, plural

MOST_SOURCES = 5


def card(stream: Stream) -> dict[str, Any]:
    """The stream as JSON: the counts of its index, and its manifest as it is published."""
    index, manifest = stream.index, stream.manifest
    counts = {"samples": index.samples, "shards": len(index.shards), "bytes": index.bytes}
    found: dict[str, Any] = {"stream": str(stream.folder), **counts, "index_hash": index.hash}
    if manifest is None:
        return found | {"manifest": None, "columns": stream.columns}
    is_whole = stream.trusted_manifest is not None
    return found | {"is_whole": is_whole, "manifest": asdict(manifest)}


def card_rows(stream: Stream) -> Iterator[tuple[str, str]]:
    """(name, value) lines."""
    index, manifest = stream.index, stream.manifest
    yield "stream", str(stream.folder)
    yield (
        "samples, shards, bytes",
        grouped((index.samples, len(index.shards), index.bytes)),
    )
    if manifest is None:
        yield "manifest", "none: not made by mdsmix convert; only the index speaks"
        yield "columns", grouped(stream.columns)
        return
    yield from _encoded(manifest)
    yield from _mixed(manifest) if manifest.mixed else _records(manifest)
    encoding, totals = manifest.encoding, manifest.totals
    yield (
        "special tokens in text",
        f"{encoding.special_tokens_in_text}, {totals.specials:,} records",
    )
    yield "encoded by", manifest.backend
    yield (
        "index",
        manifest.index_hash
        if stream.trusted_manifest
        else "does not fit the manifest: a publication was interrupted, run convert again",
    )


def _encoded(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """The settings by which records became samples, and the totals of the samples."""
    encoding, totals = manifest.encoding, manifest.totals
    layout = f", {encoding.layout}" if encoding.layout else ""
    loader = "mdsmix" if encoding.images else encoding.loader
    side = "decoder-only" if encoding.decoder_only_format else "encoder-decoder"
    yield (
        "kind",
        f"{encoding.kind}, {'packed' if encoding.pack else f'for the {loader} loader'}",
    )
    yield "columns", grouped(encoding.columns)
    yield "max_seq_len", f"{encoding.max_seq_len:,}{layout}"
    yield "tokenizer", _tokenizer(manifest)
    yield (
        "targets",
        f"prompts {encoding.target_prompts}, responses {encoding.target_responses}, {side}",
    )
    yield (
        "tokens",
        f"{totals.tokens:,}, {totals.loss_tokens:,} with a loss, {totals.lost_tokens:,} in no sample",
    )
    if totals.images:
        processor = str(encoding.images.get("processor", ""))[:8]
        said = f", {totals.image_tokens:,} tokens by the processor {processor}" if processor else ""
        yield "images", f"{totals.images:,}, {totals.image_bytes:,} bytes{said}"
    if encoding.pack:
        yield "packed", packed(manifest)
    yield "longest", f"{totals.longest:,} tokens"
    for line, bar in enumerate(bars(totals.lengths, totals.longest)):
        yield "" if line else "lengths", bar


def packed(manifest: Manifest) -> str:
    """How many documents are in how many rows, and how much of the rows is padding."""
    totals, width = manifest.totals, manifest.encoding.max_seq_len
    padding = 1 - totals.tokens / max(1, totals.samples * width)
    return f"{plural(totals.documents, 'document')} in {plural(totals.samples, 'row')} of {width:,} tokens, {padding:.2%} padding"


def _read_from(encoding: Encoding) -> str:
    """The shape of the records, the fields that hold it, and how they are read."""
    shape = find_shape(encoding.shape, encoding.fields)
    said = [shape.name] if shape else []
    said += [key if key == field else f"{key}: {field}" for key, field in encoding.fields.items()]
    return ", ".join(
        [*said, *(f"{key} {value!r}" for key, value in encoding.shape_options.items())]
    )


def _records(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """The sources, and how many of their records are written, filtered and quarantined."""
    records, sources = manifest.records, manifest.sources
    if said := _read_from(manifest.encoding):
        yield "read from", said
    if share := manifest.encoding.sample:
        yield "sample", f"{percent(share)} of the records, {records.sampled:,} of {records.read:,}"
    yield (
        "records",
        f"{records.read:,} read = {records.written:,} written + {records.dropped:,} filtered "
        f"+ {records.bad:,} quarantined",
    )
    for what, reasons in (("filtered", records.filtered), ("quarantined", records.quarantined)):
        if reasons:
            yield what, grouped(reasons)
    named = listed([f"{s.path} ({s.size:,} bytes)" for s in sources], MOST_SOURCES)
    if parts := manifest.source_parts:
        named = f"{plural(manifest.source_count, 'file')}, listed in {plural(len(parts), 'file')} beside the manifest"
    yield "sources", named


def _mixed(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """The streams that a mix was drawn from."""
    for part in manifest.mixed:
        weight = ", ".join(f"{k} {v}" for k, v in part.weight.items()) or "all of it"
        drawn = f"{part.drawn:,} samples, {weight} of {part.samples:,}"
        yield "mixed from", f"{part.name} ({part.index_hash[:8]}): {drawn}"
    yield "seed", str(manifest.seed)


def _tokenizer(manifest: Manifest) -> str:
    own = manifest.tokenizer
    ids = f"bos {own.bos_id}, eos {own.eos_id}, pad {own.pad_id}"
    return f"{own.name}, {own.vocab_size:,} ids, {ids}, {own.hash[:8]}"
