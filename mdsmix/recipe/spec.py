"""The recipe's words: one frozen dataclass for each section of the file, in the order in which a user writes them.

Nothing here reads a file or judges a combination; `read` and `rules` beside this file do.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from mdsmix.recipe.amounts import A_BUDGET, A_SHARE, read_budget, read_share

FIELDS = (
    *("text", "prompt", "response", "messages", "tools", "conversations", "conversation"),
    *("instruction", "input", "output", "history", "system"),
    *("chosen", "rejected", "chosen_reward", "rejected_reward"),
)
"The keys of a source that name fields of a record."


def must_be(words: str, holds: Callable[[Any], object]) -> dict[str, Any]:
    """Metadata of a key: what its value must be, whatever stands beside it."""
    return {"must": (words, holds)}


def key(
    default: Any = MISSING,
    *synonyms: str,
    of: str = "",
    must: Mapping[str, Any] | None = None,
) -> Any:
    """A key of a section.

    Args:
        default: without one the key must be given.
        synonyms: words that others use for it, for the hint on an unknown key.
        of: the streams to which it means something, in the words of a Kind's `called`.
        must: what its value must be.
    """
    said = {"also called": synonyms, "only of": of, **(must or {})}
    return field(default=default, metadata={name: value for name, value in said.items() if value})


SET_BY_READER = {"set by": "the reader"}
BY_BUDGET = "budget"
SOURCED, UNSOURCED = "streams with a source", "streams without a source"
COMPRESSION = re.compile(r"zstd(:([1-9]|1\d|2[0-2]))?")
ONE_OR_MORE = must_be("1 at least", lambda value: value >= 1)
NOT_NEGATIVE = must_be("0 or more", lambda value: value >= 0)
POSITIVE = must_be("a number above 0", lambda value: 0 < value < math.inf)


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Which tokenizer, as LLM-Foundry names it."""

    name: str
    "A folder, a lone tokenizer.json or a hub name."
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    "Keyword arguments of AutoTokenizer.from_pretrained."
    template: Mapping[str, Any] = field(default_factory=dict)
    "Variables of the chat template, such as enable_thinking."
    backend: Literal["auto", "reference", "fastokens"] = "auto"
    "What encodes: `auto` takes the fast one where it is proved equal to the reference."


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Where raw records are, and which of their fields to read: those of a shape (mdsmix.shapes)."""

    path: list[str] = key(MISSING, "paths", "file", "files", "glob", "url", "data")
    "Files, globs or s3:// URLs; a recipe may write one without the list."
    text: str | None = key(None, "content", "document", "body")
    prompt: str | None = key(None, "question", "query")
    response: str | None = key(None, "completion", "answer", "target")
    messages: str | None = key(None, "chat", "turns")
    tools: str | None = key(None, "functions")
    conversations: str | None = None
    conversation: str | None = None
    instruction: str | None = None
    input: str | None = None
    output: str | None = None
    history: str | None = None
    system: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    chosen_reward: str | None = None
    rejected_reward: str | None = None
    shape: str | None = key(None, "preprocessor", "function")
    "How a record is written, where the fields do not tell; or a function that reads it: my_shapes.py:read, package.module:read."
    gives: Literal["document", "pair", "conversation"] | None = None
    "What that function gives; nothing: documents of pretraining, else pairs."
    joined_by: str = "\n"
    "Alpaca: what stands between instruction and input."
    format: str | None = key(None, "type", "file_type")
    "What the files are, where their names do not tell: jsonl, parquet, csv, ..."
    header: list[str] | None = key(None, "columns", "names")
    "The fields of csv and tsv files whose first line does not name them."
    split_by: Literal["file", "line", "paragraph"] | None = None
    "Of text files: what is a document."
    tags: Mapping[str, str] = field(default_factory=dict)
    "ShareGPT: other names of keys and roles, in the words of LLaMA-Factory's dataset_info.json."
    nulls: Literal["keep", "drop"] = "keep"
    "ShareGPT, OpenAI and messages: whether null entries in messages and tools stay, which Arrow adds where objects differ."
    where: str | None = key(None, "filter", "condition", "if")
    "A condition on its fields: a record that does not match is left out, and counted."
    id: str | None = key(None, "key", "uid", "_id")
    "The field that names a record, for the quarantine."

    @property
    def fields(self) -> dict[str, str]:
        """The record's fields by what they hold, as far as the recipe names them: {"prompt": "question", ...}."""
        return {key: field for key in FIELDS if (field := getattr(self, key))}


@dataclass(frozen=True, kw_only=True)
class ResizeSpec:
    """Larger images are made smaller."""

    longest: int = key(must=ONE_OR_MORE)
    "Pixels of the longer side."


@dataclass(frozen=True, kw_only=True)
class ReencodeSpec:
    """Images are written anew."""

    format: Literal["jpeg", "png", "webp"] = "jpeg"
    quality: int = key(90, must=must_be("from 1 to 100", range(1, 101).__contains__))


