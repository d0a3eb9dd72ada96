"""What `mdsmix preview` shows, to people and to programs: steps with their rows, decoded samples, and the epoch in windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mdsmix.encode.pretrained import Decoder
from mdsmix.load.layout import SampleAt
from mdsmix.load.training_rows import IGNORED
from mdsmix.preview.step_rows import Rank, SampleRow, Shown, Step, StreamInStep
from mdsmix.preview.verdict import Preview, verdict
from mdsmix.report.show import Item, SampleText, Title
from mdsmix.report.shown_samples import Segment, runs_of, sample_json, segments, shortened
from mdsmix.table import Column, Estimate, Row, Table, about, as_json
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


def step_table(preview: Preview, step: Step) -> Table:
    """A row a stream that the mix has, what the devices' rows hold of it."""
    names, planned = [*preview.streams, "all"], [*preview.planned, 1.0]
    rows: list[Row] = [
        (name, None, None, p, *[None] * 5) for name, p in zip(names, planned, strict=True)
    ]
    if step.content:
        parts = [step.content.parts.get(n, StreamInStep()) for n in range(len(preview.streams))]
        counts = [(p.samples, p.tokens, p.trained, p.cut) for p in parts]
        sums = [sum(column) for column in zip(*counts, strict=True)]
        rows = []
        for name, plan, of in zip(names, planned, [*counts, sums], strict=True):
            samples, tokens, trained = (
                n / max(1, total) for n, total in zip(of[:3], sums[:3], strict=True)
            )
            rows.append((name, of[0], samples, plan, of[1], tokens, of[2], trained, of[3]))
    return Table(columns=STEP, rows=rows[:-1], total=rows[-1])


def epoch_table(preview: Preview) -> Table:
    """A row a stream: what the epoch holds, and its lowest and highest window of steps."""
    windows, tokens, rows = preview.windows, preview.tokens, list[Row]()
    samples = windows.samples.sum(axis=0)
    for n, name in enumerate(preview.streams):
        figure = share = trained = None
        lengths, shares = preview.lengths[n], windows.shares[:, n]
        if tokens is not None:
            figure = about(float(tokens[n]), bool(lengths and lengths.is_exact))
            share = float(tokens[n] / tokens.sum())
            trained = lengths and lengths.trained and Estimate(tokens[n] * lengths.trained)
        drawn = (name, int(samples[n]), float(samples[n] / samples.sum()), preview.planned[n])
        rows.append((*drawn, figure, share, trained, float(shares.min()), float(shares.max())))
    return Table(columns=EPOCH, rows=rows)


def windows_table(preview: Preview) -> Table:
    """A row a window of steps: the share of each stream."""
    windows, first = preview.windows, preview.epochs[0].first
    edges = (windows.edges + first).tolist()
    columns = [Column("steps", "text"), *(Column(name, "share") for name in preview.streams)]
    rows = [
        (f"{start:,} to {stop - 1:,}", *map(float, shares))
        for start, stop, shares in zip(edges, edges[1:], windows.shares, strict=False)
    ]
    return Table(columns=columns, rows=rows, total=("all", *map(float, windows.epoch)))


def preview_shown(preview: Preview, decoder: Decoder | None, with_ids: bool) -> Iterator[Item]:
    """All of it for a person."""
    yield from _run_lines(preview)
    for step in preview.steps:
        yield from ("", _step_line(step), step_table(preview, step))
        if with_ids:
            yield from (f"  {_rank_line(preview, rank)}" for rank in step.ranks)
        for shown in step.shown:
            yield from _sample_shown(preview, shown, decoder)
    epoch, of = preview.epochs[0], "tokens" if preview.tokens is not None else "samples"
    rest = "what is left of " * bool(epoch.first) + f"epoch {epoch.epoch}"
    yield ""
    yield f"{rest}, {plural(len(epoch.ids), 'step')}, in shares of {of}, and the lowest and highest of the windows below"
    yield from (epoch_table(preview), windows_table(preview))
    yield from (said.sentence for said in verdict(preview))
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


def _rank_line(preview: Preview, rank: Rank) -> str:
    """The samples in the order in which the device draws them."""
    places = " ".join(_where(preview, place) for place in rank.places)
    return f"node {rank.node} rank {rank.rank} worker {rank.worker}: {places}"


def _where(preview: Preview, place: SampleAt) -> str:
    return "{stream}/{shard}:{row}".format(**_place_json(preview, place))


def _place_json(preview: Preview, place: SampleAt) -> dict[str, Any]:
    shard = preview.shards[place.stream][place.shard]
    return {"stream": preview.streams[place.stream], "shard": shard, "row": place.position}


def _sample_shown(preview: Preview, shown: Shown, decoder: Decoder | None) -> Iterator[Item]:
    row = shown.row
    yield Title(f"rank {shown.rank}: {_where(preview, row.place)}")
    if row.images:
        each = ", ".join(f"{w:,} x {h:,}: {plural(n, 'token')}" for h, w, n in row.images)
        yield f"{plural(len(row.images), 'image')} ({each})"
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
    lengths = zip(preview.streams, preview.lengths, strict=True)
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
            "windows_of": "tokens" if preview.tokens is not None else "samples",
            "windows": as_json(windows_table(preview))["rows"],
            "lengths": {
                name: of and {"exact": of.is_exact, "from": of.how} for name, of in lengths
            },
        },
        "said": [said._asdict() for said in verdict(preview)],
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
        "documents": content and list(content.documents),
        "waiting": step.waiting,
        "streams": as_json(step_table(preview, step))["rows"],
        "ranks": [_rank_json(preview, rank) for rank in step.ranks],
        "shown": [_shown_json(preview, shown, decoder) for shown in step.shown],
    }


def _rank_json(preview: Preview, rank: Rank) -> dict[str, Any]:
    drawn = zip(rank.ids, rank.places, strict=True)
    samples = [{"id": id, **_place_json(preview, place)} for id, place in drawn]
    return {"rank": rank.rank, "node": rank.node, "worker": rank.worker, "samples": samples}


def _shown_json(preview: Preview, shown: Shown, decoder: Decoder | None) -> dict[str, Any]:
    row, tree = shown.row, {"rank": shown.rank, **_place_json(preview, shown.row.place)}
    if row.images:
        tree["images"] = [{"height": h, "width": w, "tokens": n} for h, w, n in row.images]
    return tree | {"sample": sample_json(row_segments(row), decoder)}
