"""The manifest: what a stream was made from and how. Its format is specified in this folder's
README.

It is stored next to index.json as `mdsmix.manifest`, without the suffix .json, since Streaming's
merge_index reads every *.json below a folder as an index. It is published before the index and
contains the index's hash, so that a reader can distinguish a finished publication from an
interrupted one. Its first key is the hash of everything after it, so that a changed key is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field, fields, replace
from functools import cache
from typing import Any, Literal

import orjson
import xxhash

from mdsmix import schema
from mdsmix.errors import EarlierFormat, Unreachable
from mdsmix.frozen import frozen
from mdsmix.messages import flatten_error
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import find_metadata
from mdsmix.shards.side_files import NamedFile, SideFile, SourceEntry, SourceList, read_source_list
from mdsmix.storage import Location

MANIFEST = "mdsmix.manifest"
FORMAT_VERSION = 3
"""The version of the manifest. It is increased when the meaning of a key changes, when a source is
divided among work units in another way, or when the bytes of shards change. Streams of earlier
versions are then converted again.
"""
_SEAL = re.compile(rb'\{\n  "hash": "([0-9a-f]{32})",(?=\n)')
"The beginning of a manifest: the xxh128 of all bytes after the comma at its end."


@frozen(kw_only=True)
class TokenizerCard:
    """What a manifest stores of the tokenizer that made the token ids: name, hash and special ids,
    not its files. Two streams can be mixed only if `hash` is equal.
    """

    name: str
    """The name on a hub. For a local folder only the last part of its path, since the path means
    nothing on other machines.
    """
    hash: str
    """Hash of all that decides the ids of a text: the settings in tokenizer.json as AutoTokenizer
    uses them, and the ids of BOS, EOS and padding.
    """
    vocab_size: int
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    chat_template_hash: str | None = None
    tool_template_hash: str | None = None
    "Hash of the template named `tool_use`, which renders conversations with tools."

    @property
    def folder_name(self) -> str:
        """Name of the folder with the tokenizer's files at the root of the mix, for example
        `tokenizer-0f3a9c21`. Tokenizers that differ in ids or chat templates have different names.
        """
        identity = f"{self.hash} {self.templates}"
        return f"tokenizer-{xxhash.xxh128_hexdigest(identity)[:8]}"

    @property
    def templates(self) -> str:
        """The hashes of the tokenizer's chat templates, as one string."""
        if self.tool_template_hash is None:
            return str(self.chat_template_hash)
        return f"{self.chat_template_hash} {self.tool_template_hash}"

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> TokenizerCard:
        """Return what a manifest stores of an opened tokenizer, a
        `mdsmix.tokenizer.card.Tokenizer`.

        Args:
            tokenizer: the opened tokenizer.
        """
        card = cls(**{field_.name: getattr(tokenizer, field_.name) for field_ in fields(cls)})
        name = card.name.rstrip("/")
        if name.startswith("/"):  # of a folder on this machine, only the last part is stored
            return replace(card, name=name.rpartition("/")[2])
        return card