@dataclass(frozen=True, kw_only=True)
class ImagesSpec:
    """The images of a stream's records: where they are, and what becomes of them."""

    field: str | list[str] | None = key(None, "fields")
    "The field, or fields, of a record that hold them; `images` or `image` where it is not named."
    root: str | None = key(None, "folder", "dir", "media_dir", "base")
    "The folder or s3:// URL that paths in the records begin at; without it, the folder of the records' file."
    token: str | None = key(None, "placeholder")
    "What the tokenizer knows an image by; without it, what the tokenizer declares as its image_token."
    decode: Literal["full", "header"] = "full"
    "Whether every image is decoded, or its header and its end looked at alone."
    max_pixels: int = key(178_956_970, must=ONE_OR_MORE)
    "An image of more is bad: Pillow's own limit against decompression bombs."
    max_images: int | None = key(None, must=ONE_OR_MORE)
    "A record with more is bad."
    resize: ResizeSpec | None = None
    reencode: ReencodeSpec | None = None
    http: Literal["refuse", "fetch"] = "refuse"
    "What becomes of a record whose image is at an http(s) URL."
    outside: Literal["allow", "refuse"] = "allow"
    "What becomes of a record whose image does not lie below the folder that paths begin at."


SEEING = frozenset({"llava", "qwen_vl"})
"Shapes of records with images (`Shape.has_images`)."


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """One stream: converted from `source`, or, without one, mixed as it was published."""

    name: str = field(default="", metadata=SET_BY_READER)
    kind: str | None = None
    "pretraining, finetuning, or the word of another kind (mdsmix.kinds)."
    source: SourceSpec | None = None
    layout: Literal["concat", "document"] = key("concat", of="pretraining")
    add_bos: bool = key(False, of="pretraining")
    "Start every document with BOS where the tokenizer itself does not."
    add_eos: bool = key(True, of="pretraining")
    "End every document with EOS where the tokenizer itself does not."
    min_tokens: int = key(0, of="pretraining", must=NOT_NEGATIVE)
    "Documents of fewer tokens (specials included) are filtered."
    max_tokens: int | None = key(None, of="pretraining")
    "Documents of more tokens are filtered."
    date_string: str | None = key(None, of="messages")
    "The date that chat templates print; without it, today's, as LLM-Foundry passes it."
    columns: Literal["turns", "compact"] = key("turns", of="messages without images")
    "`Compact` writes the two columns of prompt/response (last/none only)."
    rewritten_history: Literal["reject", "last", "each"] = key("reject", of="messages")
    "What becomes of a conversation whose earlier turns the chat template prints otherwise later."
    too_long: Literal["cut", "filter", "first_turns"] = key("cut", of="finetuning")
    "What becomes of a record of more than max_seq_len tokens."
    pack: bool = key(False, "packing", "packed", of=SOURCED)
    "Whether documents, pairs or conversations are joined into rows of max_seq_len when converting, each row with where its samples begin."
    consecutive_roles: Literal["reject", "merge"] = key("reject", of="messages")
    "What becomes of messages of one role in a row."
    sample: str | int | float | None = key(
        None,
        "fraction",
        "subsample",
        "sample_rate",
        "ratio",
        of=SOURCED,
        must=must_be(
            "a share above 0 of at most 1, such as 5% or 0.05, or budget, which takes what the recipe's budget wants",
            lambda value: value == BY_BUDGET or 0 < read_share(value) <= 1,
        ),
    )
    "The share of the records, 5% or 0.05, that the stream is made of; `budget`: as many as its share of the budget wants."
    expected_mean_tokens: int | float | None = key(
        None, "num_tokens_avg", "mean_tokens", "tokens_avg", must=POSITIVE
    )
    "What others found that a record holds on average: only held against what is found here."
    holdout: str | int | float | None = key(
        None,
        of=SOURCED,
        must=must_be(
            "a share between 0 and 1, such as 0.5% or 0.005",
            lambda value: 0 < read_share(value) < 1,
        ),
    )
    "The share of the records, 0.5% or 0.005, that is held out for evaluation: published as the split eval."
    held_out_of: str | None = field(default=None, metadata=SET_BY_READER)
    "Of what is held out: the stream that it was taken from."
    duplicates: Literal["keep", "drop"] = key(
        "keep", "dedup", "deduplicate", "duplicate", of=SOURCED
    )
    "What becomes of records that say the same as an earlier one of the stream: kept and counted, or dropped."
    images: ImagesSpec | None = key(None, of="messages with images")
    "Their images."
    split: str = "train"
    remote: str | None = key(None, of=UNSOURCED)
    "Where the stream was published."
    local: str | None = key(None, of=UNSOURCED)
    "Its folder, or with a remote the training node's cache of it."

    @property
    def has_images(self) -> bool:
        return self.images is not None or (self.source is not None and self.source.shape in SEEING)


