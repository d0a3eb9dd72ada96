"""One stream to convert, as every worker sees it: plain data, picklable, the same whoever works on
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import orjson
import xxhash

from mdsmix import sources
from mdsmix.encode.answer_ends import is_ended_by_next
from mdsmix.encode.backends import find_known_difference
from mdsmix.kinds import Kind, ResolvedStream
from mdsmix.kinds.encodings import resolve_stream
from mdsmix.kinds.pictured import LINE_BYTES
from mdsmix.kinds.read_records import open_record_reader
from mdsmix.kinds.recipe_changes import SAMPLE
from mdsmix.processor.card import Processor, open_processor
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.shapes.functions import Function, registered_function
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, Manifest
from mdsmix.shards.published import list_versions, locate_version
from mdsmix.shards.shard_files import ShardLayout
from mdsmix.sources import ReadAs, SourceFile, Unit
from mdsmix.sources.find import source_keys
from mdsmix.storage import Location, locate
from mdsmix.tokenizer.card import Tokenizer

HEAD_BYTES = 1 << 16
"Bytes at the beginning of a file that tell how many of its records have images: 30 to 200 records."
Dropped = Mapping[int, bytes]
"""Number of a window -> a bit for each of its records, the lowest of a byte first: 1 where the
record is a duplicate and dropped.
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings that all work units of a stream share."""

    name: str
    stream: ResolvedStream
    "Its settings, its shape and its kind."
    tokenizer: Tokenizer
    backend: str
    "`auto`, or the name of a tokenizer backend."
    target: str
    "Where the stream is published."
    max_bad: Fraction
    "The share of bad records above which nothing is published; no published byte depends on it."
    images: str
    """The URL at which paths of images begin; blank: at the folder of the records' file. Keys
    depend on the images, not on this.
    """
    processor: Processor | None
    "The processor of a stream of images, if the recipe names one; its hash is in the encoding."
    function: Function | None
    """The user's function that reads its records, where its shape is one: every worker can import
    it.
    """
    limit: int | None
    "Only so many first records are read: a first look."
    unequal: str = ""
    """The fast backend that this machine has found to differ from the reference; a worker on
    another machine has not.
    """
    is_eval: bool
    "Whether the stream is for evaluation: its split is not `train`."
    is_versioned: bool
    "Whether it is published as versions beside the target, not in it."
    versions: tuple[str, ...] = ()
    "Published versions, the current one first: their shards are reused."
    source: Mapping[str, Any] = field(default_factory=dict)
    "As a manifest has it."
    formats: Mapping[str, int] = field(default_factory=dict)
    """Name -> version, of the rules above version 1 that read its sources. Each is in the digests
    of the files that it reads.
    """

    @property
    def folder(self) -> Location:
        return locate(self.target)

    @property
    def root(self) -> Location:
        """The folder of all streams of the recipe and of their tokenizer: the root of the mix."""
        return self.folder.parent.parent

    @property
    def images_root(self) -> Location | None:
        """Where the paths of images begin; None: at the folder of the records' file."""
        return locate(self.images) if self.images else None

    @property
    def shard_folders(self) -> list[Location]:
        """Where shards that can be reused may lie, the target first."""
        return [self.folder, *map(locate, self.versions)]

    def place(self, index_hash: str) -> Location:
        """The folder that the index with this hash is, or will be, published in."""
        return locate_version(self.folder, index_hash) if self.is_versioned else self.folder

    @property
    def rules(self) -> dict[str, int]:
        """All rules above version 1 that shape the stream: name -> version."""
        return {**self.encoding.rules, **self.formats}

    @property
    def layout(self) -> ShardLayout:
        return ShardLayout(self.encoding.columns, self.encoding.compression)

    @property
    def encoding(self) -> Encoding:
        return self.stream.encoding

    @property
    def kind(self) -> Kind:
        return self.stream.kind

    def with_settings(self, **changes: Any) -> Job:
        """Return the job with other values of its encoding, which change neither the shape nor the
        kind of its records.
        """
        return replace(self, stream=self.stream.with_settings(**changes))

    def units_of(self, files: Sequence[SourceFile]) -> list[Unit]:
        """The work units of these files."""
        return sources.plan_units(
            [*files],
            window_bytes=self.kind.window_bytes,
            fields=self.stream.fields_read,
            parsed=self.stream.fields_parsed,
            line_window=self._line_window if self.kind.has_images else None,
            blobs=self.stream.image_fields,
        )

    def _line_window(self, file: SourceFile) -> int:
        """Bytes of a work unit in a file of lines: the more, the fewer records at its beginning
        have images; 16 MiB, as of chats, at most.
        """
        if file.stat.size <= LINE_BYTES:
            return LINE_BYTES
        reader = open_record_reader(self.stream, b"", None)
        unit = Unit(
            files=(file,),
            end=HEAD_BYTES,
            fields=self.stream.fields_read,
            parsed=self.stream.fields_parsed,
        )
        begin = sources.read_beginnings([unit], HEAD_BYTES)
        found = [record for each in begin for record in reader.read(each.records)]
        pictured = [record for record in found if getattr(record, "images", None)]
        return LINE_BYTES * min(16, max(1, len(found)) // max(1, len(pictured)))

    def image_folders(self, unit: Unit) -> dict[str, Location]:
        """File of the unit -> the folder at which paths of images in it begin; empty where the
        recipe names a root, or there are none.
        """
        if not self.kind.has_images or self.images:
            return {}
        return {file.name: file.location.parent for file in unit.files}

    @property
    def drops(self) -> bool:
        """Whether records equal to an earlier record of the stream are dropped. A first look only
        counts them.
        """
        return self.encoding.duplicates == "drop" and not self.limit

    @property
    def may_have_tools(self) -> bool:
        """Whether records of the stream may have tools: a field of them is read, or a function
        gives them.
        """
        return "tools" in self.encoding.fields or self.function is not None

    @property
    def names_rows(self) -> bool:
        """Whether the names of records are kept for rows: the source has an `id`, and no row joins
        parts of records (concat).
        """
        return self.encoding.id is not None and not self.kind.joins_units

    @cached_property
    def settings_hash(self) -> str:
        """Hash of every setting and version that shapes a unit's bytes. Mix weights and the backend
        are not in it, nor is `duplicates`: the records dropped from a unit are in its own key.
        Cached, since thousands of keys ask for it.
        """
        of = self.tokenizer
        template: list[object] | None = None
        if self.kind.has_template:
            template = [of.chat_template, of.template_variables]
            if of.tool_template is not None and self.may_have_tools:
                template.append(of.tool_template)
        encoding = replace(self.encoding, duplicates="keep")
        if not is_ended_by_next(encoding):  # then they shape no row
            encoding = replace(encoding, stop_ids=[])
        shaping = [FORMAT_VERSION, encoding.non_defaults, of.hash, template, self.limit]
        return xxhash.xxh128_hexdigest(orjson.dumps(shaping, option=orjson.OPT_SORT_KEYS))

    def key(self, content: str) -> str:
        """The key of a work unit: its content and everything that shapes its bytes, hashed to 32
        hex digits.
        """
        return xxhash.xxh128_hexdigest(f"{self.settings_hash} {content}")

    def trusts(self, made_by: str) -> bool:
        """Whether units that a backend encoded are kept: the reference's always, a fast one's
        unless the job asks for the reference or that backend has since differed from it on any
        stream.
        """
        if made_by.startswith("tokenizers "):
            return True
        is_known_to_differ = made_by == self.unequal or find_known_difference(
            self.tokenizer, made_by
        )
        return self.backend != "reference" and not is_known_to_differ


def make_job(recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer, limit: int | None) -> Job:
    """The job of a stream with a source; RecipeError where it wants a token that the tokenizer does
    not have.
    """
    resolved = resolve_stream(recipe, stream, tokenizer)
    processor = None
    if recipe.processor and resolved.kind.has_images:
        processor = open_processor(recipe.processor)
    assert stream.source is not None
    source = source_keys(stream.source.path, recipe.folder, ReadAs.of(stream.source))
    if stream.sample == BY_BUDGET:
        source[SAMPLE] = BY_BUDGET
    return Job(
        name=stream.name,
        stream=resolved,
        function=registered_function(resolved.encoding.shape),
        processor=processor,
        tokenizer=tokenizer,
        backend=recipe.tokenizer.backend,
        target=f"{recipe.published(stream)}/{f'limit-{limit}' if limit else stream.split}",
        max_bad=recipe.max_bad_share,
        images=(stream.images and stream.images.root) or "",
        limit=limit,
        is_eval=stream.split != "train",
        source=source,
        is_versioned=recipe.publish == "versioned" and not limit,
    )


def with_versions(job: Job, published: Manifest | None) -> Job:
    """The job with the versions that lie beside its target; one that is published in place now may
    have some too.
    """
    current = locate_version(job.folder, published.index_hash) if published else None
    found = sorted(list_versions(job.folder), key=lambda version: version != current)
    return replace(job, versions=tuple(version.url for version in found))


def with_date(job: Job, published: str | None) -> Job:
    """The job with the day that its chat template prints, where it prints one and the recipe names
    none.

    LLM-Foundry prints today's. Here a published stream keeps the day it has, or every morning would
    rebuild it.
    """
    template = job.kind.template(job.tokenizer)
    if template is None or job.encoding.date_string:
        return job
    from mdsmix.encode.chat import format_today

    day = (published or format_today()) if template.prints_date else None
    return job.with_settings(date_string=day)
