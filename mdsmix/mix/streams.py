"""A mix as LLM-Foundry will see it: loaders, the streams each one reads, and what is known of every stream.

Whether it came from a recipe, from a training YAML or from bare folders, a mix has this one shape, so that a check is
written once. A stream's index and manifest are read at once, its stored files and first samples only when a check asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mdsmix.encode.labels import Targets
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.kinds import kind_of
from mdsmix.mix.apportion import Apportioned
from mdsmix.recipe import TokenizerSpec
from mdsmix.shards.manifest import Encoding, TokenizerCard
from mdsmix.shards.published import Stream
from mdsmix.shards.verification import Report
from mdsmix.storage import Location, together
from mdsmix.training.training_yaml import LoaderSection, StreamSection, TrainingYaml

if TYPE_CHECKING:
    from mdsmix.encode.pretrained import Tokenizer

PRETRAINED = ("hf_causal_lm", "hf_t5")
"Models of LLM-Foundry that load pretrained weights unless `pretrained: false` is set."


def pretrained_name(yaml: TrainingYaml) -> str | None:
    """The folder or hub name of the weights that training begins with; None where it begins with none."""
    name = yaml.at("model", "pretrained_model_name_or_path")
    is_pretrained = yaml.at("model", "pretrained")
    if is_pretrained is None:
        is_pretrained = yaml.at("model", "name") in PRETRAINED
    return str(name) if name and is_pretrained else None


def moved(model: str, run: str) -> int:
    """How many tokens in the tokenizer.json `model` stand for another id in `run`.

    Tokens that were added to either are left out: those that a model has room for are named by whoever trains it.
    """
    from tokenizers import Tokenizer

    own, name_of = Tokenizer.from_file(model), Tokenizer.from_file(run).id_to_token
    added = own.get_added_tokens_decoder()
    vocabulary = own.get_vocab(with_added_tokens=False).items()
    return sum(name_of(id) != token for token, id in vocabulary if id not in added)


LONGEST = 1 << 30
"No sample has more tokens: a length that is not set, or that no integer of numpy holds."


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first samples of a stream's first shard, or why there are none."""

    samples: tuple[Mapping[str, Any], ...] = ()
    damage: str | None = None


@dataclass(frozen=True, kw_only=True)
class StreamInMix(StreamSection, Stream):
    """One published stream and its section in the loader: the folder is the remote, or the local folder of a stream without one."""

    survey: str | None = None
    "Of a stream that is not published: how far its source was looked at, from which its index and manifest are estimated."

    @classmethod
    def of(
        cls, found: Stream, name: str, settings: Mapping[str, Any], survey: str | None = None
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
        """How it was converted; None where no manifest says so."""
        return self.trusted_manifest.encoding if self.trusted_manifest else None

    @property
    def has_targets(self) -> bool | None:
        """Whether policies decide what of it is trained; None where no manifest says so."""
        return kind_of(self.encoding).has_targets if self.encoding else None

    @cached_property
    def head(self) -> Head:
        from mdsmix.shards.shard_samples import read_head

        if self.survey or not self.shards or not self.holds(self.shards[0]):
            return Head()
        try:
            return Head(samples=tuple(read_head(self.folder, self.shards[0])))
        except Unreachable as error:
            if " is damaged: " not in str(error):
                raise
            return Head(damage=str(error))


@dataclass(frozen=True, kw_only=True)
class Loader(LoaderSection):
    """`train_loader` or one entry of `eval_loader`, and the streams that it reads."""

    streams: tuple[StreamInMix, ...]

    @property
    def limit(self) -> int:
        """Tokens of a row, LONGEST where nothing says so."""
        return min(self.max_seq_len or LONGEST, LONGEST)

    @property
    def index_bytes(self) -> int:
        """Of all indexes."""
        return sum(len(stream.index.content) for stream in self.streams)

    @property
    def target_policies(self) -> Targets | None:
        """What it trains of finetuning samples; None where that is no policy, which a rule of its section says."""
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
    "What was asked about, resolved; from a recipe, the YAML that it renders."
    recipe: str | None = None
    "The recipe's path, for commands that a fix names."
    train: Loader
    evals: tuple[Loader, ...] = ()
    is_bare: bool = False
    "Streams were named alone, so there is no loader's section to judge."
    tokenizer: TokenizerCard | None = None
    "Of the run; None where the YAML names none or it cannot be loaded here."
    tokenizer_problem: str | None = None
    opened: Tokenizer | None = None
    "The same with its files."
    tokenizer_home: Location | None = None
    "Where training nodes fetch the folder from that the YAML names; None where it is at a hub or on the same disk."
    verified: Mapping[str, Report] = field(default_factory=dict)
    "URL of a stream's folder -> what reading every byte of it found; empty where nobody asked for that."
    shares: Apportioned | None = None
    "What the recipe's shares came to, which the streams' `choose` says; None where it weights by other means."
    changed: tuple[str, ...] = ()
    "Each key that setting it into a config changed there, with both values."

    @property
    def loaders(self) -> tuple[Loader, ...]:
        return (self.train, *self.evals)

    @property
    def streams(self) -> tuple[StreamInMix, ...]:
        return tuple(stream for loader in self.loaders for stream in loader.streams)

    @cached_property
    def model_tokenizer(self) -> str | None:
        """The tokenizer.json beside the weights that training begins with; None where there are none, or not to be seen here."""
        from mdsmix.encode.pretrained import open_tokenizer

        kwargs = {"trust_remote_code": True} if self.yaml.at("model", "trust_remote_code") else {}
        with suppress(MdsmixError):
            if model := pretrained_name(self.yaml):
                return open_tokenizer(TokenizerSpec(name=model, kwargs=kwargs)).path
        return None

    def look(self) -> None:
        """Lists what is stored of every stream, many at a time: at a store each listing takes 20 ms or more."""
        together(lambda stream: stream.files, self.streams)

    def again(self, options: str = "") -> str:
        """How a stream is made anew."""
        command = f"mdsmix convert {self.recipe or 'RECIPE'}{options}"
        return f"publish it again, with mdsmix by `{command}`"


def distinct(streams: Iterable[StreamInMix]) -> list[StreamInMix]:
    """Each folder once, whatever names it has in a mix."""
    return list({stream.folder.url: stream for stream in streams}.values())


def names(streams: Iterable[StreamInMix]) -> list[str]:
    return [stream.name for stream in streams]


def names_listed(streams: Iterable[StreamInMix]) -> str:
    """The streams as a sentence names them."""
    return ", ".join(names(streams))
