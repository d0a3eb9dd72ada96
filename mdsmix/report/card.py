"""What a published stream is, as a table: its manifest, or what its index alone can say."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.shards.index import Index
from mdsmix.shards.manifest import Manifest


def card_rows(where: str, index: Index, manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    """(what, value) lines, the most asked for first."""
    yield "stream", where
    yield "samples, shards, bytes", f"{index.samples:,}, {len(index.shards):,}, {index.bytes:,}"
    if manifest is None:
        yield "manifest", "none: not made by mdsmix convert; only the index speaks"
        columns = index.shards[0].columns if index.shards else {}
        yield "columns", _spelled(columns)
        return
    encoding, totals = manifest.encoding, manifest.totals
    yield "kind", f"{encoding.kind}, for the {encoding.loader} loader"
    yield "columns", _spelled(encoding.columns)
    yield (
        "max_seq_len",
        f"{encoding.max_seq_len:,}" + (f", {encoding.layout}" if encoding.layout else ""),
    )
    yield "tokenizer", _tokenizer(manifest)
    yield (
        "targets",
        f"prompts {encoding.target_prompts}, responses {encoding.target_responses}, "
        + ("decoder-only" if encoding.decoder_only_format else "encoder-decoder"),
    )
    yield (
        "tokens",
        f"{totals.tokens:,}, {totals.loss_tokens:,} with a loss, {totals.lost_tokens:,} in no sample",
    )
    yield (
        "lengths",
        ", ".join(f"{k}: {n:,}" for k, n in totals.lengths.items())
        + f"; longest {totals.longest:,}",
    )
    yield from _mixed(manifest) if manifest.mixed else _records(manifest)
    yield (
        "special tokens in text",
        f"{encoding.special_tokens_in_text}, {totals.specials:,} records",
    )
    yield "encoded by", f"{manifest.backend}, {totals.compared:,} texts compared with the reference"
    yield (
        "index",
        manifest.index_hash
        if manifest.index_hash == index.hash
        else ("does not fit the manifest: a publication was interrupted, run convert again"),
    )


def _records(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What became of the records of which sources."""
    records = manifest.records
    yield (
        "records",
        (
            f"{records.read:,} read = {records.written:,} written + {records.dropped:,} filtered "
            f"+ {records.bad:,} quarantined"
        ),
    )
    for what, reasons in (("filtered", records.filtered), ("quarantined", records.quarantined)):
        if reasons:
            yield what, _spelled(reasons)
    yield (
        "sources",
        ", ".join(f"{s.path} ({s.size:,} bytes)" for s in manifest.sources[:5])
        + (f" and {len(manifest.sources) - 5} more" if len(manifest.sources) > 5 else ""),
    )


def _mixed(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What a mix was drawn from."""
    for part in manifest.mixed:
        weight = ", ".join(f"{k} {v}" for k, v in part.weight.items()) or "all of it"
        yield (
            "mixed from",
            f"{part.name} ({part.index_hash[:8]}): {part.drawn:,} samples, {weight} of {part.samples:,}",
        )
    yield "seed", str(manifest.seed)


def _tokenizer(manifest: Manifest) -> str:
    card = manifest.tokenizer
    ids = ", ".join(
        f"{n} {v}" for n, v in (("bos", card.bos_id), ("eos", card.eos_id), ("pad", card.pad_id))
    )
    return f"{card.name}, {card.vocab_size:,} ids, {ids}, {card.hash[:8]}"


def _spelled(pairs: dict[str, str] | dict[str, int]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in pairs.items())