def foreign_keys(stream: StreamSpec, called: Collection[str]) -> Iterator[str]:
    """Sentences on keys that mean nothing to a stream that is called so."""
    for key in dataclasses.fields(stream):
        whom = key.metadata.get("only of")
        if whom and whom not in called and getattr(stream, key.name) != key.default:
            yield f"{key.name} is for {whom}; take it out, it would change nothing."


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """How much of an epoch a stream is: in the words of Streaming's Stream, or its share. At most one of the four."""

    repeat: int | float | None = key(None, must=NOT_NEGATIVE)
    proportion: int | float | None = key(None, must=NOT_NEGATIVE)
    choose: int | None = key(None, must=NOT_NEGATIVE)
    share: str | int | float | None = key(
        None, must=must_be(A_SHARE, lambda value: read_share(value) >= 0)
    )
    "Of the epoch's tokens, or of what `count` says: 0.3, 30% or 1/3."

    @property
    def given(self) -> dict[str, str | int | float]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The whole run. Paths are absolute, or URLs."""

    folder: Path = field(default=Path(), metadata=SET_BY_READER)
    "Where the recipe lies."
    tokenizer: TokenizerSpec
    max_seq_len: int = key(
        must=must_be(
            "from 2, since one token gives no loss, to 2^31 - 1", range(2, 2**31).__contains__
        )
    )
    streams: Mapping[str, StreamSpec]
    processor: str | None = None
    "The folder or hub name of the processor of the model that sees: how many tokens images become, and what the loader makes of them."
    decoder_only_format: bool = True
    target_prompts: str = "none"
    target_responses: Literal["last", "all"] = "last"
    special_tokens_in_text: Literal["escape", "allow", "reject"] = "escape"
    compression: str | None = key(
        None, must=must_be("zstd or zstd:N with N from 1 to 22", COMPRESSION.fullmatch)
    )
    max_bad: str | int | float = key(
        "10%", must=must_be("a share such as 0.001 or 0.1%", lambda value: read_share(value) <= 1)
    )
    "The share of quarantined records, 0.001 or 0.1%, above which nothing is published."
    publish: Literal["replace", "versioned"] = "replace"
    "In place, or as versions beside one another, which never change."
    remote: str | None = None
    local: str | None = None
    shared: bool = False
    "Whether local paths are the same folders on every node of a cluster, as a mount is."
    mdsmix_on_nodes: bool = False
    "Whether training nodes have mdsmix installed, which then fetches the tokenizer; under `train_loader.name: mdsmix` they have."
    mix: Mapping[str, WeightSpec] = field(default_factory=dict)
    budget: str | int | float | None = key(
        None, must=must_be(A_BUDGET, lambda value: read_budget(value) is not None)
    )
    "What an epoch holds: 2B tokens, 500M loss_tokens, 1M samples or 2 passes of STREAM."
    count: Literal["tokens", "loss_tokens", "samples"] | None = None
    "What shares are shares of; None: the budget's unit, else tokens."
    max_repeat: int | float = key(4, must=POSITIVE)
    "Passes over a stream in an epoch above which a share is refused."
    temperature: int | float = key(1, must=POSITIVE)
    "Streams without a share are drawn as their size to the power of 1 / temperature."
    absolute: bool = False
    "Shares are of the whole budget and need not sum to 1; else they are normalised."
    train_loader: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loader(self) -> str:
        """The one dial, `text`, `finetuning` or `mdsmix`: it decides the columns of every stream. Only the last reads packed rows, and
        images."""
        own = any(s.pack or s.has_images for s in self.streams.values())
        if "name" not in self.train_loader and own:
            return "mdsmix"
        kinds = {s.kind for s in self.streams.values() if s.kind}
        plain = kinds == {"pretraining"}
        return str(self.train_loader.get("name", "text" if plain else "finetuning"))

    @property
    def has_plain_rows(self) -> bool:
        """Whether pretraining rows are written as plain tokens, which the finetuning loader does not read."""
        return self.loader in ("text", "mdsmix")

    @property
    def max_bad_share(self) -> Fraction:
        """Exact: 29 of 100 records are not more than 29%, which as a float they are."""
        return read_share(self.max_bad)

    @property
    def sourced(self) -> list[StreamSpec]:
        """The streams that `convert` makes."""
        return [s for s in self.streams.values() if s.source]

    @property
    def trained(self) -> list[StreamSpec]:
        """The streams that are mixed; those of another split are evaluated on."""
        return [s for s in self.streams.values() if s.split == "train"]

    @property
    def is_by_share(self) -> bool:
        """Whether shares decide how often streams are drawn, not weights that Streaming knows."""
        has_shares = any(weight.share is not None for weight in self.mix.values())
        return has_shares or self.budget is not None or self.temperature != 1

    def published(self, stream: StreamSpec) -> str:
        """The URL or folder under which the stream's split folders lie."""
        if stream.source is None:
            return str(stream.remote or stream.local)
        return f"{self.remote or self.local}/{stream.held_out_of or stream.name}"
