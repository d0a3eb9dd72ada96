"""The manifest: a stream's identity card, specified in the README beside this file.

It lies beside index.json as `mdsmix.manifest`, without the suffix .json, since Streaming's
merge_index reads every *.json below a folder as an index. It is published before the index and
names the index's hash, so a reader can tell a finished publication from an interrupted one. Its
first line is the hash of all that follows, so a changed key is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

import orjson
import xxhash

from mdsmix import schema
from mdsmix.errors import EarlierFormat, Unreachable
from mdsmix.messages import flatten_error
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import find_metadata
from mdsmix.shards.side_files import NamedFile, SideFile, SourceEntry, SourceList, read_source_list
from mdsmix.storage import Location

MANIFEST = "mdsmix.manifest"
FORMAT_VERSION = 3
"""Raised when the meaning of a key, a work unit's window or a shard's bytes change: streams of
earlier versions are converted again.
"""
_SEAL = re.compile(rb'\{\n  "hash": "([0-9a-f]{32})",(?=\n)')
"The first line of a manifest, with the xxh128 of all bytes behind its comma."


@dataclass(frozen=True, kw_only=True)
class TokenizerCard:
    """Which tokenizer made the ids; two streams mix only where `hash` is equal."""

    name: str
    "The name on a hub; of a folder only the last name, since a path means nothing elsewhere."
    hash: str
    """Hash of the snapshot: tokenizer.json as AutoTokenizer would use it, special tokens and
    template.
    """
    vocab_size: int
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    chat_template_hash: str | None = None
    tool_template_hash: str | None = None
    "Hash of the template named `tool_use`, by which conversations with tools are rendered."

    @property
    def folder_name(self) -> str:
        """Name of the folder with its files at the root of the mix. Other ids or another chat
        template make another name.
        """
        shaping = f"{self.hash} {self.templates}"
        return f"tokenizer-{xxhash.xxh128_hexdigest(shaping)[:8]}"

    @property
    def templates(self) -> str:
        """The hashes of its chat templates, as one string."""
        more = "" if self.tool_template_hash is None else f" {self.tool_template_hash}"
        return f"{self.chat_template_hash}{more}"

    @classmethod
    def of(cls, tokenizer: Any) -> TokenizerCard:
        """The card of an opened tokenizer (`mdsmix.tokenizer.card.Tokenizer`)."""
        card = cls(**{each.name: getattr(tokenizer, each.name) for each in fields(cls)})
        name = card.name.rstrip("/")
        return replace(card, name=name.rpartition("/")[2]) if name.startswith("/") else card


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The settings by which records became samples. Where two streams of a mix disagree in a
    setting, `check` says so.
    """

    kind: str
    "The recipe's word, for example pretraining or finetuning."
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
    "Role (text, prompt, response, messages ...) -> name of the field that it was read from."
    shape: str | None = None
    "The form of a record, for example sharegpt, where the fields do not tell."
    shape_options: dict[str, Any] = field(default_factory=dict)
    "Settings of the shape that are not at their defaults."
    where: str | None = None
    "The condition under which a record is taken."
    id: str | None = None
    "The field that names a record."
    compact: bool = False
    "Conversations flattened into input_ids and labels: trains right under none/last only."
    date_string: str | None = None
    rewritten_history: Literal["reject", "last", "each"] = "reject"
    too_long: Literal["cut", "filter", "first_turns"] = "cut"
    sample: str | None = None
    "The share of its source that the stream is made of, as a fraction: `1/20`."
    pack: bool = False
    "Whether rows hold several documents; which tokens are trained is then settled in the row."
    holdout: str | None = None
    "The share of the records that is held out for evaluation, as a fraction: `1/200`."
    held_out: bool = False
    "Whether the stream is the held-out share; else it is the rest."
    duplicates: Literal["keep", "drop"] = "keep"
    "Whether records equal to an earlier record of the stream are kept."
    template: dict[str, Any] = field(default_factory=dict)
    "Variables that the chat template was given beside the tokenizer's own."
    stop_ids: list[int] = field(default_factory=list)
    """The ids at which the model stops to generate: if the next role's token is trained as the end
    of an answer, or if the recipe names them.
    """
    compression: str | None = None
    rules: dict[str, int] = field(default_factory=dict)
    """Name -> version, of the rules that shaped the rows and whose version is above 1: of the kind,
    the shape and the template (`mdsmix.kinds.rules`)."""
    images: dict[str, Any] = field(default_factory=dict)
    """Only for a stream of images. `token` and `id`: the placeholder of an image in the turns.
    `processor`: the hash of the processor by whose counts rows fit. Others: the recipe's settings
    that are not at their defaults (`field` as a list); never where images lay.
    """

    @property
    def stated(self) -> dict[str, Any]:
        """The settings that are not at their defaults, as they stand in a manifest and shape a
        unit's key.
        """
        return _stated(self)

    @property
    def image_ids(self) -> tuple[int, ...]:
        """The ids that stand for an image: one, or none in a stream of text."""
        return (self.images["id"],) if self.images else ()


