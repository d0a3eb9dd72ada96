"""The output of `mdsmix preview`, for people and for programs: steps with their rows, decoded
samples, and the epoch in windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from operator import mul

import numpy as np
from numpy.typing import NDArray

from mdsmix.load.layout import SamplePlace
from mdsmix.messages import plural
from mdsmix.preview.epoch_windows import Preview, sentences
from mdsmix.preview.step_rows import SampleRow, Step
from mdsmix.report.show import Item, NamedValues, SampleText, Title
from mdsmix.report.shown_samples import Segment, runs_of, sample_json, segments, shortened
from mdsmix.shards.token_ids import IGNORED_LABEL
from mdsmix.table import Column, Table, Tree, as_json, grouped
from mdsmix.tokenizer.card import Decoder

TOKENS_SHOWN = 256
"Tokens that are shown of a sample: half from its beginning and half from its end."
STEP = (
    Column("stream", "text"),
    Column("samples"),
    Column("tokens"),
    Column("trained"),
    Column("of samples", "share", key="share_of_samples"),
    Column("of tokens", "share", key="share_of_tokens"),
    Column("of trained", "share", key="share_of_trained"),
)
EPOCH = (
    Column("stream", "text"),
    Column("samples"),
    Column("of samples", "share", key="share_of_samples"),
    Column("planned", "share"),
    Column("tokens"),
    Column("share", "share"),
)


def step_table(preview: Preview, counts: NDArray[np.int64]) -> Table:
    """A row for each stream of the mix: its samples and tokens in the devices' rows. `counts`:
    int64 [streams, COUNTED].
    """
    total = counts.sum(axis=0)
    whole = np.vstack([counts, total])
    shares = whole / np.maximum(1, total)
    names = (*preview.layout.names, "all")
    rows = [(n, *of, *part) for n, of, part in zip(names, whole.tolist(), shares.tolist(), strict=True)]  # fmt: skip
    return Table(columns=STEP, rows=rows[:-1], total=rows[-1])


def epoch_table(preview: Preview) -> Table:
    """A row for each stream: its samples and tokens in the epoch."""
    windows, planned = preview.windows, preview.layout.planned
    samples, sizes = windows.samples.sum(axis=0), windows.sizes.sum(axis=0)
    rows = zip(
        preview.layout.names,
        samples.tolist(),
        (samples / samples.sum()).tolist(),
        (planned / planned.sum()).tolist(),
        map(mul, samples.tolist(), preview.tokens),
        (sizes / sizes.sum()).tolist(),
        strict=True,
    )
    return Table(columns=EPOCH, rows=list(rows))


def windows_table(preview: Preview) -> Table:
    """A row for each window of steps: the shares of the streams."""
    sizes = preview.windows.sizes
    shares = (sizes / sizes.sum(axis=1, keepdims=True)).tolist()
    windows = zip(pairwise(preview.windows.edges), shares, strict=True)
    rows = [(f"{start:,} to {stop - 1:,}", *each) for (start, stop), each in windows]
    names = (Column(name, "share") for name in preview.layout.names)
    return Table(columns=[Column("steps", "text"), *names], rows=rows)


def preview_shown(preview: Preview, decoder: Decoder | None, with_ids: bool) -> Iterator[Item]:
    """The whole preview for a person."""
    yield NamedValues([(key, grouped(value)) for key, value in _run(preview).items()])
    for step in preview.steps:
        yield from ("", _step_line(step))
        if step.counts is not None:
            yield step_table(preview, step.counts)
        for rank in step.ranks if with_ids else ():
            places = " ".join(_where(preview, place) for place in rank.places)
            yield f"  node {rank.node} rank {rank.rank} worker {rank.worker}: {places}"
        for row in step.shown:
            yield from _sample_shown(preview, row, decoder)
    rest = "what is left of " * bool(preview.first) + f"epoch {preview.asked.state.epoch}"
    yield from (
        "",
        f"{rest}, {plural(len(preview.ids), 'step')}, in shares of {preview.windows.unit}",
    )
    yield from (epoch_table(preview), windows_table(preview))
    yield from sentences(preview)
    yield f"read at most {preview.loaders.reader.read:,} bytes of the streams' shards (--read allows {preview.asked.read:,})"


def _run(preview: Preview) -> Tree:
    """The settings by which the run is laid out."""
    world, layout = preview.asked.world, preview.layout
    of_layout = "epoch_size batching_method shuffle shuffle_algo shuffle_seed shuffle_block_size num_canonical_nodes"
    return {
        "nodes": world.nodes,
        "gpus": world.gpus,
        "workers": world.workers,
        "replication": world.replication,
        "rows_a_step": world.batch,
        "packing_ratio": preview.ratio,
        "samples_a_device": layout.batch_size,
        "steps_an_epoch": preview.first + len(preview.ids),
        **{key: getattr(layout, key) for key in of_layout.split()},
    }


def _step_line(step: Step) -> str:
    line = f"step {step.step:,}: {plural(step.drawn, 'sample')} drawn"
    if step.is_unread:
        return f"{line}, not read"
    if step.padding is None:
        return line
    return f"{line}, {plural(step.rows, 'row')}, {step.padding:.1%} padding"


def _where(preview: Preview, place: SamplePlace) -> str:
    return "{stream}/{shard}:{row}".format(**preview.loaders.reader.named(place))


def _sample_shown(preview: Preview, row: SampleRow, decoder: Decoder | None) -> Iterator[Item]:
    yield Title(f"rank {row.rank}: {_where(preview, row.place)}")
    yield from (f"image {n}: {grouped(size._asdict())}" for n, size in enumerate(row.images))
    yield SampleText(runs_of(shortened(row_segments(row), TOKENS_SHOWN), decoder))


def row_segments(row: SampleRow) -> list[Segment]:
    """The row as trained, with one token for each image. The target of an encoder-decoder stands
    behind its context.
    """
    ids, labels = row.stored.input_ids, row.stored.labels
    if ids.size != labels.size:
        return segments([(ids.tolist(), False), (labels.tolist(), True)])
    pairs = zip(ids.tolist(), (labels != IGNORED_LABEL).tolist(), strict=True)
    return segments([([token], flag) for token, flag in pairs])


def preview_json(preview: Preview, decoder: Decoder | None) -> Tree:
    """The whole preview for programs, with all sample ids of each shown step, by device."""
    return {
        **_run(preview),
        "steps": [_step_json(preview, step, decoder) for step in preview.steps],
        "epoch": as_json(epoch_table(preview))
        | {
            "epoch": preview.asked.state.epoch,
            "first_step": preview.first,
            "steps": len(preview.ids),
            "windows_of": preview.windows.unit,
            "windows": as_json(windows_table(preview))["rows"],
        },
        "said": [*sentences(preview)],
        "read": preview.loaders.reader.read,
    }


def _step_json(preview: Preview, step: Step, decoder: Decoder | None) -> Tree:
    named = preview.loaders.reader.named
    return {
        **{key: getattr(step, key) for key in ("step", "drawn", "is_unread", "rows", "padding")},
        "streams": [] if step.counts is None else as_json(step_table(preview, step.counts))["rows"],
        "ranks": [
            {
                **{key: getattr(rank, key) for key in ("rank", "node", "worker")},
                "samples": [
                    {"id": id, **named(place)}
                    for id, place in zip(rank.ids, rank.places, strict=True)
                ],
            }
            for rank in step.ranks
        ],
        "shown": [
            {
                "rank": row.rank,
                **named(row.place),
                "images": [size._asdict() for size in row.images],
                "sample": sample_json(row_segments(row), decoder),
            }
            for row in step.shown
        ],
    }
