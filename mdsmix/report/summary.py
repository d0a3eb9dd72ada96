"""The table at the end of a conversion, with sentences under it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mdsmix.convert.max_bad import ARRAY
from mdsmix.convert.outcome import Outcome
from mdsmix.convert.parts import ArrayPart, PartOutcome
from mdsmix.kinds import kind_of, shape_of
from mdsmix.kinds.finetuning import PATH_END
from mdsmix.kinds.membership import DUPLICATE, HELD_OUT, NOT_HELD_OUT
from mdsmix.report.card import packed
from mdsmix.report.sampled import budget_json, said_of_budget, said_of_sample
from mdsmix.shapes.image_parts import FIELDS, PLACEHOLDER
from mdsmix.shapes.where import NO_MATCH
from mdsmix.shards.counts import NOT_SAMPLED, Records
from mdsmix.shards.manifest import Encoding, Manifest
from mdsmix.table import Column, Row, Table, as_json
from mdsmix.words import plural

FILTERED_SHARE = 0.05
"A warning is given if rules leave out more records than this."
MANY_BAD = 0.01
"A part of an array warns of more bad records than this."
NO_TEMPLATE = (
    "WARNING: the tokenizer has no chat template, so conversations are rendered as ChatML, as LLM-Foundry does; its <|im_start|> and "
    "<|im_end|> are ordinary text unless they are special tokens of this tokenizer: give it the template of the model "
    "(chat_template in its tokenizer_config.json)"
)
WITH_ROWS = "rewritten_history: last, or each, makes rows of them"
NO_ROWS = "an answer is not printed behind what inference sees before it, so no row can hold both; the quarantine has both texts"
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
TEXT = "take it into the records' text"
COLUMNS = (
    Column("stream", "text"),
    *map(Column, ("read", "written", "filtered", "quarantined", "tokens", "shards", "bytes")),
    Column("seconds", "seconds"),
    Column("tokens/s", key="tokens_per_second"),
)


def summary(outcomes: Sequence[Outcome]) -> Table:
    """One row per stream, and the sum where there are several."""
    rows: list[Row] = [(outcome.stream, *_figures([outcome])) for outcome in outcomes]
    total = ("all", *_figures(outcomes)) if len(outcomes) > 1 else None
    notes = [sentence for outcome in outcomes for sentence in _sentences(outcome)]
    peak = max((outcome.peak for outcome in outcomes), default=0)
    notes += [f"peak memory: {peak / 1e6:,.0f} MB"] if peak else []
    return Table(columns=COLUMNS, rows=rows, total=total, notes=notes)


def warnings(outcomes: Sequence[Outcome]) -> list[str]:
    """The warnings under the table, each with its stream."""
    return [line for outcome in outcomes for line in loud(outcome.stream, _sentences(outcome))]


def loud(stream: str, sentences: Iterable[str]) -> Iterator[str]:
    """The warnings among the sentences, each behind the name of the stream."""
    for sentence in map(str.strip, sentences):
        if sentence.startswith("WARNING"):
            yield f"{stream}: {sentence}"


def summary_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The table as JSON, with the reasons and the place of each stream."""
    found = as_json(summary(outcomes))
    for row, outcome in zip(found["rows"], outcomes, strict=True):
        records = outcome.manifest.records
        row |= {"target": outcome.target, "state": outcome.state}
        row |= {"reasons": {"filtered": records.filtered, "quarantined": records.quarantined}}
        row |= {"duplicates": records.duplicates}
        row |= {"sample": outcome.manifest.encoding.sample, "budget": budget_json(outcome)}
        row |= {"index_hash": outcome.manifest.index_hash, "peak_bytes": outcome.peak}
    return found


def _figures(outcomes: Sequence[Outcome]) -> Row:
    manifests = [outcome.manifest for outcome in outcomes]
    seconds = sum(outcome.seconds for outcome in outcomes)
    made = sum(outcome.new_tokens for outcome in outcomes)
    counts = (
        sum(m.records.read for m in manifests),
        sum(m.records.written for m in manifests),
        sum(m.records.dropped for m in manifests),
        sum(m.records.bad for m in manifests),
        sum(m.totals.seen_tokens for m in manifests),
        sum(p.shards for m in manifests for p in m.parts),
        sum(outcome.bytes for outcome in outcomes),
    )
    if not any(outcome.done for outcome in outcomes):
        return (*counts, "up to date", "")
    return (*counts, seconds, int(made / max(seconds, 1e-3)))