def name_processor_folder(digest: str, tokenizer: TokenizerCard) -> str:
    """Name of a processor's folder at the root of the mix. Another processor or another tokenizer
    makes another name.
    """
    shaping = f"{digest} {tokenizer.hash} {tokenizer.templates}"
    return f"processor-{xxhash.xxh128_hexdigest(shaping)[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShards:
    """The shards of one work unit, in the index's order."""

    key: str
    shards: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class MixedStream:
    """One of the streams that `mdsmix mix` drew this one from."""

    name: str
    "The stream's name in the recipe."
    index_hash: str
    "Hash of its index, which tells its version."
    samples: int
    "Samples in the stream."
    drawn: int
    "Samples drawn from it; one that was drawn twice counts twice."
    tokens: int | None
    """Tokens of the drawn samples, without tokens that the loader cuts off; None where the columns
    hold no token ids.
    """
    weight: dict[str, int | float] = field(default_factory=dict)
    "The weight in the recipe; empty where every sample is drawn once."


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of mdsmix.manifest."""

    format_version: int
    tool_version: str
    encoding: Encoding
    tokenizer: TokenizerCard
    backend: str
    "The library that encoded, with its version, for example `fastokens 0.3.5`."
    totals: Totals
    records: Records
    sources: list[SourceEntry]
    "All sources; empty where `source_parts` lists them."
    parts: list[UnitShards]
    index_hash: str
    "xxh128 of index.json's bytes, 32 hex digits."
    complete: Literal[True]
    mixed: list[MixedStream] = field(default_factory=list)
    """The streams that `mdsmix mix` drew this one from; such a stream has neither records nor
    sources.
    """
    seed: int | None = None
    "Seed of that draw."
    source_parts: list[SourceList] = field(default_factory=list)
    "Files that hold the names of a long list, in the order of the names."
    side_files: list[SideFile] = field(default_factory=list)
    source: dict[str, Any] = field(default_factory=dict)
    """The keys of the recipe that say which files were read, and how: `source.path`, from the
    recipe's folder, and `source.format`, `source.header` and `source.split_by` if they are set.
    `sample` is budget if the share of a budget decided the sample.
    """
    formats: dict[str, int] = field(default_factory=dict)
    "Name -> version, of the rules that read its sources and whose version is above 1."

    @property
    def rules(self) -> dict[str, int]:
        """All rules above version 1 by which the stream was made."""
        return self.encoding.rules | self.formats

    @property
    def processor_folder(self) -> str | None:
        """Name of the folder of its processor at the root of the mix; None where its rows were made
        without a processor.
        """
        digest = self.encoding.images.get("processor")
        return name_processor_folder(digest, self.tokenizer) if digest else None

    @property
    def source_count(self) -> int:
        return len(self.sources) + sum(part.files for part in self.source_parts)

    @property
    def named_files(self) -> list[NamedFile]:
        """The files beside the manifest that it names, shards excepted."""
        return [*self.source_parts, *self.side_files]

    def read_sources(self, folder: Location) -> Iterator[SourceEntry]:
        """All sources, one part at a time in memory. `folder`: where the manifest was read. Damaged
        where a part is missing or damaged.
        """
        yield from self.sources
        for part in self.source_parts:
            yield from read_source_list(folder, part)

    def to_bytes(self) -> bytes:
        # orjson alone leaves the keys of dataclasses unsorted; `asdict` copies everything and takes
        # ten times as long.
        tree = orjson.dumps(self, _stated, orjson.OPT_PASSTHROUGH_DATACLASS | _SORTED)
        return b'{\n  "hash": "%s",%s' % (xxhash.xxh128_hexdigest(tree[1:]).encode(), tree[1:])


_SORTED = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Return the manifest that these bytes contain.

    Raises Unreachable if it is damaged or of a newer format, EarlierFormat if of an earlier one.
    """
    try:
        tree = orjson.loads(content)
        version = tree.get("format_version") if isinstance(tree, dict) else None
        if version in range(1, FORMAT_VERSION):
            raise EarlierFormat(
                f"{where} was written by an earlier commit of mdsmix (format version {version}, and this one reads "
                f"{FORMAT_VERSION}): run mdsmix convert, or mdsmix mix, on its recipe, which makes the stream anew."
            )
        if version != FORMAT_VERSION:
            raise Unreachable(
                f"{where} cannot be read as a manifest: its format_version is {version!r}, and this mdsmix reads {FORMAT_VERSION}; "
                "convert the stream again with this version, or use the version that wrote it."
            )
        seal = _SEAL.match(content)
        tree.pop("hash", None)
        if not seal or seal[1].decode() != xxhash.xxh128_hexdigest(content[seal.end() :]):
            raise schema.Misfit(
                "it was changed since it was written: its hash is not that of its bytes"
            )
        return schema.parse_mapping(Manifest, tree)
    except (orjson.JSONDecodeError, RecursionError, schema.Misfit) as error:
        raise Unreachable(
            f"{where} cannot be read as a manifest: {flatten_error(error)}; "
            "mdsmix convert RECIPE --reencode publishes the stream anew."
        ) from None


def read_manifest(folder: Location) -> Manifest | None:
    """The manifest of the stream in `folder`, None where it was published without one."""
    at = folder / MANIFEST
    content = find_metadata(at)
    return None if content is None else parse_manifest(content, str(at))


def _stated(section: Any) -> dict[str, Any]:
    """The fields that are not at their defaults. So a new key with a default changes no existing
    manifest.
    """
    defaults = _defaults(section.__class__)
    return {name: value for name, of in defaults if (value := getattr(section, name)) != of}


@cache
def _defaults(cls: Any) -> list[tuple[str, Any]]:
    return [
        (f.name, f.default if f.default_factory is MISSING else f.default_factory())
        for f in fields(cls)
    ]
