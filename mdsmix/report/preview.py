"""What `mdsmix preview` shows: steps with their rows, decoded samples, and the epoch in windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mdsmix.encode.decoder import Decoder
from mdsmix.load.layout import SampleAt
from mdsmix.load.training_rows import IGNORED
from mdsmix.preview.rows import SampleRow, StreamInStep
from mdsmix.preview.verdict import Preview, Rank, Step, verdict
from mdsmix.report.segments import Segment, marked, segments
from mdsmix.report.show import Item, Run, SampleText, Title
from mdsmix.table import Column, Estimate, Row, Table
from mdsmix.words import plural

TOKENS_SHOWN = 256
"Of a sample, half of them from its beginning and half from its end."
CUT = "\ufffd"
"What a decoder makes of a part of a character's bytes."
DRAWN = (
    Column("stream", "text"),
    Column("samples"),
    Column("share", "share", key="share_of_samples"),
    Column("planned", "share"),
    Column("tokens"),
    Column("share", "share", key="share_of_tokens"),
    Column("trained"),
)
STEP = (
    *DRAWN,
    Column("share", "share", key="share_of_trained"),
    Column("cut off", key="cut"),
)
EPOCH = (
    *DRAWN,
    Column("lowest", "share", key="lowest_window"),
    Column("highest", "share", key="highest_window"),
)


def step_table(preview: Preview, step: Step) -> Table:
    """A row a stream that the mix has, what the devices' rows hold of it."""
    parts = [
        step.content.parts.get(n, StreamInStep()) if step.content else None
        for n in range(len(preview.streams))
    ]
    known = [part for part in parts if part]
    total = StreamInStep(
        **{k: sum(getattr(part, k) for part in known) for k in vars(StreamInStep())}
    )
    rows = [
        _step_row(name, part, total, preview.planned[n])
        for n, (name, part) in enumerate(zip(preview.streams, parts, strict=True))
    ]
    return Table(
        columns=STEP, rows=rows, total=_step_row("all", total if known else None, total, 1.0)
    )


def _step_row(name: str, part: StreamInStep | None, total: StreamInStep, planned: float) -> Row:
    if part is None:
        return (name, None, None, planned, *[None] * 5)
    samples, tokens, trained = (max(1, n) for n in (total.samples, total.tokens, total.trained))
    return (
        name,
        part.samples,
        part.samples / samples,
        planned,
        part.tokens,
        part.tokens / tokens,
        part.trained,
        part.trained / trained,
        part.cut,
    )


def epoch_table(preview: Preview) -> Table:
    """A row a stream: what the epoch holds, and its lowest and highest window of steps."""
    w = preview.windows
    samples = w.samples.sum(axis=0)
    tokens = preview.tokens
    rows: list[Row] = []
    for n, name in enumerate(preview.streams):
        lengths = preview.lengths[n]
        figure = _figure(
            None if tokens is None else float(tokens[n]), bool(lengths and lengths.is_exact)
        )
        share = lengths.trained if lengths else None
        rows.append(
            (
                name,
                int(samples[n]),
                float(samples[n] / samples.sum()),
                preview.planned[n],
                figure,
                None if tokens is None else float(tokens[n] / tokens.sum()),
                None if figure is None or share is None else _figure(figure * share, False),
                float(w.shares[:, n].min()),
                float(w.shares[:, n].max()),
            )
        )
    return Table(columns=EPOCH, rows=rows)


def _figure(tokens: float | None, is_exact: bool) -> float | None:
    return tokens if tokens is None or is_exact else Estimate(tokens)


def windows_table(preview: Preview) -> Table:
    """A row a window of steps: the share of each stream."""
    w, first = preview.windows, preview.epochs[0].first
    columns = [Column("steps", "text"), *(Column(name, "share") for name in preview.streams)]
    rows = [
        (f"{a + first:,} to {b + first - 1:,}", *map(float, shares))
        for a, b, shares in zip(w.edges[:-1].tolist(), w.edges[1:].tolist(), w.shares, strict=True)
    ]
    return Table(columns=columns, rows=rows, total=("all", *map(float, w.epoch)))


def head(preview: Preview) -> list[str]:
    """How the run is laid out."""
    layout, world, first = preview.layout, preview.asked.world, preview.epochs[0]
    packed = (
        f", packed from {layout.batch_size:,} samples (ratio {preview.ratio:g})"
        if preview.ratio > 1
        else ""
    )
    shared = f", each row on {world.replication} of them" if world.replication > 1 else ""
    end = first.first + len(first.ids)
    order = (
        f"shuffled by {layout.shuffle_algo} within {layout.shuffle_block_size:,} samples, seed {layout.shuffle_seed}"
        if layout.shuffle
        else f"not shuffled, seed {layout.shuffle_seed}"
    )
    return [
        f"{plural(world.nodes, 'node')} of {plural(world.gpus, 'GPU')}, {plural(world.workers, 'worker')} each{shared}: "
        f"{plural(world.batch, 'row')} a step, {world.rows:,} a GPU{packed}",
        f"an epoch draws {plural(layout.epoch_size, 'sample')}: {plural(end, 'step')} of {layout.batching_method} batches, {order}, "
        f"{plural(int(layout.num_canonical_nodes), 'canonical node')}",
    ]