def _sentences(outcome: Outcome) -> list[str]:
    manifest = outcome.manifest
    said = [f"{outcome.stream}: {outcome.state}, {outcome.target}"]
    for what, reasons in (
        ("filtered", manifest.records.filtered),
        ("quarantined", manifest.records.quarantined),
    ):
        if reasons:
            said.append(
                f"  {what}: {', '.join(f'{n:,} {reason}' for reason, n in reasons.items())}"
            )
    notes = (*_notes(manifest, outcome), *said_of_budget(outcome), *outcome.notes)
    said += [f"  {note}" for note in notes]
    return said


def _notes(manifest: Manifest, outcome: Outcome) -> list[str]:
    totals, records = manifest.totals, manifest.records
    notes = []
    if totals.images:
        counted = f", {plural(totals.image_tokens, 'token')} by the processor"
        notes.append(
            f"{plural(totals.images, 'image')}, {totals.image_bytes:,} bytes{counted * bool(totals.image_tokens)}"
        )
    if records.bad:
        notes.append(f"the bad records lie in {outcome.target}/quarantine/")
    if records.has_many_bad:
        notes.append(f"WARNING: {records.bad / records.sampled:.1%} of the records are bad")
    if manifest.encoding.pack:
        notes.append(packed(manifest))
    elif manifest.encoding.rewritten_history == "each":
        notes.append(f"{totals.samples:,} rows of {records.written:,} records")
    if kind_of(manifest.encoding).has_template and manifest.tokenizer.chat_template_hash is None:
        notes.append(NO_TEMPLATE)
    notes += said_of_sample(manifest)
    notes += _filtered(records)
    notes += _duplicates(records)
    notes += _unread(records, manifest.encoding)
    if "json_array" in records.quarantined:
        notes.append(f"WARNING: {ARRAY}")
    if totals.cut_rows:
        notes.append(
            f"{totals.cut_rows:,} of {plural(totals.samples, 'row')} are longer than max_seq_len: the loader cuts off "
            f"{totals.cut_tokens:,} tokens, {totals.cut_tokens / totals.tokens:.1%} of all, which are not counted above"
        )
    if totals.lost_tokens:
        verb = "is" if totals.lost_tokens == 1 else "are"
        lost = plural(totals.lost_tokens, "token")
        notes.append(f"{lost} {verb} in no sample (less than a row, or cut off)")
    if reason := records.quarantined.get("not_prefix_stable"):
        way = NO_ROWS if manifest.encoding.rewritten_history != "reject" else WITH_ROWS
        notes.append(f"the chat template rewrites the history of {reason:,} conversations: {way}")
    if totals.specials:
        rule = manifest.encoding.special_tokens_in_text
        notes.append(f"{totals.specials} records hold the text of a special token; rule: {rule}")
    return notes


def _filtered(records: Records) -> Iterator[str]:
    """Good records that a rule leaves out, where they are many, and what would keep them."""
    dropped = records.dropped - sum(
        records.filtered.get(asked_for, 0)
        for asked_for in (HELD_OUT, NOT_HELD_OUT, NOT_SAMPLED, DUPLICATE, NO_MATCH)
    )
    if dropped <= FILTERED_SHARE * records.sampled:
        return
    said = f"WARNING: {dropped / records.sampled:.1%} of the records are filtered"
    if lost := records.filtered.get("no_loss_tokens"):
        said += f"; {lost:,} have nothing to train within max_seq_len: a larger one, or target_responses: all, may keep them"
    yield said


def _duplicates(records: Records) -> Iterator[str]:
    """Records that stand in the stream more than once, where they are many."""
    if records.has_many_duplicates:
        yield (
            f"WARNING: {records.duplicates:,} of {records.sampled:,} records ({records.duplicates / records.sampled:.1%}) say the same as "
            "an earlier one of the stream and are trained again; duplicates: drop leaves them out"
        )