@frozen(kw_only=True)
class Encoding:
    """The settings of a conversion that decide how records become samples. `check` reports if two
    streams of a mix differ in a setting.
    """

    kind: str
    "The kind as the recipe writes it, for example pretraining or finetuning."
    loader: str
    columns: dict[str, str]
    "Column name -> MDS encoding."
    max_seq_len: int
    decoder_only_format: bool
    target_prompts: str
    target_responses: str
    special_tokens_in_text: str
    layout: Literal["concat", "document"] | None = None
    "None for finetuning."
    add_bos: bool | None = None
    add_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    fields: dict[str, str] = field(default_factory=dict)
    "Role (text, prompt, response, messages ...) -> name of the source's field that has this role."
    shape: str | None = None
    "The shape of a record, for example sharegpt, if it does not follow from the fields."
    shape_options: dict[str, Any] = field(default_factory=dict)
    "Settings of the shape that are not at their defaults."
    where: str | None = None
    "The condition of the recipe; records for which it is false are left out."
    id: str | None = None
    "The field that names a record."
    compact: bool = False
    """Whether conversations are flattened into input_ids and labels. Such rows are trained
    correctly only with target_prompts: none and target_responses: last.
    """
    date_string: str | None = None
    rewritten_history: Literal["reject", "last", "each"] = "reject"
    too_long: Literal["cut", "filter", "first_turns", "last_turns"] = "cut"
    sample: str | None = None
    "The share of the source's records that the stream is made from, as a fraction: `1/20`."
    pack: bool = False
    "Whether rows contain several documents; the row then decides which tokens are trained."
    holdout: str | None = None
    "The share of the records that is kept for evaluation, as a fraction: `1/200`."
    held_out: bool = False
    "True: the stream is the held-out share; False: it is the other records."
    duplicates: Literal["keep", "drop"] = "keep"
    "Whether records equal to an earlier record of the stream are kept."
    template: dict[str, Any] = field(default_factory=dict)
    "Variables that the chat template was given in addition to the tokenizer's own."
    stop_ids: list[int] = field(default_factory=list)
    """The ids at which the model stops generating. They are written only if the next role's token
    is trained as the end of an answer, or if the recipe lists stop tokens.
    """
    compression: str | None = None
    max_gen_len: int | None = None
    """Only for prompts: the tokens of max_seq_len that the longest prompt leaves for the answer of
    the model.
    """
    rules: dict[str, int] = field(default_factory=dict)
    """Name -> version of the rules that made the rows, if the version is above 1: rules of the
    kind, the shape and the template (`mdsmix.kinds.rules`).
    """
    train_parts: dict[str, bool | float] = field(default_factory=dict)
    """Part of an answer -> whether it is trained, or its loss weight: `reasoning`, `calls` and
    `answer`. Empty if all parts are trained.
    """
    images: dict[str, Any] = field(default_factory=dict)
    """Only for a stream of images. `token` and `id`: the placeholder of an image in the turns.
    `processor`: the hash of the processor whose token counts decided which rows fit. Other keys:
    the recipe's settings that are not at their defaults (`field` as a list). Image paths are never
    stored.
    """

    @property
    def non_defaults(self) -> dict[str, Any]:
        """The settings that are not at their defaults: name -> value. Only these are written in a
        manifest and hashed into the keys of work units, so a new setting with a default changes
        neither.
        """
        return _list_non_default_fields(self)

    @property
    def image_ids(self) -> tuple[int, ...]:
        """The ids that are placeholders of an image: one, or none in a stream of text."""
        return (self.images["id"],) if self.images else ()


def name_processor_folder(digest: str, tokenizer: TokenizerCard) -> str:
    """Return the name of a processor's folder at the root of the mix, for example
    `processor-0f3a9c21`. Another processor or another tokenizer gives another name.

    Args:
        digest: the hash of the processor.
        tokenizer: the tokenizer of the mix.
    """
    identity = f"{digest} {tokenizer.hash} {tokenizer.templates}"
    return f"processor-{xxhash.xxh128_hexdigest(identity)[:8]}"


@frozen(kw_only=True, slots=True)
class UnitShards:
    """What a manifest stores of one work unit (a part of the source): its key, and how many shards
    and samples it has. The manifest lists the units in the order of their shards in the index.
    """

    key: str
    "A hash of all that decides the unit's bytes; a unit with the same key is not converted again."
    shards: int
    "How many shards the unit has."
    samples: int
    "How many samples these shards have."


@frozen(kw_only=True)
class MixedStream:
    """What a manifest of `mdsmix mix` stores of one of its input streams: from which stream how
    many samples were taken.
    """

    name: str
    "The stream's name in the recipe."
    index_hash: str
    "Hash of the stream's index, which identifies the version that was drawn from."
    samples: int
    "Samples in the stream."
    drawn: int
    "Samples drawn from the stream; a sample that was drawn twice counts twice."
    tokens: int | None
    """Tokens of the drawn samples, without tokens that the loader truncates; None if the columns
    contain no token ids.
    """
    weight: dict[str, int | float] = field(default_factory=dict)
    "The weight in the recipe; empty if every sample is drawn once."