def step_line(preview: Preview, step: Step) -> str:
    first = f"step {step.step:,} of epoch {step.epoch}: {plural(step.drawn, 'sample')} drawn"
    if step.content is None or not step.content.rows:
        return first
    seen = "" if step.looked == step.drawn else f", {step.looked:,} of them read"
    many = step.content.documents
    documents = f"{sum(many) / len(many):.1f} documents a row ({min(many)} to {max(many)})"
    cut = sum(part.cut_samples for part in step.content.parts.values())
    waiting = f", {plural(step.waiting, 'sample')} waiting to be packed" if step.waiting else ""
    return (
        f"{first}{seen}, {plural(step.content.rows, 'row')}, {step.content.padding:.1%} padding, {documents}, "
        f"{plural(cut, 'sample')} cut{waiting}"
    )


def preview_shown(preview: Preview, decoder: Decoder | None, with_ids: bool) -> Iterator[Item]:
    """All of it for a person."""
    yield from head(preview)
    for step in preview.steps:
        yield from ("", step_line(preview, step), step_table(preview, step))
        if with_ids:
            yield from (f"  {line}" for rank in step.ranks for line in id_lines(preview, rank))
        for shown in step.shown:
            yield from _sample_shown(preview, shown.rank, shown.row, decoder)
    of = "tokens" if preview.windows.of_tokens else "samples"
    epoch = preview.epochs[0]
    rest = f"what is left of epoch {epoch.epoch}" if epoch.first else f"epoch {epoch.epoch}"
    yield ""
    yield f"{rest}, {plural(len(epoch.ids), 'step')}, in shares of {of}, and the lowest and highest of the windows below"
    yield from (epoch_table(preview), windows_table(preview))
    yield from (said.sentence for said in verdict(preview))
    yield read_line(preview)


def read_line(preview: Preview) -> str:
    return f"read {preview.read:,} bytes of the streams' shards (at most {preview.asked.read:,}: --read)"


def id_lines(preview: Preview, rank: Rank) -> Iterator[str]:
    """A line for each run of samples of one shard, in the order in which the device draws them."""
    places = " ".join(_where(preview, place) for place in rank.places)
    yield f"node {rank.node} rank {rank.rank} worker {rank.worker}: {places}"


def _where(preview: Preview, place: SampleAt) -> str:
    return f"{preview.streams[place.stream]}/{shard_of(preview, place)}:{place.position}"


def shard_of(preview: Preview, place: SampleAt) -> str:
    return preview.shards[place.stream][place.shard]


def _sample_shown(
    preview: Preview, rank: int, row: SampleRow, decoder: Decoder | None
) -> Iterator[Item]:
    yield Title(f"rank {rank}: {_where(preview, row.place)}")
    if row.images:
        each = ", ".join(f"{w:,} x {h:,}: {plural(n, 'token')}" for h, w, n in row.images)
        yield f"{plural(len(row.images), 'image')} ({each})"
    yield SampleText(sample_runs(row, decoder))


def row_segments(row: SampleRow) -> list[Segment]:
    """The row as it is trained, with one token an image: an encoder-decoder's target stands behind its context."""
    shown = row.stored
    if shown.input_ids.size == shown.labels.size:
        flags = (shown.labels != IGNORED).tolist()
        return segments(
            [([token], flag) for token, flag in zip(shown.input_ids.tolist(), flags, strict=True)]
        )
    return segments([(shown.input_ids.tolist(), False), (shown.labels.tolist(), True)])


def sample_runs(row: SampleRow, decoder: Decoder | None) -> Iterator[Run]:
    """The row for a person, the middle of a long one left out."""
    parts = row_segments(row)
    ids = [token for part in parts for token in part.ids]
    if len(ids) <= TOKENS_SHOWN:
        yield from marked(parts, decoder)
        return
    stop, start = _whole_characters(ids, decoder)
    yield from marked(_between(parts, 0, stop), decoder)
    yield f" ... {start - stop:,} tokens ... ", "text"
    yield from marked(_between(parts, start, len(ids)), decoder)


def _whole_characters(ids: Sequence[int], decoder: Decoder | None) -> tuple[int, int]:
    """Where the beginning of a long row ends and its end begins: half of TOKENS_SHOWN each, less what belongs to a cut character,
    which takes four tokens at most."""
    half = TOKENS_SHOWN // 2
    stop, start = half, len(ids) - half
    if decoder:
        while stop > half - 3 and decoder.text(ids[stop - 8 : stop]).endswith(CUT):
            stop -= 1
        while start < len(ids) - half + 3 and decoder.text(ids[start : start + 8]).startswith(CUT):
            start += 1
    return stop, start


def _between(parts: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    found, at = list[Segment](), 0
    for part in parts:
        ids = part.ids[max(0, start - at) : max(0, stop - at)]
        at += len(part.ids)
        if ids:
            found.append(replace(part, ids=ids))
    return found
