"""A mix as LLM-Foundry will see it: loaders, the streams of each loader, and the facts known of
every stream.

A mix from a recipe, from a training YAML or from bare folders has this one shape, so that a check
is written once. A stream's index and manifest are read at once, its stored files and first samples
only when a check asks.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from mdsmix.encode.labels import Targets
from mdsmix.encode.published_folders import PublishedTokenizer
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.foundry_yaml.training_yaml import LoaderSection, Settings, StreamSection, TrainingYaml
from mdsmix.kinds import kind_of
from mdsmix.mix.epoch.apportion import Apportioned
from mdsmix.recipe import Recipe, StreamSpec, TokenizerSpec
from mdsmix.shards.manifest import Encoding, TokenizerCard
from mdsmix.shards.published import Stream
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.verification import Report
from mdsmix.sources import ReadAs, SourceFile, find
from mdsmix.sources.find import filled
from mdsmix.storage import Location, locate, together
from mdsmix.words import listed

if TYPE_CHECKING:
    from mdsmix.encode.pretrained import Tokenizer

PRETRAINED = ("hf_causal_lm", "hf_t5")
"Models of LLM-Foundry that load pretrained weights unless `pretrained: false` is set."


def published_tokenizers(streams: Iterable[StreamInMix]) -> list[PublishedTokenizer]:
    """Return the tokenizers of those streams that have a manifest."""
    return [
        PublishedTokenizer(manifest.tokenizer, stream.folder.parent.parent)
        for stream in streams
        if (manifest := stream.trusted_manifest)
    ]


def pretrained_model_name(yaml: TrainingYaml) -> str | None:
    """The folder or hub name of the weights that training begins with; None where it begins with
    none.
    """
    name = yaml.at("model", "pretrained_model_name_or_path")
    is_pretrained = yaml.at("model", "pretrained")
    if is_pretrained is None:
        is_pretrained = yaml.at("model", "name") in PRETRAINED
    return str(name) if name and is_pretrained else None


def count_remapped_ids(model: str, run: str) -> int:
    """The number of ids that stand for different tokens in the tokenizer.json files `model` and
    `run`.

    Tokens added to the model's vocabulary are left out, since whoever trains a model names these.
    """
    from tokenizers import Tokenizer

    own, name_of = Tokenizer.from_file(model), Tokenizer.from_file(run).id_to_token
    added = own.get_added_tokens_decoder()
    vocabulary = own.get_vocab(with_added_tokens=False).items()
    return sum(name_of(id) != token for token, id in vocabulary if id not in added)


LONGEST = 1 << 30
"More tokens than any sample has: stands for a max_seq_len that is not set, or too large for numpy."


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first samples of a stream's first shard that has any, or why there are none."""

    samples: tuple[Sample, ...] = ()
    damage: str | None = None


@dataclass(frozen=True, kw_only=True)
class StreamInMix(StreamSection, Stream):
    """One published stream and its section in the loader. Its folder is the remote, or the local
    folder where it has no remote.
    """

    survey: str | None = None
    """How far the source of an unpublished stream was read to estimate its index and manifest; None
    where it is published.
    """

    @classmethod
    def of(
        cls, found: Stream, name: str, settings: Settings, survey: str | None = None
    ) -> StreamInMix:
        return cls(
            name=name,
            settings=settings,
            folder=found.folder,
            index=found.index,
            manifest=found.manifest,
            survey=survey,
        )

    @property
    def encoding(self) -> Encoding | None:
        """How the stream was converted; None where no manifest says so."""
        return self.trusted_manifest.encoding if self.trusted_manifest else None

    @property
    def has_targets(self) -> bool | None:
        """Whether target policies decide which of its tokens are trained; None where no manifest
        says so.
        """
        return kind_of(self.encoding).has_targets if self.encoding else None

    @cached_property
    def head(self) -> Head:
        from mdsmix.shards.shard_samples import read_head

        first = self.first_filled
        if self.survey or first is None or not self.holds(first):
            return Head()
        try:
            return Head(samples=tuple(read_head(self.folder, first)))
        except Unreachable as error:
            if " is damaged: " not in str(error):
                raise
            return Head(damage=str(error))


@dataclass(frozen=True, kw_only=True)
class Loader(LoaderSection):
    """`train_loader` or one entry of `eval_loader`, and the streams that it reads."""

    streams: tuple[StreamInMix, ...]

    def require_opened(self) -> None:
        """Raise Unreachable if some of its streams are at places that mdsmix cannot open."""
        if self.unopened:
            places = listed([f"{stream.name} ({stream.place})" for stream in self.unopened])
            raise Unreachable(
                f"{self.label} reads {places}, which Streaming reads and mdsmix does not, so what an epoch holds is not known: copy the data to a "
                "folder or an s3:// URL."
            )

    @property
    def limit(self) -> int:
        """The most tokens of a row; LONGEST where max_seq_len is not set."""
        return min(self.max_seq_len or LONGEST, LONGEST)

    @property
    def index_bytes(self) -> int:
        """Bytes of the indexes of all streams."""
        return sum(len(stream.index.content) for stream in self.streams)

    @property
    def target_policies(self) -> Targets | None:
        """The policies on finetuning samples; None where the section has an invalid policy, which a
        rule of sections reports.
        """
        try:
            return Targets(
                max_seq_len=self.limit,
                target_prompts=self.targets[0],
                target_responses=self.targets[1],
                decoder_only_format=self.decoder_only_format is not False,
            )
        except RecipeError:
            return None


