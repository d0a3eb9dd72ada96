"""Notes on a converted stream: what was filtered, truncated, not read or guessed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from mdsmix.conversion.bad_records import ARRAY
from mdsmix.conversion.run import Outcome, PartOutcome
from mdsmix.encode.answer_parts import (
    RECIPIENT,
    RECIPIENT_FIX,
    UNREAD_REASONING,
    describe_reasoning_fix,
)
from mdsmix.encode.open_template import NO_TEMPLATE
from mdsmix.encode.printed_parts import (
    MASKED_ROLE,
    UNPRINTED,
    describe_possible_marks,
    merge_unread_keys,
    name_in_records,
)
from mdsmix.estimate.budget_share import BudgetShare
from mdsmix.kinds import kind_of
from mdsmix.kinds.membership import DUPLICATE, HELD_OUT, NOT_HELD_OUT
from mdsmix.kinds.printed_texts import PRINTED_BY_TEMPLATE, is_printed_by_template
from mdsmix.kinds.row_faults import ROW_FAULTS, describe_row_fault
from mdsmix.kinds.turn_rows import (
    MESSAGES_AS_TEXT,
    PARENT,
    describe_message_texts,
    describe_parents,
)
from mdsmix.messages import format_field, format_percent, join_counts, join_names, plural
from mdsmix.report.trained_tokens import list_untrained_tokens
from mdsmix.shapes.extras import VARIABLES
from mdsmix.shapes.image_parts import FIELDS
from mdsmix.shapes.spans import DETAIL
from mdsmix.shapes.training_marks import TRAIN_KEYS
from mdsmix.shards.counts import BAD_SHARE, NO_MATCH, NOT_SAMPLED, Records
from mdsmix.shards.manifest import Manifest
from mdsmix.tokenizer.card import NO_EOS

FAR_FROM_EXPECTED = 0.05
"A mean that differs by more than 5 % from the recipe's expected_mean_tokens is reported."
FILTERED_SHARE = 0.05
"A warning is given if rules filter a larger share of the records."
CHOSEN_BY_RECIPE = (HELD_OUT, NOT_HELD_OUT, NOT_SAMPLED, DUPLICATE, NO_MATCH)
"Reasons for which the recipe filters records on purpose, so without a warning."
IMAGES_HINT = (
    "set images: {} on the stream, or images: {unplaced: first} if its texts have no placeholder "
    "such as <image> (shape: llava reads <image> and the fields of images.field, shape: qwen_vl "
    "reads the path between <img> and </img>, the other shapes read the parts of messages; video "
    "and sound are never read)"
)
MOST_UNREAD = 8
"Unread fields to name."
IN_CONVERSATIONS = ("messages.", f"{VARIABLES}.")
"How names begin that are counted when a conversation is tokenized, not for every record."
RATINGS = ("label", "kto_tag")
"Fields that may mark bad answers. LLaMA-Factory's records for KTO have the second one."
NO_IMAGES_HINT = "streams of prompts and of unpaired preferences have no images"
FIELD_HINT = "move it into the records' text"
VARIABLE_HINT = (
    "use the chat template of the model that the field is for (this template does not read it)"
)
UNPRINTED_HINT = (
    "use the chat template of a model that reads these messages (this template does not print "
    "them), or move their text into the first question"
)
TOOLS = ("tools", "functions", "tool_defs")
"Fields with the tools of a conversation."
QUESTIONS = frozenset({"prompt", "instruction"})
"Keys of the recipe for the question of a record."
MEANINGFUL_FIELDS = (
    *("system", "system_prompt", "system_message"),
    *TOOLS,
    "images",
    "image",
    "videos",
    "audios",
    "input",
    "history",
    *RATINGS,
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
    *UNREAD_REASONING,
    RECIPIENT,
    "messages.content beside tool_calls",
)
"Fields that change the meaning of a record in LLaMA-Factory, OpenAI, TRL and others."
UNSEEN_MARKS = (*(name for name in TRAIN_KEYS if name not in MEANINGFUL_FIELDS), DETAIL)
"Columns that may be lists of marks, besides those of MEANINGFUL_FIELDS."


def list_warnings(outcomes: Iterable[Outcome | PartOutcome]) -> Iterator[str]:
    """Yield the notes that are warnings, each after the name of its stream."""
    for outcome in outcomes:
        for line in describe_outcome(outcome):
            sentence = line.strip()
            if sentence.startswith("WARNING"):
                yield f"{outcome.stream}: {sentence}"


def describe_outcome(outcome: Outcome | PartOutcome) -> Iterator[str]:
    """Yield a line for the stream, then its notes, indented."""
    if isinstance(outcome, PartOutcome):
        records = outcome.records
        yield (
            f"{outcome.stream}: part {outcome.part}: {outcome.units:,} of "
            f"{plural(outcome.units_in_all, 'work unit')}, {outcome.reused:,} already done; "
            f"{records.read:,} records read, {records.written:,} written, "
            f"{outcome.tokens:,} tokens, {outcome.seconds:.1f} s; into {outcome.target}"
        )
        notes = _note_rejected(records, "shown once it is published", has_targets=False)
    else:
        yield f"{outcome.stream}: {outcome.state}, {outcome.target}"
        records = outcome.manifest.records
        kind = kind_of(outcome.manifest.encoding)
        notes = chain(
            _note_rejected(records, f"in {outcome.target}/quarantine/", kind.has_targets),
            _note_duplicates(records, outcome.is_eval),
            _note_samples(outcome.manifest),
            _note_unread(records, kind.may_have_images, outcome.manifest.encoding.fields),
            _note_misread(records, kind.may_have_images),
            _note_unseen_marks(outcome.manifest),
            _note_absent(outcome.manifest),
            _note_budget(outcome),
        )
    yield from (f"  {note}" for note in (*notes, *outcome.notes))


def _note_rejected(records: Records, where: str, has_targets: bool) -> Iterator[str]:
    """Yield notes on the records without a sample: filtered ones, which a rule leaves out, and
    quarantined ones, which are bad.

    Args:
        where: where the bad records are stored or shown.
        has_targets: whether the recipe's target_responses applies to the stream.
    """
    if records.filtered:
        # Records that the recipe filters on purpose count neither as filtered nor as read.
        on_purpose = sum(records.filtered.get(reason, 0) for reason in CHOSEN_BY_RECIPE)
        share = (records.dropped - on_purpose) / max(1, records.read - on_purpose)
        warning = f"WARNING: {share:.1%} of the records are " if share > FILTERED_SHARE else ""
        yield f"{warning}filtered: {join_counts(records.filtered)}"
    if records.quarantined:
        share = records.bad / max(1, records.selected)
        warning = f"WARNING: {share:.1%} of the records are " if share > BAD_SHARE else ""
        yield f"{warning}quarantined: {join_counts(records.quarantined)}, {where}"
    if "no_loss_tokens" in records.filtered:
        alternative = ", or target_responses: all," if has_targets else ""
        yield f"no_loss_tokens: a larger max_seq_len{alternative} may keep these records"
    if "prompt_too_long" in records.filtered:
        yield "prompt_too_long: a larger max_seq_len, or a smaller max_gen_len, keeps these records"
    if "ends_untrained" in records.quarantined:
        yield (
            "ends_untrained: pack: true keeps these records, since packed rows may end in a part "
            "that is not trained"
        )
    if "split_answer" in records.quarantined:
        yield "split_answer: target_responses: all, or pack: true, keeps these records"
    if "json_array" in records.quarantined:
        yield f"WARNING: {ARRAY}"


def _note_duplicates(records: Records, is_eval: bool) -> Iterator[str]:
    """Yield a note if many records equal an earlier one of the stream."""
    if records.has_many_duplicates:
        share = records.duplicates / max(1, records.written)
        effect = "counted again in the evaluation" if is_eval else "trained again"
        yield (
            f"WARNING: {records.duplicates:,} of {plural(records.written, 'record')} ({share:.1%}) "
            f"are exact duplicates and are {effect}. Set `duplicates: drop` to remove them"
        )


def _note_samples(manifest: Manifest) -> Iterator[str]:
    """Yield notes on a missing chat template or EOS, on tokens that are not trained, on
    conversations whose earlier messages the template prints differently later (rewritten history),
    and on special tokens in text.
    """
    encoding = manifest.encoding
    if kind_of(encoding).has_template and manifest.tokenizer.chat_template_hash is None:
        yield f"WARNING: {NO_TEMPLATE}"
    if manifest.tokenizer.eos_id is None:
        yield f"WARNING: {NO_EOS}"
    yield from list_untrained_tokens(manifest)
    yield from _note_parts(manifest)
    totals = manifest.totals
    if totals.loss_weights:
        weights = sorted(totals.loss_weights.items(), key=lambda item: float(item[0]))
        listed = ", ".join(f"{weight} ({plural(count, 'token')})" for weight, count in weights)
        yield f"loss weights of trained tokens: {listed}"
    if totals.span_untrained:
        yield (
            f"in {plural(totals.span_records, 'record')}, marks train only some characters of an "
            f"answer: {plural(totals.span_untrained, 'token')} of answers are not trained"
        )
    yield from _note_labels(totals.labels)
    rewritten = manifest.records.quarantined.get("not_prefix_stable")
    if rewritten:
        remedy = "the record's detail shows both texts"
        if encoding.rewritten_history == "reject":
            remedy = "set rewritten_history: last, or each with target_responses: all, to keep them"
        yield (
            "the chat template rewrites the history of "
            f"{plural(rewritten, 'conversation')}: {remedy}"
        )
    rows = totals.documents or totals.samples
    written = manifest.records.written
    if encoding.rewritten_history == "each" and rows != written:
        name = "document" if encoding.pack else "row"
        yield (
            f"{plural(rows, name)} of {plural(written, 'record')}, since rewritten_history: each "
            f"makes a {name} of each answer of a conversation whose history changes"
        )
    specials = manifest.totals.specials
    if specials:
        contain = "contains" if specials == 1 else "contain"
        note = (
            f"{plural(specials, 'record')} {contain} the text of a special token; "
            f"special_tokens_in_text: {encoding.special_tokens_in_text}"
        )
        if is_printed_by_template(kind_of(encoding), specials, manifest.records.read):
            note = f"WARNING: {note}; {PRINTED_BY_TEMPLATE}"
        yield note


def _note_labels(labels: Mapping[str, int]) -> Iterator[str]:
    """Yield a note on how many completions of unpaired preferences are desirable, and the weights
    of the two labels that balance them.

    The authors of KTO recommend that the desirable completions, times their weight, are 1 to 4/3
    times the undesirable ones, times theirs.

    Args:
        labels: `true` and `false` -> completions with this label; empty for other kinds.
    """
    if not labels:
        return
    desirable = labels["true"]
    undesirable = labels["false"]
    counts = f"labels: {desirable:,} true (desirable), {undesirable:,} false"
    if not desirable or not undesirable:
        yield f"WARNING: {counts}: KTO compares both labels, and this stream has only one"
        return
    ratio = desirable / undesirable
    if 1 <= ratio <= 4 / 3:
        yield counts
    elif ratio > 1:
        weights = f"{ratio * 3 / 4:.2f} to {ratio:.2f}"
        yield f"{counts}; KTO balances them with undesirable_weight from {weights}"
    else:
        weights = f"{1 / ratio:.2f} to {4 / 3 / ratio:.2f}"
        yield f"{counts}; KTO balances them with desirable_weight from {weights}"


def _note_parts(manifest: Manifest) -> Iterator[str]:
    """Yield a note on the parts of answers that are trained and that are not (`train_parts`), and a
    warning for each part that the recipe leaves out and that no answer has.
    """
    totals = manifest.totals
    trained = dict[str, int]()
    untrained = dict[str, int]()
    for name, is_trained in manifest.encoding.train_parts.items():
        counts = trained if is_trained else untrained
        counts[name] = totals.answer_parts.get(name, 0)
    if not untrained:
        return
    counted = "tokens of answers that are trained"
    if manifest.encoding.target_responses == "last":
        counted = "tokens of answers (target_responses: last trains only the last one of a row)"
    yield (
        f"{counted}: {join_counts(trained)}; not trained (train_parts): {join_counts(untrained)}"
    )
    for name, count in untrained.items():
        if not count and totals.samples:
            yield (
                f"WARNING: train_parts.{name} is false, but no answer of the "
                f"{plural(manifest.records.written, 'record')} has this part: it changes nothing"
            )


def _note_unread(
    records: Records, may_have_images: bool, fields: Mapping[str, str]
) -> Iterator[str]:
    """Yield notes on fields that the conversion did not read, so that training ignores them.

    Args:
        records: the counts of the stream's records.
        may_have_images: whether streams of this kind may have images.
        fields: key of the recipe -> name of the record's field. The fields of `input` and `system`
            are not read from some records only.
    """
    question_input = fields.get("input")
    system = fields.get("system")

    # Name the unread fields, the most frequent first. An input was read from the other records.
    filled = merge_unread_keys(records.unread)  # field -> records in which it is not empty
    phrases = list[str]()
    for name in sorted(filled, key=lambda name: (-filled[name], name)):
        if name == question_input:
            continue
        count = f"{filled[name]:,} of {records.read:,} not empty"
        if name in records.unseen:
            count += f", {records.unseen[name]:,} not looked into"
        if name.startswith(IN_CONVERSATIONS) and records.written < records.read:
            count = f"in {filled[name]:,} of the records that were tokenized"
        phrases.append(f"{format_field(name_in_records(name, fields))} ({count})")
    for name in records.unseen:
        if name not in filled:
            phrases.append(f"{format_field(name)} (not looked into)")
    if phrases:
        yield f"fields not read: {join_names(phrases, MOST_UNREAD)}"

    # Warn of fields that change the meaning of a record.
    records_with_field = records.unseen | filled
    by_template = [name for name in filled if name.startswith((f"{VARIABLES}.", UNPRINTED))]
    for name in (*MEANINGFUL_FIELDS, *by_template):
        if name not in (question_input, system) and records_with_field.get(name):
            hint = _advise_on_field(name, may_have_images)
            yield (
                f"WARNING: the field {name_in_records(name, fields)} of "
                f"{plural(records_with_field[name], 'record')} is not read, so it is ignored in "
                f"training: {hint}, or remove these records"
            )
    if PARENT in records_with_field and not QUESTIONS.isdisjoint(fields):
        yield f"WARNING: {describe_parents(filled.get(PARENT))}"
    yield from _note_false_input(records, question_input)
    yield from _note_other_systems(records, system)


def _note_misread(records: Records, may_have_images: bool) -> Iterator[str]:
    """Yield warnings of contents of records that training may misread: keys that may be marks,
    nulls inside structured fields, and messages and placeholders that are trained as text.

    Args:
        records: the counts of the stream's records.
        may_have_images: whether streams of this kind may have images.
    """
    yield from (f"WARNING: {mark}" for mark in describe_possible_marks(records.unread))
    may_fail = ", and may fail on them" if "template_error" in records.quarantined else ""
    for key, count in records.nulls.items():
        verb = "has" if count == 1 else "have"
        yield (
            f"WARNING: {plural(count, 'record')} {verb} null entries inside {key}, and the chat "
            f"template sees these entries{may_fail}. Arrow and datasets write them if objects "
            "have different keys. Set `nulls: drop` to remove them"
        )
    for name, count in records.placeholders.items():
        if name == MESSAGES_AS_TEXT:
            yield f"WARNING: {describe_message_texts(count)}"
            continue
        if name in ROW_FAULTS:
            yield f"WARNING: {describe_row_fault(name, count)}"
            continue
        state = f"trained as text: {IMAGES_HINT}" if may_have_images else f"text: {NO_IMAGES_HINT}"
        yield f"WARNING: {name} of {plural(count, 'record')} is {state}"


def _note_unseen_marks(manifest: Manifest) -> Iterator[str]:
    """Yield a warning for each column of conversations that has the name of a mark, and that was
    not looked into, since no key of the recipe names it. So its values are unknown.
    """
    encoding = manifest.encoding
    kind = kind_of(encoding)
    if kind.word != "finetuning" or not kind.has_template:
        return
    for name in (*UNSEEN_MARKS, MASKED_ROLE):
        if name not in manifest.records.unseen:
            continue
        column = f"the column {name} has the name of a mark, and was not looked into: if it"
        if name == MASKED_ROLE:
            yield (
                f"WARNING: {column} names the role that NeMo does not train, leave out the records "
                f"of the assistant's role by source.where, such as where: {name} != 'Assistant'"
            )
        else:
            yield (
                f"WARNING: {column} says which messages or answers are trained, name it in the "
                f"recipe by source.train_mark: {name}"
            )


def _note_false_input(records: Records, question_input: str | None) -> Iterator[str]:
    """Yield a warning if the input of questions is 0 or false in some records, and so is not read.

    Args:
        records: the counts of the stream's records.
        question_input: the field that the recipe names as `input`, whose 0 and false are not read
            (`Shape.skipped_if_false`); None if it names none.
    """
    count = records.unread.get(question_input, 0) if question_input else 0
    if count:
        yield (
            f"WARNING: the field {question_input} of {plural(count, 'record')} is 0 or false, not "
            "text, so the question does not contain it: write numbers as text, and a missing input "
            "as null"
        )


def _note_other_systems(records: Records, system: str | None) -> Iterator[str]:
    """Yield a warning if some records have a system message in a field and another one in the list
    of messages, since only that of the list is trained.

    Args:
        records: the counts of the stream's records.
        system: the field that the recipe names as `system`; None if it names none.
    """
    count = records.unread.get(system, 0) if system else 0
    if count:
        yield (
            f"WARNING: the field {system} of {plural(count, 'record')} is not read, so it is "
            "ignored in training, since the list begins with a system message of its own: remove "
            "one of the two"
        )


def _note_absent(manifest: Manifest) -> Iterator[str]:
    """Yield a note on each field that the recipe names for a key, such as `system: sys`, and that
    some records lack: a warning if all do, unless the field has the name of its key. A source.id
    that no record has is always a warning: records have no id unless the recipe names its field.
    """
    encoding = manifest.encoding
    keys = {name: key for key, name in encoding.fields.items()}
    if encoding.id:
        keys[encoding.id] = "id"
    for name, count in manifest.records.absent.items():
        key = keys.get(name)
        if key is None or not count:
            continue
        source_key = f"source.{key} is {format_field(name)}, a field that"
        if count == manifest.records.read and (name != key or key == "id"):
            yield (
                f"WARNING: {source_key} no record has ({count:,} read): correct the name, or "
                f"remove source.{key}"
            )
        else:
            lack = "lacks" if manifest.records.read == 1 else "lack"
            yield f"{source_key} {count:,} of {plural(manifest.records.read, 'record')} {lack}"


def _advise_on_field(name: str, may_have_images: bool) -> str:
    """Return what the user can do to have the content of a field trained that the conversion did
    not read.
    """
    if name.removeprefix("messages.") in FIELDS:
        return IMAGES_HINT if may_have_images else NO_IMAGES_HINT
    if name in RATINGS:
        return f"if it marks bad answers, set where: {name} on the source"
    if name in TOOLS:
        return f"if these are the tools of conversations, set tools: {name} on the source"
    if name in UNREAD_REASONING:
        return describe_reasoning_fix(name)
    if name == RECIPIENT:
        return RECIPIENT_FIX
    if name.startswith(f"{VARIABLES}."):
        return VARIABLE_HINT
    if name.startswith(UNPRINTED):
        return UNPRINTED_HINT
    return FIELD_HINT


def _note_budget(outcome: Outcome) -> Iterator[str]:
    """Yield a note on the stream's tokens and its share of the budget. Yield another note if the
    mean tokens of its records are far from the number that the recipe expects
    (`expected_mean_tokens`).
    """
    manifest = outcome.manifest
    totals = manifest.totals
    if outcome.budget_share:
        yield _describe_budget(outcome.budget_share, manifest)
    mean = (totals.tokens + totals.lost_tokens) / max(1, manifest.records.written)
    expected = outcome.expected_mean
    if expected and mean and abs(mean / expected - 1) > FAR_FROM_EXPECTED:
        yield (
            f"mean of {plural(manifest.records.written, 'record')}: {mean:,.1f} tokens, "
            f"{mean / expected - 1:+.1%} from expected_mean_tokens ({expected:,g}): the tokenizer "
            "or the records are not the expected ones"
        )


def _describe_budget(budget: BudgetShare, manifest: Manifest) -> str:
    """Return a note on the tokens that a stream got for its share of the budget. The note is a
    warning with a fix if these are too few.
    """
    note = f"budget: {budget.explanation}: got {manifest.totals.seen_tokens:,}"
    missing = budget.missing(manifest)
    if not missing:
        return note
    remedy = (
        "the source has no more: the mix repeats it up to max_repeat times, or give it a "
        "smaller share"
    )
    if budget.share < 1:
        share = format_percent(budget.next_share(manifest))
        remedy = f"set sample: {share} on this stream, and only the new records are converted"
    return (
        f"WARNING: {note}, {missing:,} ({missing / budget.tokens:.1%}) too few for its share; "
        f"{remedy}"
    )
