"""The sections of a training YAML that say what is read and how: loaders and their streams,
variables filled in by OmegaConf.

Values are kept as they stand, right or wrong, so that rules can judge them. Properties read them as
LLM-Foundry and Streaming do, with their defaults. The variables of judged sections must resolve;
those of others need not: a model section with an environment variable of the training node hinders
nobody from looking at the data.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import (
    LOADER_KEYS,
    MDSMIX_LOADER,
    OWN_LOADER_KEYS,
    WEIGHT_KEYS,
    Types,
    as_whole_number,
)
from mdsmix.recipe import TokenizerSpec
from mdsmix.recipe.read import config_of, read_text, readable
from mdsmix.storage import is_for_streaming_alone
from mdsmix.typed import brief

Settings = Mapping[str, Any]
"Keys and values of a config or of a part of it."
TRAIN = "train_loader"
DATA_KEYS = {"streams", "remote", "local", "hf_name"}
"The keys that name a training YAML's data, under train_loader.dataset."


def is_recipe_tree(tree: Settings) -> bool:
    """A recipe names its streams at the top level; a training YAML has a model, and data in
    train_loader.dataset.
    """
    loader = tree.get(TRAIN)
    dataset = loader.get("dataset") if isinstance(loader, Mapping) else None
    names_data = isinstance(dataset, Mapping) and bool(DATA_KEYS & set(dataset))
    return "streams" in tree and "model" not in tree and not names_data


@dataclass(frozen=True, kw_only=True)
class StreamSection:
    """One stream of a loader."""

    name: str
    settings: Settings
    "The keys that Streaming's Stream is built from, its split inherited where it has none."

    @property
    def place(self) -> str | None:
        """The place where it was published: its remote, or its local folder where it has none."""
        place = self.settings.get("remote") or self.settings.get("local")
        return str(place) if place else None

    @property
    def weight(self) -> dict[str, Any]:
        """Those of repeat, proportion and choose that are given; more than one is wrong."""
        return {k: v for k in WEIGHT_KEYS if (v := self.settings.get(k)) is not None}

    @property
    def weighted(self) -> str:
        """The weight as text, for example `repeat: 2`; `1` where none is given, since Streaming
        then takes every sample once.
        """
        return ", ".join(f"{k}: {v}" for k, v in self.weight.items()) or "1"

    @property
    def cache_folder(self) -> str | None:
        """The folder that a training node keeps the stream in: local/split, with symlinks
        followed.
        """
        local, split = self.settings.get("local"), self.settings.get("split") or ""
        return os.path.realpath(os.path.join(str(local), str(split))) if local else None


@dataclass(frozen=True, kw_only=True)
class LoaderSection:
    """`train_loader`, or one entry of `eval_loader`."""

    label: str
    "How messages call it: train_loader, or eval_loader heldout."
    section: Settings
    is_in_list: bool = False
    """An entry of a list of evaluations, which has a label. LLM-Foundry hands on the label of a
    lone one, and fails.
    """

    @property
    def name(self) -> str:
        return str(self.section.get("name"))

    @property
    def is_text(self) -> bool:
        return self.name == "text"

    @property
    def is_own(self) -> bool:
        """The loader of this package, which reads the samples of both of LLM-Foundry's."""
        return self.name == MDSMIX_LOADER

    @property
    def reads_turns(self) -> bool:
        """Whether it reads finetuning samples: by target policies, and packed where asked."""
        return self.name == "finetuning" or self.is_own

    @property
    def keys(self) -> Types:
        """The keys that may stand in the section."""
        return OWN_LOADER_KEYS if self.is_own else LOADER_KEYS

    @property
    def trains(self) -> bool:
        return self.label == TRAIN

    @cached_property
    def dataset(self) -> Settings:
        dataset = self.section.get("dataset")
        return dataset if isinstance(dataset, Mapping) else {}

    @property
    def own_places(self) -> list[str]:
        """Those of the keys remote and local that the dataset itself has, which then is
        one stream.
        """
        return [key for key in ("remote", "local") if self.dataset.get(key)]

    @property
    def max_seq_len(self) -> int | None:
        return as_whole_number(self.dataset.get("max_seq_len"))

    @property
    def decoder_only_format(self) -> Any:
        """The key as it stands; where it is false, LLM-Foundry reads an encoder and a decoder row
        of each sample.
        """
        return self.dataset.get("decoder_only_format")

    @property
    def targets(self) -> tuple[str, str]:
        """(target_prompts, target_responses) as LLM-Foundry reads them: in lower case, with the
        defaults in place of null.
        """
        prompts, responses = (self.dataset.get(f"target_{t}") for t in ("prompts", "responses"))
        return str(prompts or "none").lower(), str(responses or "last").lower()

    @cached_property
    def stream_sections(self) -> tuple[StreamSection, ...]:
        """Its streams; a dataset with remote or local of its own is one. RecipeError where they are
        no keys and values.
        """
        streams, given = self.dataset.get("streams"), self.own_places
        if not streams and given:
            name = str(self.dataset[given[0]]).rstrip("/").rpartition("/")[2]
            streams = {name: {key: self.dataset[key] for key in given}}
        split = {"split": of_all} if (of_all := self.dataset.get("split")) else {}
        return tuple(
            StreamSection(name=str(name), settings=own if own.get("split") else own | split)
            for name, keys in self._keys("dataset.streams", streams or {}).items()
            for own in [self._keys(f"dataset.streams.{name}", keys)]
        )

    @property
    def unopened(self) -> list[StreamSection]:
        """The streams at places that Streaming reads and mdsmix cannot open."""
        return [
            stream
            for stream in self.stream_sections
            if stream.place and is_for_streaming_alone(stream.place)
        ]

    def _keys(self, what: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise RecipeError(
                f"{what} of {self.label} is {brief(value)}; it must be keys and values."
            )
        return dict(value)


@dataclass(frozen=True, kw_only=True)
class TrainingYaml:
    """A whole training YAML. Keys that could not be resolved are left out of sections that nobody
    judges.
    """

    origin: str
    "How messages call the file."
    config: Settings

    @property
    def train(self) -> LoaderSection:
        """The section `train_loader`; RecipeError where there is none."""
        section = self.config.get(TRAIN)
        if not isinstance(section, Mapping):
            raise RecipeError(
                f"{self.origin} is neither a recipe nor a training YAML: it has no train_loader; it holds {', '.join(self.config)}."
            )
        return LoaderSection(label=TRAIN, section=section)

    @property
    def evals(self) -> tuple[LoaderSection, ...]:
        """The evaluations that read streams; LLM-Foundry takes one or a list."""
        entries = self.config.get("eval_loader")
        is_list = isinstance(entries, list)
        sections = (
            LoaderSection(
                label=f"eval_loader {e.get('label', '')}".strip(), section=e, is_in_list=is_list
            )
            for e in (entries if isinstance(entries, list) else [entries])
            if isinstance(e, Mapping)
        )
        return tuple(section for section in sections if not section.dataset.get("hf_name"))

    def loader(self, name: str) -> LoaderSection:
        """`train_loader`, or `eval_loader.<label>`; RecipeError where it is not there, or names
        several.
        """
        if name == TRAIN:
            return self.train
        known = {f"eval_loader.{each.section.get('label')}": each for each in self.evals}
        only = [*known.values()] if name == "eval_loader" else []
        if (found := only[0] if len(only) == 1 else known.get(name)) is None:
            raise RecipeError(
                f"{name} is not one loader of {self.origin}; name {', '.join([TRAIN, *known])}."
            )
        return found

    @property
    def batch_size(self) -> int | None:
        """Samples that all devices draw together at a time."""
        return as_whole_number(self.config.get("global_train_batch_size"))

    @property
    def tokenizer(self) -> TokenizerSpec | None:
        """The run's tokenizer; RecipeError where its keywords are none. model_max_length is left
        out: it shapes no id.
        """
        section = self.config.get("tokenizer")
        keys = section if isinstance(section, Mapping) else {"name": section}
        if not keys.get("name"):
            return None
        given = keys.get("kwargs") or {}
        if not isinstance(given, Mapping):
            raise RecipeError(f"tokenizer.kwargs is {brief(given)}, and must hold keys.")
        return TokenizerSpec(
            name=str(keys["name"]),
            kwargs={k: v for k, v in given.items() if k != "model_max_length"},
        )

    @property
    def places(self) -> list[str]:
        """The places where its streams were published, those of train_loader first."""
        sections = (self.train, *self.evals)
        return [s.place for loader in sections for s in loader.stream_sections if s.place]

    def at(self, *keys: str) -> Any:
        """A value deep in the config; None where a key on the way is missing."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


JUDGED = ("max_seq_len", "tokenizer", "train_loader", "eval_loader")
Config = str | os.PathLike[str] | Settings


def read_training_yaml(config: Config, loader: str) -> TrainingYaml:
    """A training YAML by its path, or a mapping of the same keys; relative paths in it are the
    current folder's. Of it `loader` and the tokenizer are judged.
    """
    judged = (loader.partition(".")[0], "tokenizer")
    if isinstance(config, Mapping):
        return parse_training_yaml(dict(config), "the config", judged)
    return parse_training_yaml(read_text(config), str(config), judged)


def parse_training_yaml(tree: Any, origin: str, judged: Collection[str] = JUDGED) -> TrainingYaml:
    """A training YAML from its text or tree; RecipeError where it cannot be read, or a judged
    section does not resolve.
    """
    with readable(origin, "training YAML"):
        config = config_of(tree)
        filled = {str(key): v for key in config for v in _filled(config, key, judged)}
    if is_recipe_tree(filled):
        raise RecipeError(
            f"{origin} is a recipe, which says how streams are made and not how they are loaded: render it with `mdsmix render-yaml "
            f"{origin} -o train.yaml`, and give train.yaml."
        )
    return TrainingYaml(origin=origin, config=filled)


def read_unresolved(text: str, origin: str) -> dict[str, Any]:
    """A config's text as keys and values, every `${...}` as it stands."""
    from omegaconf import OmegaConf

    with readable(origin, "training YAML"):
        found: Any = OmegaConf.to_container(config_of(text))
        return dict(found)


def _filled(config: Any, key: Any, judged: Collection[str]) -> Iterator[Any]:
    """The value of a section. Keys that cannot be filled in are left out where nobody judges it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    is_judged = key in judged
    try:
        section = config[key]
        if OmegaConf.is_dict(section) and not is_judged:
            section = {str(name): v for name in section for v in _filled(section, name, ())}
        elif OmegaConf.is_config(section):
            section = OmegaConf.to_container(section, resolve=True, throw_on_missing=is_judged)
        yield section
    except OmegaConfBaseException:
        if is_judged:
            raise
