"""The sections of a recipe's stream, in the order that a user writes them, and the declaration
of a key.

The string under a field is its sentence in docs/recipe.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, field, fields
from functools import cache
from typing import Any, Literal

from mdsmix.frozen import frozen
from mdsmix.recipe.amounts import ABOVE_WHOLE, NOTHING, WHOLE, match_share, read_share

FIELDS = (
    *("text", "prompt", "response", "completion", "messages", "tools", "conversations"),
    *("conversation", "texts"),
    *("instruction", "input", "output", "history", "system"),
    *("chosen", "rejected", "chosen_reward", "rejected_reward", "label", "verified_answer"),
)
"The keys of a source that name fields of a record."


def must_be(words: str, test: Callable[[Any], object], **keywords: Any) -> dict[str, Any]:
    """Return dataclass metadata that restricts the values of a recipe's key:
    `key(2, must=must_be("at least 1", lambda value: value >= 1, minimum=1))`.

    Args:
        words: the allowed values, for the message: `key must be WORDS`.
        test: value -> whether it is allowed.
        keywords: the same bound in JSON Schema: `minimum=1`.
    """
    return {"must": (words, test), "json schema": keywords}


def key(
    default: Any = MISSING,
    *synonyms: str,
    only_for: str = "",
    must: Mapping[str, Any] | None = None,
    example: str = "",
) -> Any:
    """Declare a key of a section.

    Args:
        default: the default value; MISSING: the key is required.
        synonyms: names of the key in other tools, for the hint on an unknown key.
        only_for: the only group of streams that the key applies to: a group of `Kind.key_groups`,
            SOURCED or UNSOURCED.
        must: the test that a value must pass, from `must_be`.
        example: a value of a required key, for the message if the key is missing.
    """
    metadata: dict[str, Any] = dict(must or {})
    if example:
        metadata["example"] = example
    if synonyms:
        metadata["also called"] = synonyms
    if only_for:
        metadata["only of"] = only_for
    return field(default=default, metadata=metadata)


SET_BY_READER = {"set by": "the reader"}
BY_BUDGET = "budget"
SOURCED = "streams with a source"
UNSOURCED = "streams without a source"
ONE_OR_MORE = must_be("at least 1", lambda value: value >= 1, minimum=1)
NOT_NEGATIVE = must_be("0 or more", lambda value: value >= 0, minimum=0)
POSITIVE = must_be("a number above 0", lambda value: 0 < value < math.inf, exclusiveMinimum=0)


@frozen(kw_only=True)
class SourceSpec:
    """The section `source:` of a stream: the files of its raw records, how they are read, and the
    names of the fields in them.
    """

    path: list[str] = key(
        MISSING, "paths", "file", "files", "glob", "url", "data", example="data.jsonl"
    )
    """File, glob (`*`, `**`, `?`), folder of `save_to_disk` or of a stream, `s3://`, `gs://`
    or `azure://` URL, `hf://datasets/org/name/...`, `hf://buckets/org/name/...`, or a list of
    these ([formats](data.md)). Each file is read once, also if several of these name it.
    """
    text: str | None = key(None, "content", "document", "body")
    "Pretraining: the field with the document."
    prompt: str | None = key(None, "question", "query")
    """Finetuning: the field with a pair's prompt; preference: the prompt, unless the answers begin
    with it; prompt: a text or messages, which the model answers.
    """
    response: str | None = key(None, "answer", "target")
    "Finetuning: the field with a pair's response."
    completion: str | None = None
    """Finetuning: TRL's field with the messages that follow the messages of `prompt`. Name a field
    with a text by `response` instead. Preference: the answer of an unpaired preference.
    """
    messages: str | None = key(None, "chat", "turns")
    "Finetuning: the field with a list of `{role, content}`."
    tools: str | None = key(None, "functions", "tool_defs")
    """With `messages`, `conversations` or `chosen`: the field with the tools, as OpenAI or ShareGPT
    write them.
    """
    conversations: str | None = None
    "Finetuning: ShareGPT's field with a list of `{from, value}`."
    conversation: str | None = None
    "Finetuning: the field with a list of `{human, assistant}`."
    texts: str | None = None
    "Finetuning: FineVision's field with a list of `{user, assistant}`."
    instruction: str | None = None
    "Finetuning: the field with the instruction of an Alpaca record."
    input: str | None = None
    "Alpaca: the field with the input, if records have one."
    output: str | None = None
    "Alpaca: the field with the answer."
    history: str | None = None
    "Alpaca: the field with earlier questions and answers, if records have one."
    system: str | None = key(None, "system_prompt", "system_message")
    "The field with the system message of a conversation, if records have one."
    chosen: str | None = None
    "Preference: the field with the better answer, a text, a message or messages."
    rejected: str | None = None
    "Preference: the field with the worse answer."
    chosen_reward: str | None = None
    """Preference: the field with the reward of the better answer, a number. Rewards are stored if
    both fields are named.
    """
    rejected_reward: str | None = None
    "Preference: the field with the reward of the worse answer."
    label: str | None = None
    """Preference: the field that says whether a `completion` is desirable, true or false, 1 or 0
    ([unpaired preferences](preferences.md#unpaired-preferences)).
    """
    verified_answer: str | None = key(None, "ground_truth", "solution")
    """Prompt: the field with the answer that is known to be right, a text or a number, such as
    `reward_model.ground_truth`.
    """
    shape: str | None = key(None, "preprocessor", "function")
    """How a record is written, if the fields do not tell: a [shape](../mdsmix/shapes/README.md), or
    a [function](data.md#a-function-of-ones-own) that reads it, `my_shapes.py:read` or
    `package.module:read`.
    """
    gives: (
        Literal["document", "pair", "conversation", "preference", "unpaired_preference", "prompt"]
        | None
    ) = None
    """The result of the function in `shape`: `document` for pretraining, `pair` or `conversation`
    for finetuning, `preference` or `unpaired_preference`, or `prompt`. Without it: a document, a
    pair, a preference or a prompt, following `kind`.
    """
    joined_by: str = "\n"
    """Alpaca: the text between instruction and input. LLaMA-Factory and ms-swift write a line
    break, LLaMA-Factory's engine `v1` nothing (`""`).
    """
    format: str | None = key(None, "type", "file_type")
    """The format of the files, if their suffix does not tell it: `jsonl`, `json`, `parquet`,
    `arrow`, `csv`, `tsv`, `text`, `tar` or `mds`.
    """
    header: list[str] | None = key(None, "columns", "names")
    "csv and tsv: the fields, if the first row does not name them."
    split_by: Literal["file", "line", "paragraph"] | None = None
    "Plain text: the piece that is a document, `file`, `line` or `paragraph`."
    tags: Mapping[str, str] = field(default_factory=dict)
    """ShareGPT: other keys and roles, in the words of LLaMA-Factory's dataset_info.json:
    `role_tag`, `content_tag`, `user_tag`, `assistant_tag`, `observation_tag`, `function_tag`,
    `system_tag`.
    """
    nulls: Literal["keep", "drop"] = "keep"
    """Messages: `drop` removes null entries from messages and tools. Arrow and datasets
    write them if objects have different keys.
    """
    train_mark: str | None = key(None, "message_field_training", "mask_field")
    """Conversations: a further key of messages that marks by 0 and 1, or false and true, whether a
    message is trained, as `train` and others do; or a field of the record with a list of such marks
    ([marks](conversations.md#tools-and-messages-that-are-not-trained)).
    """
    where: str | None = key(None, "filter", "condition", "if")
    "A [condition](#fields) on a record's fields. A record that does not match is filtered."
    id: str | None = key(None, "key", "uid", "_id")
    """The field, or path, that names a record by a text or a whole number. The quarantine shows the
    name, and so does `mdsmix inspect` for rows of one record.
    """

    @property
    def fields(self) -> dict[str, str]:
        """The record's fields that the recipe names, by their key: {"prompt": "question", ...}."""
        names = {key: getattr(self, key) for key in FIELDS}
        return {key: name for key, name in names.items() if name}


@frozen(kw_only=True)
class ResizeSpec:
    """The size above which a conversion makes images smaller."""

    longest: int = key(must=ONE_OR_MORE)
    "Pixels of the longer side."


@frozen(kw_only=True)
class ReencodeSpec:
    """How a conversion encodes all images again: the format and its quality."""

    format: Literal["jpeg", "png", "webp"] = "jpeg"
    quality: int = key(
        90, must=must_be("from 1 to 100", range(1, 101).__contains__, minimum=1, maximum=100)
    )


@frozen(kw_only=True)
class ImagesSpec:
    """The images of a stream's records: where they are, and how they are stored."""

    field: str | list[str] | None = key(None, "fields")
    """The field of a record that contains a path, an image or a list of them, or a list of such
    fields (`[jpg, png]` of an archive). Without it: `images`, otherwise `image`.
    """
    root: str | None = key(None, "folder", "dir", "media_dir", "base")
    """The folder or URL of a bucket that paths in the records begin at. Without it: the folder of
    the records' file.
    """
    token: str | None = key(None, "placeholder")
    "The token in a text in place of an image. Without it: the tokenizer's `image_token`."
    decode: Literal["full", "header"] = "full"
    "`full`: every image is decoded; `header`: only its header and its end are checked."
    max_pixels: int = key(178_956_970, must=ONE_OR_MORE)
    "An image of more pixels is bad. The default is Pillow's own limit against decompression bombs."
    max_images: int | None = key(None, must=ONE_OR_MORE)
    "A record with more images is bad."
    resize: ResizeSpec | None = None
    "`{longest: 1344}`: larger images are made smaller, and are no longer the original bytes."
    reencode: ReencodeSpec | None = None
    "`{format: jpeg, quality: 90}` (`jpeg`, `png`, `webp`): all images are encoded again."
    unplaced: Literal["refuse", "first"] = "refuse"
    """What becomes of a record with images none of whose texts has a placeholder for one. `refuse`:
    it is bad; `first`: its images come before its first question, as in TRL and ms-swift.
    """
    http: Literal["refuse", "fetch"] = "refuse"
    """`refuse`: a record with an image at an http(s) URL is bad; `fetch`: it is fetched when
    converting.
    """
    outside: Literal["allow", "refuse"] = "allow"
    """`refuse`: a path that leads out of `root`, by `/`, `..`, a scheme or a symbolic link, makes
    the record bad.
    """


LEAST_WEIGHT, GREATEST_WEIGHT = 1e-6, 1e6
"The limits of a loss weight that is not 0. Weights are stored as float32."
WEIGHT = must_be(
    "true, false, or a loss weight from 0.000001 to 1,000,000",
    lambda value: value == 0 or LEAST_WEIGHT <= value <= GREATEST_WEIGHT,
    minimum=0,
    maximum=GREATEST_WEIGHT,
)


@frozen(kw_only=True)
class TrainPartsSpec:
    """The parts of an assistant's message that the model is trained on: true or false, or with
    `loss_weights: true` a loss weight such as 0.2.
    """

    reasoning: bool | int | float = key(
        True, "reasoning_content", "thinking", "think", "thought", must=WEIGHT
    )
    "Text in tags such as `<think>`, or under a key such as `reasoning_content`."
    calls: bool | int | float = key(True, "tool_calls", "tools", "tool_call", must=WEIGHT)
    "Calls of tools."
    answer: bool | int | float = key(True, "content", "text", "response", must=WEIGHT)
    "Everything else, the content of the message."


SHAPES_WITH_IMAGES = frozenset({"llava", "qwen_vl"})
"""Shapes whose records always have images (`Shape.has_images`). A recipe does not know the shapes;
tests/test_recipe.py keeps both equal.
"""


@frozen(kw_only=True)
class StreamSpec:
    """One stream: converted from `source`, or, without one, mixed as it was published."""

    name: str = field(default="", metadata=SET_BY_READER)
    kind: str | None = None
    """`pretraining`, `finetuning`, [`preference`](preferences.md#preferences), or
    [`prompt`](preferences.md#prompts).
    """
    source: SourceSpec | None = None
    "The raw records; without a source the stream is mixed as it was published."
    layout: Literal["concat", "document"] = key("concat", only_for="pretraining")
    """`concat` joins documents and cuts full rows; `document` gives each document a row of its own,
    and splits a longer one.
    """
    add_bos: bool = key(False, only_for="pretraining")
    "Start every document with BOS if the tokenizer itself does not."
    add_eos: bool = key(True, only_for="pretraining")
    "End every document with EOS if the tokenizer itself does not."
    min_tokens: int = key(0, only_for="pretraining", must=NOT_NEGATIVE)
    "Documents of fewer tokens, BOS and EOS included, are filtered."
    max_tokens: int | None = key(None, only_for="pretraining")
    "Documents of more tokens are filtered."
    date_string: str | None = key(None, only_for="messages")
    """The day that some chat templates print. Without it: today, and a published stream keeps its
    day.
    """
    columns: Literal["turns", "compact"] = key("turns", only_for="messages without images")
    """`compact` writes two columns at 2 to 4 bytes a token; only with `target_prompts: none` and
    `target_responses: last`.
    """
    rewritten_history: Literal["reject", "last", "each"] = key("reject", only_for="messages")
    """Some chat templates change earlier turns once later ones exist (e.g. drop reasoning).
    `reject` quarantines such a conversation, `last` keeps a row for the last answer, `each` makes a
    row per answer.
    """
    train_parts: TrainPartsSpec | None = key(None, only_for="messages")
    """Which parts of an answer are trained, a section of keys
    ([parts](conversations.md#which-parts-of-an-answer-are-trained)). The recipe's `target_prompts`
    must be `none`.
    """
    loss_weights: bool = key(False, "weighted", only_for="messages without images")
    """Marks of messages may be [loss weights](conversations.md#loss-weights) such as 0.5, and rows
    have them in a column that only `mdsmix.load` and `train_loader.name: mdsmix` read.
    """
    too_long: Literal["cut", "filter", "first_turns", "last_turns"] = key(
        "cut", only_for="finetuning"
    )
    """A record of more than `max_seq_len` tokens, EOS included, is cut by the loader (`cut`), or is
    left out (`filter`). A conversation ends after the last answer that fits (`first_turns`), or
    [keeps](conversations.md#longer-than-max_seq_len) its system message and the last turns that fit
    (`last_turns`).
    """
    pack: bool = key(False, "packing", "packed", only_for=SOURCED)
    """Documents (`layout: document`), pairs or conversations are joined when converting into rows
    of `max_seq_len` that record where each begins; only `mdsmix.load` and `train_loader.name:
    mdsmix` read them ([packing](one-loader.md#packing-when-converting)).
    """
    consecutive_roles: Literal["reject", "merge"] = key("reject", only_for="records with messages")
    """Messages of one role in a row make the record bad (`reject`), or are joined by an empty line
    (`merge`).
    """
    sample: str | int | float | None = key(
        None,
        "fraction",
        "subsample",
        "sample_rate",
        "ratio",
        only_for=SOURCED,
        must=must_be(
            "a share above 0 of at most 1, such as 5% or 0.05, or budget, which takes as much as "
            "the recipe's budget needs",
            lambda value: value == BY_BUDGET or 0 < read_share(value) <= 1,
            exclusiveMinimum=0,
            maximum=1,
            pattern=match_share(BY_BUDGET),
            **{"not": {"type": "string", "pattern": f"{NOTHING}|{ABOVE_WHOLE}"}},
        ),
    )
    """The share of the records, `5%` or `0.05`, that the stream is made of. A hash of a record's
    content decides, so a larger share only adds records. `budget`: as many records as the stream's
    share of the [budget](mixing.md#a-budget-that-decides-how-much-is-converted) needs.
    """
    expected_mean_tokens: int | float | None = key(
        None, "num_tokens_avg", "mean_tokens", "tokens_avg", must=POSITIVE
    )
    """The mean number of tokens of a record that you expect; a difference of more than 5 % is
    reported.
    """
    holdout: str | int | float | None = key(
        None,
        only_for=SOURCED,
        must=must_be(
            "a share between 0 and 1, such as 0.5% or 0.005",
            lambda value: 0 < read_share(value) < 1,
            exclusiveMinimum=0,
            exclusiveMaximum=1,
            pattern=match_share(),
            **{"not": {"type": "string", "pattern": f"{NOTHING}|{WHOLE}|{ABOVE_WHOLE}"}},
        ),
    )
    """The share of the records, `0.5%` or `0.005`, that is held out: published as `<name>/eval`,
    rendered as the `eval_loader` entry `<name>-eval`. A hash decides as for `sample`. The source is
    read twice.
    """
    held_out_of: str | None = field(default=None, metadata=SET_BY_READER)
    "For a held-out stream: the name of the stream that its records are taken from."
    duplicates: Literal["keep", "drop"] = key(
        "keep", "dedup", "deduplicate", "duplicate", only_for=SOURCED
    )
    """Exact duplicates of an earlier record of the stream are trained and counted (`keep`), or only
    [the first stays](publishing.md#duplicates) (`drop`).
    """
    images: ImagesSpec | None = key(None, only_for="messages with images")
    """The [images](images.md) of messages, a section of keys. `{}` takes all defaults, and so do
    the shapes `llava` and `qwen_vl` without it.
    """
    split: str = "train"
    "Any other than `train` is rendered as an `eval_loader` entry."
    remote: str | None = key(None, only_for=UNSOURCED)
    "Where the stream was published, by mdsmix or by anyone."
    local: str | None = key(None, only_for=UNSOURCED)
    "The stream's folder, or with a remote the training node's cache of the stream."

    @property
    def has_images(self) -> bool:
        """Whether records have images: the stream sets `images`, or its shape always has images."""
        if self.images is not None:
            return True
        return self.source is not None and self.source.shape in SHAPES_WITH_IMAGES


def find_foreign_keys(stream: StreamSpec, groups: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each key that the stream sets although the key does not apply to it. A
    key may be for one group of streams only (`key(only_for=...)`), such as streams with a source.

    Args:
        stream: a stream of a recipe.
        groups: the groups that the stream belongs to.
    """
    for key in dataclasses.fields(stream):
        group = key.metadata.get("only of")
        is_set = getattr(stream, key.name) != key.default
        if group and group not in groups and is_set:
            yield (
                f"{key.name} is only for {group}, so it would change nothing here: remove "
                f"{key.name} from this stream."
            )


@cache
def list_usual_names() -> frozenset[str]:
    """Return the usual names of fields in records: the keys of a source that name fields, and their
    names in other tools, such as `prompt` and `question`.
    """
    names = set(FIELDS)
    for spec in fields(SourceSpec):
        if spec.name in FIELDS:
            names.update(spec.metadata.get("also called", ()))
    return frozenset(names)
