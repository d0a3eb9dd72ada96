"""What `mdsmix preview` shows, to people and to programs: steps with their rows, decoded samples, and the epoch in windows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from operator import mul
from typing import Any

from mdsmix.encode.pretrained import Decoder
from mdsmix.load.layout import SampleAt
from mdsmix.load.training_rows import IGNORED
from mdsmix.preview.step_rows import SampleRow, Shown, Step, StepContent, StreamInStep
from mdsmix.preview.verdict import Preview, verdict
from mdsmix.report.show import Item, SampleText, Title
from mdsmix.report.shown_samples import Segment, runs_of, sample_json, segments, shortened
from mdsmix.table import Column, Row, Table, as_json
from mdsmix.words import plural

TOKENS_SHOWN = 256
"Of a sample, half of them from its beginning and half from its end."
DRAWN = (
    Column("stream", "text"),
    Column("samples"),
    Column("share", "share", key="share_of_samples"),
    Column("planned", "share"),
    Column("tokens"),
    Column("share", "share", key="share_of_tokens"),
    Column("trained"),
)
STEP = (*DRAWN, Column("share", "share", key="share_of_trained"), Column("cut off", key="cut"))
EPOCH = (
    *DRAWN,
    Column("lowest", "share", key="lowest_window"),
    Column("highest", "share", key="highest_window"),
)


def step_table(preview: Preview, content: StepContent) -> Table:
    """A row a stream that the mix has, what the devices' rows hold of it."""
    parts = [content.parts.get(n, StreamInStep()) for n in range(len(preview.streams))]
    total = StreamInStep(*map(sum, zip(*parts, strict=True)))
    rows = [
        _step_row(stream.name, part, planned, total)
        for stream, part, planned in zip(preview.streams, parts, _planned(preview), strict=True)
    ]
    return Table(columns=STEP, rows=rows, total=_step_row("all", total, 1.0, total))


def _step_row(name: str, part: StreamInStep, planned: float, total: StreamInStep) -> Row:
    shares = [n / max(1, of) for n, of in zip(part, total, strict=True)]
    return name, part.samples, shares[0], planned, part.tokens, shares[1], part.trained, shares[2], part.cut  # fmt: skip


def _planned(preview: Preview) -> list[float]:
    """Each stream's share of the samples that the weights draw."""
    planned = preview.layout.planned
    return (planned / planned.sum()).tolist()  # type: ignore[no-any-return]


def epoch_table(preview: Preview) -> Table:
    """A row a stream: what the epoch holds, and its lowest and highest window of steps."""
    windows = preview.windows
    samples, shares = windows.samples.sum(axis=0), windows.shares
    counts, (tokens, trained) = samples.tolist(), zip(*preview.lengths, strict=True)
    rows = zip(
        preview.layout.names,
        counts,
        (samples / samples.sum()).tolist(),
        _planned(preview),
        map(mul, counts, tokens),
        repeat(None) if windows.means is None else windows.epoch.tolist(),
        map(mul, counts, trained),
        shares.min(axis=0).tolist(),
        shares.max(axis=0).tolist(),
        strict=False,
    )
    return Table(columns=EPOCH, rows=list(rows))


def windows_table(preview: Preview) -> Table:
    """A row a window of steps: the share of each stream."""
    windows, names = preview.windows, preview.layout.names
    edges = (windows.edges + preview.epochs[0].first).tolist()
    rows = [
        (f"{start:,} to {stop - 1:,}", *shares)
        for start, stop, shares in zip(edges, edges[1:], windows.shares.tolist(), strict=False)
    ]
    columns = [Column("steps", "text"), *(Column(name, "share") for name in names)]
    return Table(columns=columns, rows=rows, total=("all", *windows.epoch.tolist()))


def preview_shown(preview: Preview, decoder: Decoder | None, with_ids: bool) -> Iterator[Item]:
    """All of it for a person."""
    yield from _run_lines(preview)
    for step in preview.steps:
        yield from ("", _step_line(step))
        if step.content:
            yield step_table(preview, step.content)
        for rank in step.ranks if with_ids else ():
            places = " ".join(_where(preview, place) for place in rank.places)
            yield f"  node {rank.node} rank {rank.rank} worker {rank.worker}: {places}"
        for shown in step.shown:
            yield from _sample_shown(preview, shown, decoder)
    epoch, of = preview.epochs[0], preview.windows.unit
    rest = "what is left of " * bool(epoch.first) + f"epoch {epoch.epoch}"
    yield ""
    yield f"{rest}, {plural(len(epoch.ids), 'step')}, in shares of {of}, and the lowest and highest of the windows below"
    yield from (epoch_table(preview), windows_table(preview))
    yield from verdict(preview).values()
    yield f"read {preview.read:,} bytes of the streams' shards (at most {preview.asked.read:,}: --read)"


