"""The table at the end of a conversion, of a part of a conversion, and of `mdsmix mix`, with
sentences under it.

The sentences name data that was left out, cut, unread or guessed, and warn. `mdsmix inspect` shows
the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain

from mdsmix.conversion.bad_records import ARRAY
from mdsmix.conversion.budget_share import said_of_mean
from mdsmix.conversion.planning import ArrayPart
from mdsmix.conversion.run import Outcome, PartOutcome
from mdsmix.encode.chat import NO_TEMPLATE
from mdsmix.encode.forms import describe_possible_marks
from mdsmix.kinds import kind_of
from mdsmix.kinds.membership import DUPLICATE, HELD_OUT, NOT_HELD_OUT
from mdsmix.messages import format_percent, join_counts, join_names, plural
from mdsmix.mix.offline.mix_streams import MixOutcome
from mdsmix.report.inspection import trained_tokens, untrained
from mdsmix.report.show import Item
from mdsmix.shapes.extras import VARIABLES
from mdsmix.shapes.image_parts import FIELDS
from mdsmix.shards.counts import BAD_SHARE, NO_MATCH, NOT_SAMPLED, Records
from mdsmix.shards.manifest import Manifest
from mdsmix.table import UNKNOWN, Column, Row, Table, Tree, table_to_json

FILTERED_SHARE = 0.05
"A warning is given where rules leave out a larger share of the records."
ASKED_FOR = (HELD_OUT, NOT_HELD_OUT, NOT_SAMPLED, DUPLICATE, NO_MATCH)
"Reasons by which the recipe itself leaves records out, without a warning."
IMAGES = (
    "images: {} in the stream reads them: shape: llava reads <image> and the fields of images.field, shape: qwen_vl reads the image whose "
    "path stands between <img> and </img>, the other shapes read the parts of messages; no video and no sound is read"
)
MOST_UNREAD = 8
"Unread fields that are named."
REASONING = ("messages.reasoning_content", "messages.reasoning", "messages.thinking")
RENAME = (
    "rename it to the key that the chat template prints (reasoning_content, reasoning or thinking; transformers renames nothing), take it "
    "into the content"
)
TELLING = (
    "system",
    "tools",
    "functions",
    "images",
    "image",
    "videos",
    "audios",
    "input",
    "history",
    "label",
    "rejected",
    "rejected_response",
    "rejected_messages",
    "weight",
    "loss_mask",
    "objects",
    "chat_template_kwargs",
    "messages.image",
    "messages.images",
    "messages.videos",
    "messages.audios",
    *REASONING,
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


def result(outcomes: Sequence[Outcome]) -> tuple[list[Item], Tree]:
    """The result of a conversion as items for a person, and as a tree for programs."""
    table = summary(outcomes)
    tree = table_to_json(table)
    for row, outcome in zip(tree["rows"], outcomes, strict=True):
        manifest = outcome.manifest
        wanted = outcome.budget_share
        row |= {
            "target": outcome.target,
            "state": outcome.state,
            "reasons": {key: getattr(manifest.records, key) for key in ("filtered", "quarantined")},
            "duplicates": manifest.records.duplicates,
            "budget": wanted
            and {"wanted_tokens": wanted.tokens, "missing_tokens": wanted.missing(manifest)},
            "index_hash": manifest.index_hash,
            "peak_bytes": outcome.peak,
        }
    return [table], tree


def summary(outcomes: Sequence[Outcome]) -> Table:
    """One row for each stream, and the sum where there are several streams."""
    rows = [_row(outcome.stream, [outcome]) for outcome in outcomes]
    notes = [sentence for outcome in outcomes for sentence in sentences(outcome)]
    if peak := max((outcome.peak for outcome in outcomes), default=0):
        notes += [f"peak memory: {peak / 1e6:,.0f} MB"]
    return Table(
        columns=COLUMNS,
        rows=rows,
        total=_row("all", outcomes) if len(outcomes) > 1 else None,
        notes=notes,
    )


def _row(name: str, outcomes: Sequence[Outcome]) -> Row:
    each = [
        (r.read, r.written, r.dropped, r.bad, trained_tokens(m), sum(p.shards for p in m.parts), o.bytes, o.done, o.new_tokens, o.seconds)
        for o in outcomes
        for m, r in [(o.manifest, o.manifest.records)]
    ]  # fmt: skip
    *counts, done, tokens, seconds = map(sum, zip(*each, strict=True))
    speed = (seconds, int(tokens / max(seconds, 1e-3))) if done else ("up to date", "")
    return (name, *counts, *speed)


def warnings(outcomes: Iterable[Outcome | PartOutcome]) -> Iterator[str]:
    """The sentences that warn, each behind the name of its stream."""
    for outcome in outcomes:
        for sentence in map(str.strip, sentences(outcome)):
            if sentence.startswith("WARNING"):
                yield f"{outcome.stream}: {sentence}"


def sentences(outcome: Outcome | PartOutcome) -> Iterator[str]:
    """A line for the stream, and its notes below."""
    if isinstance(outcome, PartOutcome):
        records = outcome.records
        yield (
            f"{outcome.stream}: part {outcome.part}: {outcome.units:,} of {plural(outcome.units_in_all, 'work unit')}, "
            f"{outcome.reused:,} of their records were there already; {records.read:,} records read, {records.written:,} written, "
            f"{outcome.tokens:,} tokens, {outcome.seconds:.1f} s; into {outcome.target}"
        )
        notes = _set_aside(records, "shown when it is published")
    else:
        yield f"{outcome.stream}: {outcome.state}, {outcome.target}"
        manifest, records = outcome.manifest, outcome.manifest.records
        notes = chain(
            _set_aside(records, f"in {outcome.target}/quarantine/"),
            _duplicates(records, outcome.is_eval),
            _samples(manifest),
            _unread(records),
            _budget(outcome),
        )
    yield from (f"  {note}" for note in (*notes, *outcome.notes))


def _set_aside(records: Records, where: str) -> Iterator[str]:
    """Yield sentences on good records that are no samples, and on bad records. `where`: the place
    of the bad records.
    """
    left_out = sum(records.filtered.get(reason, 0) for reason in ASKED_FOR)
    if records.filtered:
        share = (records.dropped - left_out) / max(1, records.read - left_out)
        warning = f"WARNING: {share:.1%} of the records are " if share > FILTERED_SHARE else ""
        yield f"{warning}filtered: {join_counts(records.filtered)}"
    if records.quarantined:
        share = records.bad / max(1, records.asked)
        warning = f"WARNING: {share:.1%} of the records are " if share > BAD_SHARE else ""
        yield f"{warning}quarantined: {join_counts(records.quarantined)}, {where}"
    if "no_loss_tokens" in records.filtered:
        yield "a larger max_seq_len, or target_responses: all, may keep those with no_loss_tokens"
    if "json_array" in records.quarantined:
        yield f"WARNING: {ARRAY}"


def _duplicates(records: Records, is_eval: bool) -> Iterator[str]:
    """Yield a sentence on kept records that equal an earlier one, if they are many."""
    if records.has_many_duplicates:
        share = records.duplicates / max(1, records.written)
        again = "counted again in the evaluation" if is_eval else "trained again"
        yield (
            f"WARNING: {records.duplicates:,} of {plural(records.written, 'record')} kept ({share:.1%}) say the same as an earlier one of the "
            f"stream and are {again}; duplicates: drop leaves them out"
        )


def _samples(manifest: Manifest) -> Iterator[str]:
    """A sentence for each count, if not zero, of tokens that were cut or lost, and of texts that
    were rewritten.
    """
    encoding = manifest.encoding
    if kind_of(encoding).has_template and manifest.tokenizer.chat_template_hash is None:
        yield f"WARNING: {NO_TEMPLATE}"
    yield from untrained(manifest)
    if rewritten := manifest.records.quarantined.get("not_prefix_stable"):
        remedy = "rewritten_history: last, or each, makes rows of them"
        remedy = remedy if encoding.rewritten_history == "reject" else "the detail has both texts"
        yield f"the chat template rewrites the history of {rewritten:,} conversations: {remedy}"
    if specials := manifest.totals.specials:
        yield f"{specials:,} records hold the text of a special token; rule: {encoding.special_tokens_in_text}"


def _unread(records: Records) -> Iterator[str]:
    """Sentences on fields that are not read, on nulls, and on image placeholders that are trained
    as text.
    """
    filled = records.unread
    fields = sorted(filled, key=lambda name: (-filled[name], name))
    said = [f"{name} ({filled[name]:,} of {records.read:,} not empty)" for name in fields]
    said += [f"{name} (not looked into)" for name in records.unseen if name not in filled]
    if said:
        yield f"fields not read: {join_names(said, MOST_UNREAD)}"
    unread = records.unseen | filled
    variables = [name for name in filled if name.startswith(f"{VARIABLES}.")]
    for name in filter(unread.get, (*TELLING, *variables)):
        way = "take it into the records' text"
        if name.removeprefix("messages.") in FIELDS:
            way = IMAGES
        elif name in REASONING:
            way = RENAME
        elif name in variables:
            way = (
                "the chat template does not read it: take the template of the model that it is for"
            )
        yield (
            f"WARNING: the field {name} of {plural(unread[name], 'record')} is not read, so they are trained as if it were not there: {way}, "
            "or leave those records out"
        )
    yield from map("WARNING: {}".format, describe_possible_marks(filled))
    for key, n in records.nulls.items():
        yield (
            f"WARNING: {plural(n, 'record')} {'has' if n == 1 else 'have'} null entries inside {key}, as Arrow adds them where objects differ, and the chat template "
            "is given them: nulls: drop takes them out"
        )
    for name, n in records.placeholders.items():
        yield f"WARNING: {name} of {plural(n, 'record')} is trained as text: {IMAGES}"


def _budget(outcome: Outcome) -> Iterator[str]:
    """A sentence on the budget's tokens and the stream's, and one where the mean record is far from
    expected_mean_tokens.
    """
    wanted, manifest, totals = outcome.budget_share, outcome.manifest, outcome.manifest.totals
    if wanted:
        said = f"budget: {wanted.said}: {totals.seen_tokens:,} came"
        ways = "there is no more of it: the mix repeats it up to max_repeat times, or give it a smaller share"
        if wanted.share < 1:
            ways = f"write sample: {format_percent(wanted.next_share(manifest))} under this stream, which adds to what is there"
        if missing := wanted.missing(manifest):
            said = f"WARNING: {said}, {missing:,} ({missing / wanted.tokens:.1%}) too few for its share; {ways}"
        yield said
    mean = (totals.tokens + totals.lost_tokens) / max(1, manifest.records.written)
    if far := said_of_mean(mean, outcome.expected_mean):
        yield f"a record holds {mean:,.1f} tokens on average of {plural(manifest.records.written, 'record')}, {far}"


def parts_result(part: ArrayPart, outcomes: Sequence[PartOutcome]) -> tuple[list[Item], Tree]:
    """The result of one part of an array of jobs, for a person and for programs."""
    tree = {"part": str(part), "streams": [asdict(outcome) for outcome in outcomes]}
    return [sentence for outcome in outcomes for sentence in sentences(outcome)], tree


def mixture(outcome: MixOutcome) -> Table:
    """The samples of each stream in a mixed stream; tokens are unknown where columns hold no ids.
    The notes say where the mix lies.
    """
    mixed, index = outcome.record.mixed, outcome.index
    tokens = [UNKNOWN if each.tokens is None else each.tokens for each in mixed]
    drawn, in_all = sum(each.drawn for each in mixed), sum(tokens)
    rows = [
        (m.name, m.samples, m.weight, m.drawn, m.drawn / drawn, each, each / max(1, in_all))
        for m, each in zip(mixed, tokens, strict=True)
    ]
    state = "mixed" if outcome.is_new else "up to date"
    size = f"{plural(len(index.shards), 'shard')}, {index.bytes:,} bytes"
    notes = [f"{state}, seed {outcome.record.seed}, {size}: {outcome.target}"]
    if not outcome.has_manifest:
        notes += [
            "  a stream has no manifest, so the mix has none: only its index tells what it is"
        ]
    samples = sum(each.samples for each in mixed)
    return Table(
        columns=MIXTURE,
        rows=rows,
        total=("all", samples, "", drawn, 1.0, in_all, in_all / max(1, in_all)),
        notes=notes,
    )
