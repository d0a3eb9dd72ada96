"""The table at the end of a conversion, of a part of one, and of `mdsmix mix`, with sentences under it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mdsmix.convert.bad_records import ARRAY
from mdsmix.convert.budget_share import said_of_mean
from mdsmix.convert.parts import ArrayPart, PartOutcome
from mdsmix.convert.run import Outcome
from mdsmix.kinds import kind_of
from mdsmix.kinds.membership import DUPLICATE, HELD_OUT, NOT_HELD_OUT
from mdsmix.mix.offline.mix_streams import MixOutcome
from mdsmix.report.inspection import packed
from mdsmix.report.show import Item
from mdsmix.shapes.condition import NO_MATCH
from mdsmix.shapes.image_parts import FIELDS
from mdsmix.shards.counts import NOT_SAMPLED
from mdsmix.shards.manifest import Manifest
from mdsmix.table import Column, Row, Table, as_json
from mdsmix.words import does, listed, percent, plural

FILTERED_SHARE = 0.05
"A warning is given if rules leave out more records than this."
MANY_BAD = 0.01
"A part of an array warns of more bad records than this."
ASKED_FOR = (HELD_OUT, NOT_HELD_OUT, NOT_SAMPLED, DUPLICATE, NO_MATCH)
"Records that the recipe itself leaves out, of which nobody is warned."
NO_TEMPLATE = (
    "WARNING: the tokenizer has no chat template, so conversations are rendered as ChatML, as LLM-Foundry does; its <|im_start|> and "
    "<|im_end|> are ordinary text unless they are special tokens of this tokenizer: give it the template of the model "
    "(chat_template in its tokenizer_config.json)"
)
WITH_ROWS = "rewritten_history: last, or each, makes rows of them"
NO_ROWS = "an answer is not printed behind what inference sees before it, so no row can hold both; the quarantine has both texts"
IMAGES = (
    "images: {} in the stream reads them: shape: llava reads <image> and the fields of images.field, shape: qwen_vl reads the image whose "
    "path stands between <img> and </img>, the other shapes read the parts of messages; no video and no sound is read"
)
MOST_UNREAD = 8
"Unread fields that are named."
TELLING = (
    "system",
    "tools",
    "images",
    "image",
    "videos",
    "audios",
    "input",
    "history",
    "label",
    "rejected",
    "weight",
    "messages.reasoning_content",
    "messages.content beside tool_calls",
)
"Fields that change the meaning of a record in LLaMA-Factory, OpenAI, TRL and others."
COLUMNS = (
    Column("stream", "text"),
    *map(Column, ("read", "written", "filtered", "quarantined", "tokens", "shards", "bytes")),
    Column("seconds", "seconds"),
    Column("tokens/s", key="tokens_per_second"),
)
MIXTURE = (
    Column("stream", "text"),
    Column("in it", key="samples"),
    Column("weight", "weight"),
    Column("drawn"),
    Column("share", "share", key="share_of_samples"),
    Column("tokens"),
    Column("share", "share", key="share_of_tokens"),
)


def result(outcomes: Sequence[Outcome]) -> tuple[list[Item], dict[str, Any]]:
    """What a person is shown, and the same for programs."""
    table = summary(outcomes)
    tree = as_json(table)
    for row, outcome in zip(tree["rows"], outcomes, strict=True):
        row |= _row_json(outcome)
    return [table], tree


def summary(outcomes: Sequence[Outcome]) -> Table:
    """One row per stream, and the sum where there are several."""
    rows = [(outcome.stream, *_figures([outcome])) for outcome in outcomes]
    total = ("all", *_figures(outcomes)) if len(outcomes) > 1 else None
    notes = [sentence for outcome in outcomes for sentence in sentences(outcome)]
    peak = max((outcome.peak for outcome in outcomes), default=0)
    notes += [f"peak memory: {peak / 1e6:,.0f} MB"] if peak else []
    return Table(columns=COLUMNS, rows=rows, total=total, notes=notes)


def warnings(outcomes: Iterable[Outcome | PartOutcome]) -> Iterator[str]:
    """The sentences that warn, each behind the name of its stream."""
    for outcome in outcomes:
        for sentence in map(str.strip, sentences(outcome)):
            if sentence.startswith("WARNING"):
                yield f"{outcome.stream}: {sentence}"


def sentences(outcome: Outcome | PartOutcome) -> Iterator[str]:
    """A line for the stream, and its notes below."""
    if isinstance(outcome, PartOutcome):
        yield from _of_part(outcome)
        return
    manifest, records = outcome.manifest, outcome.manifest.records
    yield f"{outcome.stream}: {outcome.state}, {outcome.target}"
    for what, reasons in (("filtered", records.filtered), ("quarantined", records.quarantined)):
        if reasons:
            yield f"  {what}: {_counts(reasons)}"
    every = (
        *(_of_records(manifest, outcome.target), _of_tokens(manifest)),
        *(_unread(manifest), _budget(outcome), outcome.notes),
    )
    yield from (f"  {note}" for notes in every for note in notes)


def _counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())


def _row_json(outcome: Outcome) -> dict[str, Any]:
    manifest, wanted = outcome.manifest, outcome.wanted
    records = manifest.records
    return {
        "target": outcome.target,
        "state": outcome.state,
        "reasons": {"filtered": records.filtered, "quarantined": records.quarantined},
        "duplicates": records.duplicates,
        "sample": manifest.encoding.sample,
        "budget": wanted
        and {
            "wanted_tokens": wanted.tokens,
            "missing_tokens": wanted.missing(manifest),
            "estimated_source_tokens": round(wanted.source.tokens),
            "places_looked_at": wanted.source.places,
            "margin": wanted.margin,
        },
        "index_hash": manifest.index_hash,
        "peak_bytes": outcome.peak,
    }


def _figures(outcomes: Sequence[Outcome]) -> Row:
    each = [
        (r.read, r.written, r.dropped, r.bad, m.totals.seen_tokens, sum(p.shards for p in m.parts), outcome.bytes)
        for outcome in outcomes
        for m, r in [(outcome.manifest, outcome.manifest.records)]
    ]  # fmt: skip
    counts = map(sum, zip(*each, strict=True))
    if not any(outcome.done for outcome in outcomes):
        return (*counts, "up to date", "")
    seconds = sum(outcome.seconds for outcome in outcomes)
    made = sum(outcome.new_tokens for outcome in outcomes)
    return (*counts, seconds, int(made / max(seconds, 1e-3)))


def _of_records(manifest: Manifest, target: str) -> Iterator[str]:
    """What the records hold, and which of them are no samples."""
    totals, records, encoding = manifest.totals, manifest.records, manifest.encoding
    kind, sampled = kind_of(encoding), records.sampled
    if totals.images:
        counted = f", {totals.image_tokens:,} tokens by the processor" * bool(totals.image_tokens)
        yield f"{plural(totals.images, 'image')}, {totals.image_bytes:,} bytes{counted}"
    if records.bad:
        yield f"the bad records lie in {target}/quarantine/"
    if records.has_many_bad:
        yield f"WARNING: {records.bad / sampled:.1%} of the records are bad"
    if encoding.pack:
        yield packed(manifest)
    elif encoding.rewritten_history == "each":
        yield f"{totals.samples:,} rows of {records.written:,} records"
    if kind.has_template and manifest.tokenizer.chat_template_hash is None:
        yield NO_TEMPLATE
    if encoding.sample:
        yield (
            f"sample: {percent(encoding.sample)}: {sampled:,} of {records.read:,} records "
            f"({sampled / max(1, records.read):.3%}) are in it, by what they say"
        )
    dropped = sum(n for reason, n in records.filtered.items() if reason not in ASKED_FOR)
    if dropped > FILTERED_SHARE * sampled:
        idle = records.filtered.get("no_loss_tokens", 0)
        or_all = ", or target_responses: all," * kind.has_targets
        kept = f"; {idle:,} have nothing to train within max_seq_len: a larger one{or_all} may keep them"
        yield f"WARNING: {dropped / sampled:.1%} of the records are filtered{kept * bool(idle)}"
    if records.has_many_duplicates:
        yield (
            f"WARNING: {records.duplicates:,} of {sampled:,} records ({records.duplicates / sampled:.1%}) say the same as an "
            "earlier one of the stream and are trained again; duplicates: drop leaves them out"
        )
    if "json_array" in records.quarantined:
        yield f"WARNING: {ARRAY}"


def _of_tokens(manifest: Manifest) -> Iterator[str]:
    """What was cut, lost or rewritten: a sentence for each count that is not zero."""
    totals, encoding = manifest.totals, manifest.encoding
    if totals.cut_rows:
        yield (
            f"{totals.cut_rows:,} of {plural(totals.samples, 'row')} are longer than max_seq_len: the loader cuts off "
            f"{totals.cut_tokens:,} tokens, {totals.cut_tokens / totals.tokens:.1%} of all, which are not counted above"
        )
    if lost := totals.lost_tokens:
        yield f"{plural(lost, 'token')} {does(range(lost), 'is', 'are')} in no sample (less than a row, or cut off)"
    if rewritten := manifest.records.quarantined.get("not_prefix_stable"):
        remedy = WITH_ROWS if encoding.rewritten_history == "reject" else NO_ROWS
        yield f"the chat template rewrites the history of {rewritten:,} conversations: {remedy}"
    if totals.specials:
        yield f"{totals.specials:,} records hold the text of a special token; rule: {encoding.special_tokens_in_text}"


def _unread(manifest: Manifest) -> Iterator[str]:
    """Fields that nothing reads, and placeholders that are trained as text."""
    records = manifest.records
    # A footer counts the rows of a whole row group, and a first look reads a part of one.
    filled = {name: min(n, records.read) for name, n in records.unread.items()}
    fields = sorted(filled.items(), key=lambda field: (-field[1], field[0]))
    said = [f"{name} ({n:,} of {records.read:,} not empty)" for name, n in fields]
    said += [f"{name} (not looked into)" for name in records.unseen if name not in filled]
    if said:
        yield f"fields not read: {listed(said, MOST_UNREAD)}"
    for name in TELLING:
        if n := filled.get(name, 0) or records.unseen.get(name, 0):
            way = IMAGES if name in FIELDS else "take it into the records' text"
            yield (
                f"WARNING: {plural(n, 'record')} {does(range(n), 'has', 'have')} a field {name} that is not read, so they are trained as "
                f"if it were not there: {way}, or leave those records out"
            )
    for key, n in records.nulls.items():
        yield (
            f"WARNING: {n:,} records have null entries inside {key}, as Arrow adds them where objects differ, and the chat template "
            "is given them: nulls: drop takes them out"
        )
    for name, n in records.placeholders.items():
        hold = f"{plural(n, 'record')} {does(range(n), 'holds', 'hold')} {name}"
        yield f"WARNING: {hold}, which is trained as text: {IMAGES}"


def _budget(outcome: Outcome) -> Iterator[str]:
    """The tokens that the budget wants and those of the stream; the tokens of a record, if they are far from expected_mean_tokens."""
    wanted, manifest, totals = outcome.wanted, outcome.manifest, outcome.manifest.totals
    if wanted:
        missing = wanted.missing(manifest)
        ways = (
            f"write sample: {percent(wanted.next_share(manifest))} under this stream, which adds to what is there"
            if wanted.share < 1
            else "there is no more of it: the mix repeats it up to max_repeat times, or give it a smaller share"
        )
        short = f", {missing:,} ({missing / wanted.tokens:.1%}) too few for its share; {ways}"
        yield f"{'WARNING: ' * bool(missing)}budget: {wanted.said}: {totals.seen_tokens:,} came{short * bool(missing)}"
    mean = (totals.tokens + totals.lost_tokens) / max(1, manifest.records.written)
    if far := said_of_mean(mean, outcome.expected_mean):
        yield f"a record holds {mean:,.1f} tokens on average of {plural(manifest.records.written, 'record')}, {far}"


def parts_result(
    part: ArrayPart, outcomes: Sequence[PartOutcome]
) -> tuple[list[Item], dict[str, Any]]:
    """The same of one part of an array of jobs."""
    tree = {"part": str(part), "streams": list(map(_part_json, outcomes))}
    return [sentence for outcome in outcomes for sentence in sentences(outcome)], tree


def _of_part(outcome: PartOutcome) -> Iterator[str]:
    records = outcome.records
    yield (
        f"{outcome.stream}: part {outcome.part}: {outcome.units:,} of {plural(outcome.units_in_all, 'work unit')}, "
        f"{outcome.reused:,} of their records were there already; {records.read:,} records read, {records.written:,} written, "
        f"{outcome.tokens:,} tokens, {outcome.seconds:.1f} s; into {outcome.target}"
    )
    if records.bad:
        warn = "WARNING: " * (records.bad > MANY_BAD * records.sampled)
        reasons = _counts(records.quarantined)
        yield f"  {warn}{records.bad:,} records are bad ({reasons}); mdsmix quarantine shows them when the stream is published"
    yield from (f"  {note}" for note in outcome.notes)


def _part_json(outcome: PartOutcome) -> dict[str, Any]:
    own = ("stream", "target", "units", "units_in_all", "reused", "tokens", "seconds")
    counts = ("read", "written", "filtered", "quarantined")
    tree = {key: getattr(outcome, key) for key in own}
    tree |= {key: getattr(outcome.records, key) for key in counts}
    return tree | {"peak_bytes": outcome.peak}


def mixture(outcome: MixOutcome) -> Table:
    """How many samples of each stream a mixed stream holds; None for tokens that the columns do not tell. The notes say where it lies."""
    mixed, index = outcome.record.mixed, outcome.index
    drawn, samples = sum(m.drawn for m in mixed), sum(m.samples for m in mixed)
    tokens = None if any(m.tokens is None for m in mixed) else sum(m.tokens or 0 for m in mixed)
    rows = [
        (m.name, m.samples, m.weight, m.drawn, m.drawn / drawn, m.tokens, tokens and (m.tokens or 0) / tokens)
        for m in mixed
    ]  # fmt: skip
    state = f"mixed in {outcome.seconds:.1f} s" if outcome.is_new else "up to date"
    size = f"{plural(len(index.shards), 'shard')}, {index.bytes:,} bytes"
    notes = [f"{state}, seed {outcome.record.seed}, {size}: {outcome.target}"]
    if not outcome.has_manifest:
        notes += [
            "  a stream has no manifest, so the mix has none: only its index tells what it is"
        ]
    total = ("all", samples, "", drawn, 1.0, tokens, 1.0 if tokens else None)
    return Table(columns=MIXTURE, rows=rows, total=total, notes=notes)


def mixture_json(outcome: MixOutcome) -> dict[str, Any]:
    return as_json(mixture(outcome)) | {"target": outcome.target, "seed": outcome.record.seed}
