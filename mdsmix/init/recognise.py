"""Finds the shape of records by the names of their fields, and by reading the records with each
shape that may fit.

A shape's keys name the fields that it needs, and a field may also have one of the usual other names
for a key (`also called`). Options that a shape itself guesses are tried too. So a new shape is
recognised without a change here. Only for questions and answers more is tried here: records with a
context or a system message, records with an image for each question, and prompts with a verified
answer.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import field, replace
from typing import Any

import orjson

from mdsmix.encode.answer_parts import has_earlier_call, list_parts
from mdsmix.frozen import frozen
from mdsmix.init.data_files import FirstRecords, read_beginning
from mdsmix.init.foreign_forms import (
    OR_READ,
    find_foreign_form,
    is_keyed_records,
    is_message_of_tree,
)
from mdsmix.kinds import Kind, list_kinds
from mdsmix.kinds.reasons import list_bad_reasons
from mdsmix.messages import format_field, join_counts, join_names, make_printable
from mdsmix.recipe import SourceSpec
from mdsmix.record import SYSTEM_ROLES, Conversation, Document, Pair, detail_of
from mdsmix.shapes import SHAPES, Shape
from mdsmix.shapes.fields import find_value, make_deriver, parse_field
from mdsmix.shapes.image_parts import FIELDS, PLACEHOLDER, with_images
from mdsmix.shapes.preference import ANSWERS, BEGINS, REWARDS, Preference
from mdsmix.shapes.prompt import ANSWER, Prompt
from mdsmix.shards.token_ids import PACKED_COLUMNS, PLAIN, SIDES, TURNS
from mdsmix.sources.formats import format_by, format_of
from mdsmix.sources.sniff import has_comma_after_object, sniff_format
from mdsmix.storage import find_store

COMMAS = (
    "commas separate its records, as inside a list: write [ before the first record and ] after "
    "the last, remove a comma after the last, and read it as a list (.json, or source.format: "
    "json): `(echo [; sed '$ s/,[[:space:]]*$//' FILE; echo ]) > NEW.json`"
)
"What to do with a file of JSON objects with commas between them."
NOT_UTF_8 = (
    "it is not UTF-8: save it as UTF-8 (in Excel: CSV UTF-8), or convert it, for example with "
    "iconv -f WINDOWS-1252 -t UTF-8"
)
MAX_WHOLE = 64 << 20
"The most bytes of a file that is parsed as one JSON object."
MAX_SHOWN = 12
"The most fields that a line names."
ENOUGH = 0.5
"The share of the first records that a shape must read to be used."
GOOD_SHARE = 0.9
"""Guesses that read this share of the records or more count as equally good. A recipe allows a
tenth of bad records, and an option is not worth it for a few records.
"""
TRAINED_OR_ASKED = (Document, Pair, Conversation, Prompt)
"What shapes give that may read the parts of a list of messages that was made of them."
OTHER_MESSAGES = frozenset({"bad_message_keys", "unknown_role", "messages_not_a_list"})
"Reason codes of records whose messages a shape does not know."
VERL_ANSWER = "reward_model.ground_truth"
"The path of the verified answer in verl's records."
OPENAI_PREFERENCE = {
    "prompt": "input.messages",
    "chosen": "preferred_output",
    "rejected": "non_preferred_output",
}
"Key of `source:` -> its path in the preferences of OpenAI's fine-tuning."
PREFERENCES_WITH_IMAGES = ("preference_openai", "preference_alpaca", "preference_sharegpt")
"The shapes of preferences whose answers are always messages, so that prompts may have images."
IMAGES_FIRST = ("messages", "openai", "prompt_completion", "sharegpt")
"""The shapes of conversations that are also tried with `images: {unplaced: first}`: TRL and
ms-swift write such records without a placeholder.
"""
CAPTIONS = ("txt", "text", "caption")
"Names of the field with the caption of an image."
BESIDE_CAPTIONS = frozenset({"__key__", "json", "__url__"})
"Fields that records of images with captions may have as well."
TOKEN_COLUMNS = (PLAIN, TURNS, SIDES, PACKED_COLUMNS)
"The columns with token ids of the MDS streams that a recipe can mix, other than preferences."
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")


@frozen(kw_only=True)
class Guess:
    """A guess that records have a certain shape (such as `alpaca`: a way to read records by their
    fields), and what came out when the first records of a file were read in this way.
    """

    head: FirstRecords
    shape: Shape
    fields: Mapping[str, str]
    "Key of the shape -> the records' field for it: {'prompt': 'question', ...}."
    options: Mapping[str, Any] = field(default_factory=dict)
    "Further keys of a recipe that the shape needs, with their values."
    read: int = 0
    "Records that the shape reads."
    reasons: Counter[str] = field(default_factory=Counter)
    "Reason code -> number of records that the shape does not read."
    missing: tuple[str, ...] = ()
    "Keys of the shape for which the records have no field."
    pictures: tuple[str | bytes, ...] = ()
    "The images of the records that the shape reads."
    marked: int = 0
    "Records that mark answers as trained or not."
    with_spans: int = 0
    "Records that mark characters of answers (`train_detail`)."
    parts: Mapping[str, int] = field(default_factory=dict)
    "`reasoning` and `calls` -> records whose answers have that part."
    with_earlier_calls: int = 0
    "Records that call tools in an answer before the last one."
    unasked: int = 0
    "Preferences without a question: only a system message is before their answers."
    stand_ins: tuple[str, ...] = ()
    "Questions without a letter or digit, such as `-`, of the records that the shape reads."

    @property
    def is_right(self) -> bool:
        """Whether the shape reads enough of the records to be used."""
        return self.read > 0 and self.read >= ENOUGH * len(self.head)

    @property
    def unread(self) -> set[str]:
        """Fields of the records that the shape does not read."""
        read = {*self.shape.extras, *(self.shape.image_fields or ())}
        for name in self.fields.values():
            read |= {*parse_field(name).roots}  # `meta` for the path `meta.text`
        return {*self.head.fields} - read

    @property
    def kind(self) -> type[Kind]:
        """The kind of streams whose records have this shape."""
        kinds = [kind for kind in list_kinds() if kind.reads is self.shape.gives]
        has_images = self.shape.image_fields is not None
        fitting = [kind for kind in kinds if kind.has_images == has_images]
        return fitting[0] if fitting else kinds[0]

    def identity(self) -> tuple[Any, ...]:
        """Return the guess's shape, fields and options as a tuple to compare guesses by. Files
        whose guesses have equal tuples are read in the same way, so they can be one stream.
        """
        return (
            self.shape.name,
            repr(sorted(self.fields.items())),
            repr(self.options),
            self.shape.image_fields,
            self.shape.images_first,
        )


def guess_shapes(head: FirstRecords) -> list[Guess]:
    """Return all guesses at the records' shape (such as `alpaca`: a way to read records by their
    fields), the best first: the one that reads the most records, then the most fields.
    """
    guesses = list[Guess]()
    for shape in SHAPES.values():
        guesses += _guess_shape(shape, head)
    guesses += _guess_question(head)
    guesses += _guess_other_answer(head)
    guesses += _guess_openai_preference(head)
    guesses = [guess for guess in guesses if not _is_doubtful(guess)]
    lists = _find_read_lists(guesses)
    guesses = [guess for guess in guesses if not _ignores_a_list(guess, lists)]
    image_fields = _find_image_fields(head)
    for shape in SHAPES.values():
        if shape.gives is Conversation or shape.name in PREFERENCES_WITH_IMAGES:
            for guess in _guess_images(with_images(shape, image_fields), head):
                if guess.pictures:
                    guesses.append(guess)
    guesses += _guess_captions(head, image_fields)
    guesses += _guess_json_member(head, image_fields)
    # After the guesses without `unplaced: first`, since the first of equally good guesses is used.
    for shape in SHAPES.values():
        if shape.name in IMAGES_FIRST:
            for guess in _guess_shape(with_images(shape, image_fields, comes_first=True), head):
                if guess.pictures:
                    guesses.append(guess)
    return sorted(guesses, key=_rank, reverse=True)


def _rank(guess: Guess) -> tuple[Any, ...]:
    """Return a sort key of a guess; the best guess has the largest. A later entry of this tuple
    decides only between guesses whose earlier entries are equal.
    """
    is_right_with_images = guess.is_right and guess.shape.image_fields is not None
    share_read = guess.read / max(1, len(guess.head))
    own_names = [key for key, name in guess.fields.items() if name == key]
    return (
        is_right_with_images,
        min(share_read, GOOD_SHARE),  # a share above GOOD_SHARE counts as GOOD_SHARE
        -len(guess.missing),  # minus, since few missing fields are better, and so below
        -len(guess.unread),
        guess.shape.gives is not Prompt,  # a question and an answer are rather a pair
        bool(guess.shape.structured),  # fields with lists or objects, such as messages
        -len(guess.options),
        len(own_names),
    )


def _guess_shape(shape: Shape, head: FirstRecords) -> Iterator[Guess]:
    """Yield the guesses of one shape: one without options, and one with each set of options (such
    as names of roles) that the shape proposes for these records. If the records lack fields that
    the shape needs, yield only one guess that names the missing keys.
    """
    fields = _find_fields(shape, head)
    if not {*REWARDS}.isdisjoint(fields) and not _has_rewards(fields, head):
        fields = {key: name for key, name in fields.items() if key not in REWARDS}
    missing = tuple(key for key in shape.fields if key not in fields)
    if missing:
        yield Guess(head=head, shape=shape, fields=fields, missing=missing)
        return
    for options in ({}, *shape.guess(_prepare_records(shape, fields, head), fields)):
        yield try_shape(shape, fields, options, head)


def _has_rewards(fields: Mapping[str, str], head: FirstRecords) -> bool:
    """Check whether all records have numbers as rewards of both answers. Some data sets have these
    fields without numbers.

    Args:
        fields: key of the shape -> the records' field for it.
        head: the first records.
    """
    if not {*REWARDS} <= fields.keys():
        return False
    names = [fields[key] for key in REWARDS]
    rewards = [find_value(name, record) for record in head.parse_records(names) for name in names]
    return all(type(reward) in (int, float) for reward in rewards)


CONTEXTS = ("context", "passage", "document", "background", "article")
"Names of the field with the text that a question is about, as in Dolly, SQuAD and RACE."
SYSTEMS = ("system", "system_prompt", "system_message")
"Names of the field with the system message of a question, as in OpenOrca."
HISTORIES = ("history",)
"Names of the field with earlier questions and answers, as ms-swift writes them."


def _guess_question(head: FirstRecords) -> Iterator[Guess]:
    """Yield a guess for records with a question and an answer that also have the text that the
    question is about, a system message or earlier rounds: an Alpaca record, with this text as its
    input.
    """
    pair = _find_fields(SHAPES["prompt_response"], head)
    if not pair.keys() >= {"prompt", "response"}:
        return
    fields = {"instruction": pair["prompt"], "output": pair["response"]}
    for key, usual_names in (("input", CONTEXTS), ("system", SYSTEMS), ("history", HISTORIES)):
        for name in head.fields:
            if name.lower() in usual_names and name not in pair.values():
                fields.setdefault(key, name)
    if len(fields) > len(pair):
        yield try_shape(SHAPES["alpaca"], fields, {}, head)


def _guess_other_answer(head: FirstRecords) -> Iterator[Guess]:
    """Yield a guess for prompts whose verified answer is elsewhere: in verl's records one level
    down, in `reward_model.ground_truth`, and in slime's in the field `label`, a string. (In TRL's
    records a label is true or false.)
    """
    shape = SHAPES["prompt"]
    paths = {*_list_paths(head)}
    for name in ("prompt", "messages"):
        if name in paths and VERL_ANSWER in paths:
            yield try_shape(shape, {"prompt": name, ANSWER: VERL_ANSWER}, {}, head)
            return
    labels = [record.get("label") for record in head.objects]
    if "prompt" in paths and all(isinstance(label, str) for label in labels):
        yield try_shape(shape, {"prompt": "prompt", ANSWER: "label"}, {}, head)


def _guess_openai_preference(head: FirstRecords) -> Iterator[Guess]:
    """Yield a guess for the preferences of OpenAI's fine-tuning: `{"input": {"messages": [...],
    "tools": [...]}, "preferred_output": [...], "non_preferred_output": [...]}`.
    """
    paths = {*_list_paths(head)}
    if paths >= {*OPENAI_PREFERENCE.values()}:
        fields = dict(OPENAI_PREFERENCE)
        if "input.tools" in paths:
            fields["tools"] = "input.tools"
        yield try_shape(SHAPES["preference_openai"], fields, {}, head)


def _find_read_lists(guesses: Sequence[Guess]) -> set[str]:
    """Return the fields with lists of messages that a guess reads as conversations."""
    names = set[str]()
    for guess in guesses:
        if guess.is_right and guess.shape.gives is Conversation:
            for key in guess.shape.fields:
                if key in guess.shape.structured:
                    names.add(guess.fields[key])
    return names


def _ignores_a_list(guess: Guess, lists: Set[str]) -> bool:
    """Check whether a guess reads single texts of records that also have a list of messages. The
    list is what was prepared for training: in OpenR1's records `problem` and `solution` lack the
    reasoning that `messages` has.

    Args:
        lists: the fields with lists of messages (`_find_read_lists`).
    """
    if guess.shape.gives not in TRAINED_OR_ASKED or lists.isdisjoint(guess.unread):
        return False
    names = [name for key, name in guess.fields.items() if key in guess.shape.structured]
    for record in _prepare_records(guess.shape, guess.fields, guess.head):
        if any(isinstance(find_value(name, record), list) for name in names):
            return False
    return True


def _is_doubtful(guess: Guess) -> bool:
    """Check whether the records of a guess may be something else:

    - Records of a shape whose images are in the texts (Qwen-VL) have none in them.
    - A `solution` is the response to a `problem` (NuminaMath) or `question` (s1K). Next to `prompt`
      it is the verified answer, as in TRL's records for GRPO.
    - Preferences without a question: the only message before their answers is the system's, and the
      question has an unusual name. Or the question is taken for the common beginning of two texts
      that are not dialogues, next to a field with other texts.
    - A document is one message of a tree of messages, each in a record of its own.
    - The one record of the file has all its records, each under a name of its own.
    - Prompts alone have no verified answer, and other fields with texts or lists, such as an answer
      under an unusual name.
    """
    if guess.shape.has_images == "inside" and guess.is_right and not guess.pictures:
        return True
    if guess.fields.get("response") == "solution" and guess.fields.get("prompt") == "prompt":
        return True
    if guess.unasked and guess.unasked == guess.read:
        return True
    objects = guess.head.objects
    if guess.shape.gives is Document and any(map(is_message_of_tree, objects)):
        return True
    if len(objects) == 1 and is_keyed_records(objects[0]):
        return True
    is_two_texts = guess.shape.name == "preference" and not guess.missing
    if is_two_texts and "prompt" not in guess.fields and _has_other_question(guess):
        return True
    if guess.shape.gives is not Prompt or ANSWER in guess.fields:
        return False
    for record in guess.head.objects:
        if any(isinstance(record.get(name), (str, list)) for name in guess.unread):
            return True
    return False


def _has_other_question(guess: Guess) -> bool:
    """Check whether records of two answers without a prompt have a text with a space in a field
    that is not read. In dialogues such as hh-rlhf's the answers have the question themselves.
    """
    for record in guess.head.objects:
        texts = [find_value(guess.fields[key], record) for key in ANSWERS]
        if not all(isinstance(text, str) and BEGINS not in text for text in texts):
            continue
        others = [record.get(name) for name in guess.unread]
        if any(isinstance(other, str) and " " in other.strip() for other in others):
            return True
    return False


def _guess_images(shape: Shape, head: FirstRecords) -> Iterator[Guess]:
    """Yield the guesses of a shape with images: conversations with a placeholder for each image, or
    questions with one image each.
    """
    yield from _guess_shape(shape, head)
    pair = _find_fields(SHAPES["prompt_response"], head)
    if {"instruction", "output"} <= {*shape.fields} and pair.keys() >= {"prompt", "response"}:
        # The question as it is, and as a template that puts a placeholder before it, such as
        # "<image>\n{question}".
        for question in (pair["prompt"], f"{PLACEHOLDER}\n{{{pair['prompt']}}}"):
            fields = {"instruction": question, "output": pair["response"]}
            yield try_shape(shape, fields, {}, head)
    if shape.has_images == "inside":  # Qwen-VL: a recipe that names no fields reads its own ones
        yield replace(try_shape(shape, shape.own_fields, {}, head), fields={})


def _guess_json_member(head: FirstRecords, image_fields: Sequence[str]) -> Iterator[Guess]:
    """Yield guesses for archives whose member `json` is itself the list of messages, next to an
    image: `[{"from": "human", "value": "<image>What?"}, ...]`.

    Args:
        head: the first records.
        image_fields: the fields with images; empty if one of them is called `images` or `image`.
    """
    if "json" not in head.fields:
        return
    for shape in (SHAPES["messages"], SHAPES["sharegpt"]):
        fields = {shape.fields[0]: "json"}
        yield try_shape(shape, fields, {}, head)
        guess = try_shape(with_images(shape, image_fields), fields, {}, head)
        if guess.pictures:
            yield guess


def _guess_captions(head: FirstRecords, image_fields: Sequence[str]) -> Iterator[Guess]:
    """Yield a guess for images with captions, such as the members `0001.jpg` and `0001.txt` of an
    archive: the image is the question. The records must contain the images themselves, since a web
    page may have the path of an image next to its text.

    Args:
        head: the first records.
        image_fields: the fields with images; empty if one of them is called `images` or `image`.
    """
    names = image_fields or [name for name in FIELDS if name in head.fields]
    captions = [name for name in CAPTIONS if name in head.fields]
    others = {*head.fields} - {*names, *CAPTIONS, *BESIDE_CAPTIONS}
    for record in head.objects:
        values = [record.get(name) for name in names]
        if not any(isinstance(value, (bytes, dict)) for value in values):
            return
    if names and captions and not others:
        fields = {"instruction": PLACEHOLDER, "output": captions[0]}
        guess = try_shape(with_images(SHAPES["alpaca"], image_fields), fields, {}, head)
        if guess.pictures:
            yield guess


def try_shape(
    shape: Shape, fields: Mapping[str, str], options: Mapping[str, Any], head: FirstRecords
) -> Guess:
    """Read the first records of a file with a shape (a way to read records by their fields). Return
    a Guess with the outcome: how many records were read, and why the others were not.

    Args:
        fields: key of the shape -> the records' field for it.
        options: keys of a recipe that change how the shape reads, such as {"nulls": "drop"}.
        head: the first records.
    """
    records = _prepare_records(shape, fields, head)
    # A result is the record as the shape reads it, or the reason code (str) of a bad record.
    results = [shape.read(record, fields, **options) for record in records]
    reasons = head.bad + Counter(result for result in results if isinstance(result, str))
    pictures = list[str | bytes]()
    for result in results:
        pictures += getattr(result, "images", ())
    marked = [*filter(_marks_answers, results)]
    conversations = [result for result in results if isinstance(result, Conversation)]
    parts = Counter[str]()
    for conversation in conversations:
        parts.update(list_parts(conversation))
    return Guess(
        head=head,
        shape=shape,
        fields=fields,
        options=options,
        read=len(head) - reasons.total(),
        reasons=reasons,
        pictures=tuple(pictures),
        marked=len(marked),
        with_spans=len([result for result in results if getattr(result, "losses", None)]),
        parts=parts,
        with_earlier_calls=len([*filter(has_earlier_call, conversations)]),
        unasked=len([*filter(_is_unasked, results)]),
        stand_ins=tuple(filter(_is_stand_in, map(_read_question, results))),
    )


def _marks_answers(result: Any) -> bool:
    """Check whether a record marks messages as not trained. A greeting before the first question is
    not trained without a mark.
    """
    trained = getattr(result, "trained", None)
    if trained is None:
        return False
    roles = [message["role"] for message in result.messages]
    first_question = roles.index("user") if "user" in roles else 0
    return not all(trained[first_question:])


def _read_question(result: Any) -> str:
    """Return the text of all questions of a pair or a conversation; "" for other results, and if
    the record has images, which may be the question.
    """
    if isinstance(result, Pair):
        return result.prompt
    if not isinstance(result, Conversation) or result.images:
        return ""
    questions = [message for message in result.messages if message["role"] == "user"]
    contents = [message.get("content") for message in questions]
    return "\n".join(content for content in contents if isinstance(content, str))


def _is_stand_in(question: str) -> bool:
    """Check whether a question is not empty, and has no letter or digit."""
    return bool(question.strip()) and not any(map(str.isalnum, question))


def _is_unasked(result: Any) -> bool:
    """Check whether a result is a preference of messages without a question before the answers."""
    if not isinstance(result, Preference) or not isinstance(result.chosen, Conversation):
        return False
    roles = {message["role"] for message in result.chosen.messages}
    return roles <= {*SYSTEM_ROLES, "assistant"}


def _prepare_records(shape: Shape, fields: Mapping[str, str], head: FirstRecords) -> Sequence[Any]:
    """Return the records as a shape (a way to read records by their fields) takes them: the values
    of paths such as `meta.text` are at the top, and JSON in cells is parsed.
    """
    structured = [fields[key] for key in shape.structured if key in fields]
    entered = [root for name in fields.values() for root in parse_field(name).entered]
    records = head.parse_records(
        [*structured, *entered, *shape.extras], shape.find_text_or_messages(fields)
    )
    derive = make_deriver(fields.values())
    return [*map(derive, records)] if derive else records


def _find_fields(shape: Shape, head: FirstRecords) -> dict[str, str]:
    """Return key of a shape -> the path of the records' field for it: `{"text": "meta.text"}`.

    The fields are those at the top of the records. If fields one level down fit more of the keys
    that the shape needs, the result has only fields one level down.
    """
    counts = Counter(_list_paths(head))
    top_counts = {path: number for path, number in counts.items() if "." not in path}
    nested_counts = {path: number for path, number in counts.items() if "." in path}
    top_fields = _match_keys(shape, top_counts)
    nested_fields = _match_keys(shape, nested_counts)
    required = set(shape.fields)
    if len(nested_fields.keys() & required) > len(top_fields.keys() & required):
        return nested_fields
    return top_fields


def _match_keys(shape: Shape, counts: Mapping[str, int]) -> dict[str, str]:
    """Return key of a shape -> its field. If several fields fit a key, the result has the field
    that most records have. If as many records have two of them, the more usual name decides.

    Args:
        counts: path of a field -> how many records have it.
    """
    fields = dict[str, str]()
    for key in shape.own_fields:
        candidates = list[str]()
        for usual_name in usual_names(shape, key):
            candidates += [path for path in counts if _last_name(path) == usual_name]
        if not candidates:
            continue
        best = max(candidates, key=counts.__getitem__)  # the first of the most frequent
        if best not in fields.values():
            fields[key] = best
    return fields


def _last_name(path: str) -> str:
    """Return the last name of a field's path in lower case: `text` for `meta.Text`."""
    return path.rpartition(".")[2].lower()


def _list_paths(head: FirstRecords) -> Iterator[str]:
    """Yield the path of each field of each record, and of fields one level down: `meta`,
    `meta.text`.
    """
    for record in head.parse_records(head.fields):
        if not isinstance(record, dict):
            continue
        for name, value in record.items():
            yield name
            if isinstance(value, dict) and "." not in name:
                yield from (f"{name}.{inner}" for inner in value if "." not in inner)


def usual_names(shape: Shape, key: str) -> tuple[str, ...]:
    """Return the names that fields for this key have in public data, the most usual first: `text`,
    `content`, `document`.
    """
    synonyms = {
        spec.name: spec.metadata.get("also called", ()) for spec in dataclasses.fields(SourceSpec)
    }
    return (key, *shape.also_called.get(key, ()), *synonyms.get(key, ()))


def _find_image_fields(head: FirstRecords) -> list[str]:
    """Return the top-level fields of records that contain images.

    Return an empty list if one of them is called `images` or `image`: fields of these names are
    read anyway, so a recipe need not name them.
    """
    names = list[str]()
    for name in head.fields:
        if any(_is_image(record.get(name)) for record in head.objects):
            names.append(name)
    return [] if set(names) & set(FIELDS) else names


def _is_image(value: Any) -> bool:
    """Check whether the value of a field is an image or a list with one: bytes of an image, a path
    such as `a.jpg`, a `data:image/` URI, or Hugging Face's `{"bytes": ..., "path": ...}`.
    """
    if isinstance(value, list):
        return any(map(_is_image, value))
    if isinstance(value, dict):
        return value.keys() == {"bytes", "path"} and any(value.values())
    if isinstance(value, bytes):
        return value.startswith(MAGIC) or value[4:11] == b"ftypavi"  # AVIF, after four bytes
    if not isinstance(value, str):
        return False
    return value[:11].lower() == "data:image/" or value.lower().endswith(SUFFIXES)


def join_printable(names: Iterator[str] | Sequence[str] | Mapping[str, Any]) -> str:
    """Join the names of fields as a list in a sentence, without escape codes."""
    return join_names(list(map(format_field, names)), MAX_SHOWN)


def describe_unknown(head: FirstRecords, guesses: Sequence[Guess]) -> Iterator[str]:
    """Yield lines on a file of no known shape: its fields, and the reasons why the nearest shapes
    do not fit.
    """
    if format_of(head.file).rule == "format.mds" and any(
        set(columns) <= set(head.fields) for columns in TOKEN_COLUMNS
    ):
        yield (
            f"{head.file.name} is the index of a stream of tokens, which needs no conversion: "
            f"{_name_published(head)}"
        )
        return
    form = find_foreign_form(_read_one_object(head) or head)
    if not head.fields and not form:
        yield _describe_no_objects(head)
        return
    if form:
        yield f"{head.file.name} has the form of {form.name}, which no shape reads; {form.advice}"
        return
    fields = join_printable(head.fields)
    delimiter = _describe_delimiter(head.fields)
    yield f"{head.file.name} has no known shape; its records have the fields {fields}{delimiter}"
    if delimiter:
        return
    for guess in nearest_guesses(guesses):
        if guess.missing:
            names = ["/".join(usual_names(guess.shape, key)) for key in guess.missing]
            why = f"there is no field {' and no '.join(names)}"
        else:
            reasons = join_counts(guess.reasons)
            why = f"reads {guess.read} of {len(head)} records ({reasons})"
        yield f"  {guess.shape.name}: {why}"
    yield from _explain_reasons(nearest_guesses(guesses))
    yield (
        "  If your fields have other names, write the recipe by hand and name them under source "
        f"(docs/data.md of mdsmix), {OR_READ}"
    )


def _name_published(head: FirstRecords) -> str:
    """Return how a recipe names the stream of this index: `{kind: pretraining, local: web, split:
    train}` for web/train/index.json with the column `tokens`.
    """
    # Without a kind, a recipe of such streams alone has the finetuning loader.
    kind = "kind: pretraining, " if "tokens" in head.fields else ""
    key = "remote" if find_store(head.file.location.url) else "local"
    steps = head.file.name.split("/")[:-1]
    # An index in the recipe's own folder has no steps: the recipe's parent contains the split.
    parent = ("/".join(steps[:-1]) or ".") if steps else ".."
    named = f"name it in a recipe as a stream without a source, `{{{kind}{key}: {parent}, split: "
    if steps[-1:] == ["train"]:
        return f"{named}train}}`"
    return (
        f"to train on it, rename its folder to train, and {named}train}}`; a folder of another "
        "name is a split that is only evaluated on"
    )


def _explain_reasons(guesses: Sequence[Guess]) -> Iterator[str]:
    """Yield a line for each reason why these guesses do not read the records: `content_not_text: a
    message's content is ..., here the part: video`. The reasons that only say that messages have
    other keys or roles are left out if there are others, since they come from shapes that write
    messages in another way.
    """
    details = dict[str, Mapping[str, str | int]]()  # reason -> detail of its first record with one
    for guess in guesses:
        for reason in guess.reasons if not guess.missing else ():
            details[str(reason)] = details.get(reason) or detail_of(reason)
    telling = [reason for reason in details if reason not in OTHER_MESSAGES]
    explanations = list_bad_reasons()
    for reason in telling or details:
        detail = ", ".join(f"{key}: {value}" for key, value in details[reason].items())
        example = f", here {make_printable(detail)}" if detail else ""
        yield f"  {reason}: {explanations[reason].rstrip('.')}{example}"


def _describe_no_objects(head: FirstRecords) -> str:
    """Return a message on a file whose records are not objects: what they are, and what to do if
    that is known.
    """
    if not len(head):
        return (
            f"{head.file.name} has no records: only blank lines, an empty list, or the names of "
            "columns"
        )
    if head.objects:
        return f"{head.file.name} has only records without fields"
    contents = join_counts(head.bad) or "other values"
    message = f"{head.file.name} has no record that is an object ({contents})"
    if 2 * head.bad["invalid_utf8"] > len(head):
        return f"{message}; {NOT_UTF_8}"
    if head.bad["not_json"] and has_comma_after_object(read_beginning(head.file)):
        return f"{message}; {COMMAS}"
    format_name = sniff_format(head.file)
    is_json = type(format_of(head.file)) is type(format_by(head.file.name, "json"))
    is_list = is_json and read_beginning(head.file).lstrip().startswith("[")
    if head.records and all(isinstance(record, str) for record in head.records):
        each = ".[] | " if is_list else ""
        return f"{message}, but strings; `jq -c '{each}{{text: .}}'` makes records of them"
    if is_list and not head.bad:
        return f"{message}: each element of its list must be one"
    if format_name == "json":
        return f"{message}, but one list: set source.format: json, or rename it to .json"
    if format_name == "jsonl":
        with head.file.open() as stored:
            is_of_python = stored.read(2) == b"{'"
        writer = "json.dumps, and not Python's print," if is_of_python else "`jq -c .`"
        return (
            f"{message}; its first bytes are those of jsonl, which needs each record on one line, "
            f"as {writer} writes it"
        )
    return f"{message}; its first bytes are those of {format_name}" if format_name else message


def _read_one_object(head: FirstRecords) -> FirstRecords | None:
    """Return the one record of a file that is a JSON object over several lines; None if the file is
    anything else, or has more than MAX_WHOLE bytes.
    """
    if not head.bad["not_json"] or sniff_format(head.file) != "jsonl":
        return None
    with head.file.open() as stored:
        content = stored.read(MAX_WHOLE + 1)
    if len(content) > MAX_WHOLE:
        return None
    try:
        return replace(head, records=[orjson.loads(content)], bad=Counter())
    except orjson.JSONDecodeError:
        return None


def _describe_delimiter(fields: Sequence[str]) -> str:
    """Return what to do if the fields of a table show that its cells end at another character than
    a comma; "" if they do not.
    """
    if any("\t" in name for name in fields):
        return "; its cells end in tabs: set source.format: tsv, or rename it to .tsv"
    return ""


def nearest_guesses(guesses: Sequence[Guess]) -> list[Guess]:
    """Return the best guesses of the three shapes that lack the fewest keys, one of each shape."""
    # The best guess of a shape comes first, so in reverse order it replaces the shape's others.
    best_of_shape = {guess.shape.name: guess for guess in reversed(guesses)}
    best = [best_of_shape[name] for name in SHAPES if name in best_of_shape]
    return sorted(best, key=lambda guess: (len(guess.missing), -guess.read))[:3]