@frozen(kw_only=True)
class Manifest:
    """The content of mdsmix.manifest."""

    format_version: int
    tool_version: str
    encoding: Encoding
    tokenizer: TokenizerCard
    backend: str
    "The library that encoded, with its version, for example `fastokens 0.3.5`."
    totals: Totals
    records: Records
    sources: list[SourceEntry]
    "All sources; empty if `source_parts` lists them."
    parts: list[UnitShards]
    "The entries of the work units that made the stream."
    index_hash: str
    "xxh128 of index.json's bytes, 32 hex digits."
    complete: Literal[True]
    mixed: list[MixedStream] = field(default_factory=list)
    """The streams whose samples `mdsmix mix` drew for this stream; empty for a stream of `convert`.
    A stream of `mix` has no records and no sources.
    """
    seed: int | None = None
    "The seed with which `mdsmix mix` drew the samples."
    source_parts: list[SourceList] = field(default_factory=list)
    "Files with the names of a long list of sources, in the order of the names."
    side_files: list[SideFile] = field(default_factory=list)
    source: dict[str, Any] = field(default_factory=dict)
    """The keys of the recipe that decided which files were read, and how: `source.path`, relative
    to the recipe's folder, and `source.format`, `source.header` and `source.split_by` if they are
    set. `sample: budget` is added if a budget decided the size of the sample.
    """
    formats: dict[str, int] = field(default_factory=dict)
    "Name -> version of the rules that read the sources, if the version is above 1."

    @property
    def rules(self) -> dict[str, int]:
        """The rules that mdsmix followed when it read and encoded the records: name -> version.
        Rules in version 1 are left out.
        """
        return self.encoding.rules | self.formats

    @property
    def processor_folder(self) -> str | None:
        """Name of the processor's folder at the root of the mix; None if the stream was made
        without a processor.
        """
        digest = self.encoding.images.get("processor")
        return name_processor_folder(digest, self.tokenizer) if digest else None

    @property
    def source_count(self) -> int:
        return len(self.sources) + sum(source_list.files for source_list in self.source_parts)

    @property
    def named_files(self) -> list[NamedFile]:
        """The files that the manifest names: lists of sources, and side files of shards."""
        return [*self.source_parts, *self.side_files]

    def read_sources(self, folder: Location) -> Iterator[SourceEntry]:
        """Yield all sources. If a long list is in several files, one file at a time is in memory.

        Raises Damaged if a file of the list is missing or damaged.

        Args:
            folder: the folder of the manifest.
        """
        yield from self.sources
        for source_list in self.source_parts:
            yield from read_source_list(folder, source_list)

    def to_bytes(self) -> bytes:
        """Return the file's content: JSON with the key `hash` in front, which is the hash of the
        bytes after it.
        """
        # orjson alone leaves the keys of dataclasses unsorted; `asdict` copies everything and takes
        # ten times as long.
        tree = orjson.dumps(
            self, _list_non_default_fields, orjson.OPT_PASSTHROUGH_DATACLASS | _SORTED
        )
        # Put the hash after the opening brace, which is the first byte.
        return b'{\n  "hash": "%s",%s' % (xxhash.xxh128_hexdigest(tree[1:]).encode(), tree[1:])


_SORTED = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse the bytes of a manifest.

    Raises EarlierFormat if an earlier version of the format wrote them.
    Raises Unreachable if they are damaged or have a newer format.

    Args:
        content: the bytes of the file.
        where: the file's URL, for messages.
    """
    try:
        tree = orjson.loads(content)
        version = tree.get("format_version") if isinstance(tree, dict) else None
        if version in range(1, FORMAT_VERSION):
            raise EarlierFormat(
                f"{where} was written by an earlier commit of mdsmix (format version {version}; "
                f"this mdsmix reads format version {FORMAT_VERSION}). To make the stream again, "
                "run mdsmix convert, or mdsmix mix for a mix, with the recipe of the stream."
            )
        if version != FORMAT_VERSION:
            raise Unreachable(
                f"{where} cannot be read as a manifest: its format_version is {version!r}, and "
                f"this mdsmix reads {FORMAT_VERSION}; convert the stream again with this version, "
                "or use the version that wrote it."
            )
        seal = _SEAL.match(content)
        tree.pop("hash", None)
        if not seal or seal[1].decode() != xxhash.xxh128_hexdigest(content[seal.end() :]):
            raise schema.Misfit(
                "the manifest's key `hash` is not the hash of its other bytes, so the manifest was "
                "changed after mdsmix wrote it"
            )
        return schema.parse_mapping(Manifest, tree)
    except (orjson.JSONDecodeError, RecursionError, schema.Misfit) as error:
        raise Unreachable(
            f"{where} cannot be read as a manifest: {flatten_error(error)}; "
            "run mdsmix convert RECIPE --reencode, which publishes the stream again."
        ) from None


def read_manifest(folder: Location) -> Manifest | None:
    """Return the manifest in `folder`, or None if the stream was published without a manifest.

    Raises EarlierFormat or Unreachable for the reasons of `parse_manifest`.
    """
    file = folder / MANIFEST
    content = find_metadata(file)
    return None if content is None else parse_manifest(content, str(file))


def _list_non_default_fields(section: Any) -> dict[str, Any]:
    """Return name -> value of a dataclass's fields that differ from their defaults. Only these are
    written, so that a new field with a default leaves the bytes of existing manifests unchanged.
    """
    values = {}
    for name, default in _list_defaults(section.__class__):
        value = getattr(section, name)
        if value != default:
            values[name] = value
    return values


@cache
def _list_defaults(cls: Any) -> list[tuple[str, Any]]:
    """List the name and default of each field of a dataclass; the default is `MISSING` if the field
    has none.
    """
    return [(field_.name, schema.get_default(field_)) for field_ in fields(cls)]