def _unread(records: Records, encoding: Encoding) -> Iterator[str]:
    """Fields that nothing reads, and placeholders that are trained as text."""
    # A footer counts the rows of a whole row group, and a first look reads a part of one.
    filled = {name: min(n, records.read) for name, n in records.unread.items()}
    fields = sorted(filled.items(), key=lambda field: (-field[1], field[0]))
    said = [f"{name} ({n:,} of {records.read:,} not empty)" for name, n in fields]
    said += [f"{name} (not looked into)" for name in records.unseen if name not in filled]
    if said:
        more = len(said) - MOST_UNREAD
        rest = f" and {plural(more, 'field')} more" if more > 0 else ""
        yield f"fields not read: {', '.join(said[:MOST_UNREAD])}{rest}"
    for name in TELLING:
        if n := filled.get(name, 0) or records.unseen.get(name, 0):
            yield (
                f"WARNING: {plural(n, 'record')} {'has' if n == 1 else 'have'} a field {name} that is not read, so they are trained as if it "
                f"were not there: {_images(encoding) if name in FIELDS else TEXT}, or leave those records out"
            )
    for key, n in records.nulls.items():
        yield (
            f"WARNING: {n:,} records have null entries inside {key}, as Arrow adds them where objects differ, and the chat template "
            "is given them: nulls: drop takes them out"
        )
    for name, n in records.placeholders.items():
        hold = f"{plural(n, 'record')} {'holds' if n == 1 else 'hold'} {name}"
        yield f"WARNING: {hold}, which is trained as text: {_not_read(name, encoding)}"


def _images(encoding: Encoding) -> str:
    """The setting that would read a field of images."""
    if not encoding.images:
        return "say images: {} in the stream, which reads the images"
    if shape_of(encoding).has_images == "inside":
        return "shape: llava reads the images of a field"
    return "name all fields of images in images.field"


def _not_read(placeholder: str, encoding: Encoding) -> str:
    """Why the placeholder stayed text, and the setting that would replace it."""
    if placeholder == PATH_END:
        return "shape: qwen_vl reads the image whose path stands between <img> and </img>"
    if placeholder != PLACEHOLDER:
        return "no image, video or sound is read"
    if not encoding.images:
        return "no image, video or sound is read: images: {} in the stream reads them"
    if shape_of(encoding).has_images == "inside":
        return "images of the shape qwen_vl are paths between <img> and </img>; shape: llava reads <image>"
    return "the images of such a record are parts of its messages"


def _part_sentences(outcome: PartOutcome) -> Iterator[str]:
    """A line for the stream, and one for its bad records."""
    records = outcome.records
    yield (
        f"{outcome.stream}: part {outcome.part}: {outcome.units:,} of {plural(outcome.units_in_all, 'work unit')}, "
        f"{outcome.reused:,} of their records were there already; {records.read:,} records read, {records.written:,} written, "
        f"{outcome.tokens:,} tokens, {outcome.seconds:.1f} s; into {outcome.target}"
    )
    if records.bad:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in records.quarantined.items())
        warn = "WARNING: " * (records.bad > MANY_BAD * records.sampled)
        yield f"  {warn}{records.bad:,} records are bad ({reasons}); mdsmix quarantine shows them when the stream is published"
    yield from (f"  {note}" for note in outcome.notes)


def parts_shown(outcomes: Iterable[PartOutcome]) -> list[str]:
    """Sentences on one part of an array of jobs, for each stream."""
    return [line for outcome in outcomes for line in _part_sentences(outcome)]


def part_warnings(outcomes: Iterable[PartOutcome]) -> list[str]:
    """Of these lines those that warn."""
    return [line for o in outcomes for line in loud(o.stream, _part_sentences(o))]


def parts_json(part: ArrayPart, outcomes: Iterable[PartOutcome]) -> dict[str, Any]:
    """The same for programs."""
    return {"part": str(part), "streams": list(map(_part_json, outcomes))}


def _part_json(outcome: PartOutcome) -> dict[str, Any]:
    records = outcome.records
    return {
        "stream": outcome.stream,
        "target": outcome.target,
        "units": outcome.units,
        "units_in_all": outcome.units_in_all,
        "reused": outcome.reused,
        "read": records.read,
        "written": records.written,
        "filtered": records.filtered,
        "quarantined": records.quarantined,
        "tokens": outcome.tokens,
        "seconds": outcome.seconds,
        "peak_bytes": outcome.peak,
    }