def _run_lines(preview: Preview) -> Iterator[str]:
    """How the run is laid out."""
    layout, world, first = preview.layout, preview.asked.world, preview.epochs[0]
    packed = f", packed from {layout.batch_size:,} samples (ratio {preview.ratio:g})"
    shared = f", each row on {world.replication} of them" if world.replication > 1 else ""
    order = f"not shuffled, seed {layout.shuffle_seed}"
    if layout.shuffle:
        order = f"shuffled by {layout.shuffle_algo} within {layout.shuffle_block_size:,} samples, seed {layout.shuffle_seed}"
    yield (
        f"{plural(world.nodes, 'node')} of {plural(world.gpus, 'GPU')}, {plural(world.workers, 'worker')} each{shared}: "
        f"{plural(world.batch, 'row')} a step, {world.rows:,} a GPU{packed * (preview.ratio > 1)}"
    )
    yield (
        f"an epoch draws {plural(layout.epoch_size, 'sample')}: {plural(first.first + len(first.ids), 'step')} of {layout.batching_method} "
        f"batches, {order}, {plural(int(layout.num_canonical_nodes), 'canonical node')}"
    )


def _step_line(step: Step) -> str:
    said, content = f"step {step.step:,} of epoch {step.epoch}: {plural(step.drawn, 'sample')} drawn", step.content  # fmt: skip
    if content is None or not content.rows:
        return said
    if step.looked < step.drawn:
        said += f", {step.looked:,} of them read"
    many, cut = content.documents, sum(part.cut_samples for part in content.parts.values())
    said += f", {plural(content.rows, 'row')}, {content.padding:.1%} padding"
    said += f", {sum(many) / len(many):.1f} documents a row ({min(many)} to {max(many)})"
    said += f", {plural(cut, 'sample')} cut"
    return said + f", {plural(step.waiting, 'sample')} waiting to be packed" * bool(step.waiting)


def _where(preview: Preview, place: SampleAt) -> str:
    return "{stream}/{shard}:{row}".format(**_place_json(preview, place))


def _place_json(preview: Preview, place: SampleAt) -> dict[str, Any]:
    stream = preview.streams[place.stream]
    shard = stream.shards[place.shard].stored.basename
    return {"stream": stream.name, "shard": shard, "row": place.position}


def _sample_shown(preview: Preview, shown: Shown, decoder: Decoder | None) -> Iterator[Item]:
    row = shown.row
    yield Title(f"rank {shown.rank}: {_where(preview, row.place)}")
    each = [f"{w:,} x {h:,}: {plural(tokens, 'token')}" for h, w, tokens in row.images]
    if each:
        yield f"{plural(len(each), 'image')} ({', '.join(each)})"
    yield SampleText(runs_of(shortened(row_segments(row), TOKENS_SHOWN), decoder))


def row_segments(row: SampleRow) -> list[Segment]:
    """The row as it is trained, with one token an image: an encoder-decoder's target stands behind its context."""
    ids, labels = row.stored.input_ids, row.stored.labels
    if ids.size != labels.size:
        return segments([(ids.tolist(), False), (labels.tolist(), True)])
    pairs = zip(ids.tolist(), (labels != IGNORED).tolist(), strict=True)
    return segments([([token], flag) for token, flag in pairs])


def preview_json(preview: Preview, decoder: Decoder | None) -> dict[str, Any]:
    """All of it for programs: every sample id of every step, by device."""
    world, layout, first = preview.asked.world, preview.layout, preview.epochs[0]
    of_layout = "epoch_size batching_method shuffle shuffle_algo shuffle_seed shuffle_block_size num_canonical_nodes"
    return {
        "nodes": world.nodes,
        "gpus": world.gpus,
        "workers": world.workers,
        "rows_a_step": world.batch,
        "rows_a_device": world.rows,
        "packing_ratio": preview.ratio,
        "samples_a_device": layout.batch_size,
        "steps_an_epoch": first.first + len(first.ids),
        **{key: getattr(layout, key) for key in of_layout.split()},
        "steps": [_step_json(preview, step, decoder) for step in preview.steps],
        "epoch": as_json(epoch_table(preview))
        | {
            "epoch": first.epoch,
            "first_step": first.first,
            "steps": len(first.ids),
            "windows_of": preview.windows.unit,
            "windows": as_json(windows_table(preview))["rows"],
        },
        "said": [{"id": id, "sentence": said} for id, said in verdict(preview).items()],
        "read": preview.read,
    }


def _step_json(preview: Preview, step: Step, decoder: Decoder | None) -> dict[str, Any]:
    content = step.content
    return {
        "epoch": step.epoch,
        "step": step.step,
        "drawn": step.drawn,
        "read": step.looked,
        "rows": content and content.rows,
        "padding": content and content.padding,
        "documents": content and content.documents,
        "waiting": step.waiting,
        "streams": as_json(step_table(preview, content))["rows"] if content else [],
        "ranks": [
            {
                "rank": rank.rank,
                "node": rank.node,
                "worker": rank.worker,
                "samples": [
                    {"id": id, **_place_json(preview, place)}
                    for id, place in zip(rank.ids, rank.places, strict=True)
                ],
            }
            for rank in step.ranks
        ],
        "shown": [
            {
                "rank": shown.rank,
                **_place_json(preview, shown.row.place),
                "images": [size._asdict() for size in shown.row.images],
                "sample": sample_json(row_segments(shown.row), decoder),
            }
            for shown in step.shown
        ],
    }