@dataclass(frozen=True, kw_only=True)
class Mix:
    """All loaders of a run and what they share."""

    yaml: TrainingYaml
    "The training YAML, resolved; of a recipe, the YAML that it renders."
    recipe: str | None = None
    "The recipe's path, for the commands in findings."
    overrides: Sequence[str] = ()
    "The recipe's overrides, for the same."
    wanted: Recipe | None = None
    "The recipe itself, which may have changed since its streams were converted."
    train: Loader
    evals: tuple[Loader, ...] = ()
    unseen: tuple[LoaderSection, ...] = ()
    """Evaluations whose streams nobody looked at, as was asked for. Only the rules of sections
    judge them.
    """
    is_bare: bool = False
    "Streams were named alone, so there is no loader's section to judge."
    tokenizer: TokenizerCard | None = None
    "The run's tokenizer; None where the YAML names none, or where it cannot be opened here."
    tokenizer_problem: str | None = None
    "Why the tokenizer cannot be opened here."
    opened: Tokenizer | None = None
    "The run's tokenizer with its files."
    tokenizer_home: Location | None = None
    """The folder from which training nodes fetch the tokenizer; None where it is at a hub or on the
    same disk.
    """
    verified: Mapping[str, Report] = field(default_factory=dict)
    """URL of a stream's folder -> the report of reading all its bytes; empty where nobody asked for
    a deep check.
    """
    shares: Apportioned | None = None
    """The recipe's shares as samples, which are the streams' `choose`; None where the recipe gives
    no shares.
    """
    changed: Sequence[str] = ()
    "The keys that rendering changed in an existing config, as `path: old -> new`."

    @property
    def loaders(self) -> tuple[Loader, ...]:
        return (self.train, *self.evals)

    @property
    def streams(self) -> tuple[StreamInMix, ...]:
        return tuple(stream for loader in self.loaders for stream in loader.streams)

    @cached_property
    def model_tokenizer(self) -> str | None:
        """The path of the tokenizer.json beside the pretrained weights; None where there are no
        such weights, or none seen here.
        """
        from mdsmix.encode.pretrained import open_tokenizer

        kwargs = {"trust_remote_code": True} if self.yaml.at("model", "trust_remote_code") else {}
        with suppress(MdsmixError):
            if model := pretrained_model_name(self.yaml):
                return open_tokenizer(TokenizerSpec(name=model, kwargs=kwargs)).path
        return None

    def spec_of(self, stream: StreamInMix) -> StreamSpec | None:
        """Return the recipe's section of a stream that the recipe converts; None for any other."""
        spec = self.wanted.streams.get(stream.name) if self.wanted else None
        if self.wanted is None or spec is None or spec.source is None or stream.survey:
            return None
        is_here = locate(self.wanted.published(spec)).url == stream.folder.parent.url
        return spec if is_here else None

    @cached_property
    def source_files(self) -> dict[str, list[SourceFile] | MdsmixError]:
        """Stream -> the files that its recipe finds now, or why they cannot be looked at. They are
        found for many streams at a time, and none is read.
        """
        specs = [spec for stream in unique_folders(self.streams) if (spec := self.spec_of(stream))]
        found = together(self._find_files, specs)
        return {spec.name: files for spec, files in zip(specs, found, strict=True)}

    def _find_files(self, spec: StreamSpec) -> list[SourceFile] | MdsmixError:
        assert self.wanted is not None
        assert spec.source is not None
        try:
            return filled(find(spec.source.path, self.wanted.folder, ReadAs.of(spec.source)))
        except MdsmixError as error:
            return error

    def look(self) -> None:
        """Lists what is stored of every stream, many at a time: at a store each listing takes 20 ms
        or more.
        """
        together(lambda stream: stream.files, self.streams)

    def again(self, options: str = "") -> str:
        """The words of a fix that say how to publish a stream again."""
        return how_to_publish_again(self.recipe or "RECIPE", self.overrides, options)


def how_to_publish_again(recipe: str, overrides: Sequence[str], options: str = "") -> str:
    """Return the words of a fix that say how to publish a stream of a recipe again."""
    command = shlex.join(["mdsmix", "convert", recipe, *overrides])
    return f"publish it again, with mdsmix by `{command}{options}`"


def unique_folders(streams: Iterable[StreamInMix]) -> list[StreamInMix]:
    """The streams without repeated folders: a folder with two names in a mix comes once."""
    return list({stream.folder.url: stream for stream in streams}.values())


def stream_names(streams: Iterable[StreamInMix]) -> list[str]:
    return [stream.name for stream in streams]


def list_stream_names(streams: Iterable[StreamInMix]) -> str:
    """The streams' names with commas, for a sentence."""
    return ", ".join(stream_names(streams))
