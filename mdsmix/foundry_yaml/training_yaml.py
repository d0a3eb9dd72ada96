"""The sections of a training YAML that decide which data is read and how: loaders and their
streams. OmegaConf fills in the variables.

Values are kept as they are written, right or wrong, so that rules can check them. Properties return
values as LLM-Foundry and Streaming read them, with their defaults. Variables must resolve only in
sections that are checked: a model section may use an environment variable that only the training
node has.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import (
    LOADER_KEYS,
    MDSMIX_LOADER,
    OWN_LOADER_KEYS,
    WEIGHT_KEYS,
    Types,
    as_whole_number,
)
from mdsmix.frozen import frozen
from mdsmix.recipe import TokenizerSpec
from mdsmix.recipe.plain_yaml import fill_in_length, parse_plain_yaml, read_plain_yaml
from mdsmix.recipe.read import make_config, read_text, translate_errors
from mdsmix.schema import describe_value
from mdsmix.storage import is_for_streaming_alone

Settings = Mapping[str, Any]
"Keys and values of a config or of a part of it."
TRAIN = "train_loader"
ALIKE = 0.85
"How alike a key must be to count as a misspelling; `stream` and `Streams` are."
DATA_KEYS = {"streams", "remote", "local", "hf_name"}
"The keys that name a training YAML's data, under train_loader.dataset."


def is_recipe_tree(tree: Settings) -> bool:
    """Check whether a YAML is a recipe of mdsmix and not a training YAML. A recipe has `streams` at
    the top level, perhaps misspelled, which the reader of recipes then reports. A training YAML has
    a model, or names its data in train_loader.dataset.
    """
    loader = tree.get(TRAIN)
    dataset = loader.get("dataset") if isinstance(loader, Mapping) else None
    names_data = isinstance(dataset, Mapping) and bool(DATA_KEYS & set(dataset))
    if "model" in tree or names_data:
        return False
    return "streams" in tree or bool(get_close_matches("streams", map(str, tree), cutoff=ALIKE))


@frozen(kw_only=True)
class StreamSection:
    """One stream of a loader."""

    name: str
    settings: Settings
    "The arguments of Streaming's Stream. A stream without a split of its own has the dataset's."

    @property
    def url(self) -> str | None:
        """The folder or URL where the stream was published: its `remote`, or its `local` if it has
        only that; None if it has neither.
        """
        published = self.settings.get("remote") or self.settings.get("local")
        return str(published) if published else None

    @property
    def weight(self) -> dict[str, Any]:
        """The stream's weight: `{"repeat": 2}`, or with the key proportion or choose; empty if no
        weight is set. More than one key is an error, which `weights_together` reports.
        """
        set_keys = [key for key in WEIGHT_KEYS if self.settings.get(key) is not None]
        return {key: self.settings[key] for key in set_keys}

    @property
    def weight_text(self) -> str:
        """The weight for a message, such as `repeat: 2`; `1` if no weight is set, since Streaming
        then reads every sample once.
        """
        if not self.weight:
            return "1"
        return ", ".join(f"{key}: {value}" for key, value in self.weight.items())

    @property
    def cache_folder(self) -> str | None:
        """The folder where a training node keeps the stream: local/split, with symlinks followed;
        None without `local`.
        """
        local = self.settings.get("local")
        if not local:
            return None
        split = self.settings.get("split") or ""
        return os.path.realpath(os.path.join(str(local), str(split)))


class TargetPolicies(NamedTuple):
    """target_prompts and target_responses: which prompts and responses of a conversation are
    trained, such as `none` and `last`.
    """

    prompts: str
    responses: str


@frozen(kw_only=True)
class LoaderSection:
    """`train_loader`, or one entry of `eval_loader`."""

    label: str
    "The section's name in messages: train_loader, or eval_loader heldout."
    section: Settings
    "The keys and values of the section."
    is_in_list: bool = False
    """Whether the section is an entry of a list of evaluations. Only an entry of a list may have a
    label. If eval_loader is not a list, LLM-Foundry passes the label on to the loader, which fails.
    """

    @property
    def name(self) -> str:
        return str(self.section.get("name"))

    @property
    def is_text(self) -> bool:
        return self.name == "text"

    @property
    def is_mdsmix(self) -> bool:
        """Whether the loader is mdsmix's own, which reads the samples of both of LLM-Foundry's
        loaders, text and finetuning.
        """
        return self.name == MDSMIX_LOADER

    @property
    def reads_turns(self) -> bool:
        """Whether the loader reads finetuning samples, for which target policies are set."""
        return self.name == "finetuning" or self.is_mdsmix

    @property
    def keys(self) -> Types:
        """The keys that are allowed in the section."""
        return OWN_LOADER_KEYS if self.is_mdsmix else LOADER_KEYS

    @property
    def trains(self) -> bool:
        """Whether the section is train_loader and not an evaluation."""
        return self.label == TRAIN

    @cached_property
    def dataset(self) -> Settings:
        """The section's `dataset`; empty if it is missing or not a mapping."""
        dataset = self.section.get("dataset")
        return dataset if isinstance(dataset, Mapping) else {}

    @property
    def own_data_keys(self) -> list[str]:
        """Which of the keys remote and local the dataset itself has, outside `streams`. A dataset
        with one of them is a single stream.
        """
        return [key for key in ("remote", "local") if self.dataset.get(key)]

    @property
    def max_seq_len(self) -> int | None:
        """The tokens of a row; None if the YAML does not set it to a whole number."""
        return as_whole_number(self.dataset.get("max_seq_len"))

    @property
    def decoder_only_format(self) -> Any:
        """The key as it is written. If it is false, LLM-Foundry makes an encoder row and a decoder
        row of each sample.
        """
        return self.dataset.get("decoder_only_format")

    @property
    def targets(self) -> TargetPolicies:
        """target_prompts and target_responses as LLM-Foundry reads them: in lower case, with null
        replaced by the defaults.
        """
        prompts = self.dataset.get("target_prompts") or "none"
        responses = self.dataset.get("target_responses") or "last"
        return TargetPolicies(str(prompts).lower(), str(responses).lower())

    @cached_property
    def stream_sections(self) -> tuple[StreamSection, ...]:
        """The streams of the loader. A dataset with remote or local of its own is one stream, named
        by the last part of that path.

        Raises RecipeError if a stream is not a mapping of keys.
        """
        streams = self.dataset.get("streams")
        data_keys = self.own_data_keys
        if not streams and data_keys:
            name = str(self.dataset[data_keys[0]]).rstrip("/").rpartition("/")[2]
            streams = {name: {key: self.dataset[key] for key in data_keys}}
        default_split = self.dataset.get("split")
        sections = list[StreamSection]()
        for name, keys in self._require_keys("dataset.streams", streams or {}).items():
            settings = self._require_keys(f"dataset.streams.{name}", keys)
            if default_split and not settings.get("split"):
                settings["split"] = default_split
            sections.append(StreamSection(name=str(name), settings=settings))
        return tuple(sections)

    @property
    def unopened(self) -> list[StreamSection]:
        """The streams at URLs that Streaming can read but mdsmix cannot."""
        return [
            stream
            for stream in self.stream_sections
            if stream.url and is_for_streaming_alone(stream.url)
        ]

    def _require_keys(self, what: str, value: Any) -> dict[str, Any]:
        """Return a mapping as a new dict. Raises RecipeError if the value is not a mapping.

        Args:
            what: the value's place in the section, such as `dataset.streams`, for the message.
            value: the value.
        """
        if not isinstance(value, Mapping):
            raise RecipeError(
                f"{what} of {self.label} is {describe_value(value)}, but must be keys and values; "
                "correct the training YAML."
            )
        return dict(value)


@frozen(kw_only=True)
class TrainingYaml:
    """A whole training YAML with its variables (`${...}`) filled in. Other sections than JUDGED are
    not checked, so a key there whose variable cannot be filled in is left out.
    """

    origin: str
    "The file's name in messages."
    config: Settings

    @property
    def train(self) -> LoaderSection:
        """The section `train_loader`. Raises RecipeError if it is missing."""
        section = self.config.get(TRAIN)
        if not isinstance(section, Mapping):
            keys = ", ".join(self.config)
            content = f"has only {keys}" if keys else "has no keys"
            raise RecipeError(
                f"{self.origin} is neither a recipe nor a training YAML. A recipe has streams, a "
                f"training YAML has train_loader, but this file {content}; name another file."
            )
        return LoaderSection(label=TRAIN, section=section)

    @property
    def evals(self) -> tuple[LoaderSection, ...]:
        """The evaluations that read streams. eval_loader is one evaluation or a list of them."""
        entries = self.config.get("eval_loader")
        is_list = isinstance(entries, list)
        sections = list[LoaderSection]()
        for entry in entries if isinstance(entries, list) else [entries]:
            if isinstance(entry, Mapping):
                label = f"eval_loader {entry.get('label', '')}".strip()
                sections.append(LoaderSection(label=label, section=entry, is_in_list=is_list))
        # An evaluation with hf_name reads a data set of Hugging Face, not a stream.
        return tuple(section for section in sections if not section.dataset.get("hf_name"))

    def loader(self, name: str) -> LoaderSection:
        """Return `train_loader`, `eval_loader.<label>`, or `eval_loader` if there is one.

        Raises RecipeError if the name is not one loader of the file.
        """
        if name == TRAIN:
            return self.train
        evaluations = {f"eval_loader.{e.section.get('label')}": e for e in self.evals}
        if name == "eval_loader" and len(evaluations) == 1:
            (only_evaluation,) = evaluations.values()
            return only_evaluation
        if name not in evaluations:
            raise RecipeError(
                f"{name} is not one loader of {self.origin}; name one of these loaders: "
                f"{', '.join([TRAIN, *evaluations])}."
            )
        return evaluations[name]

    @property
    def batch_size(self) -> int | None:
        """How many samples all devices together read per step."""
        return as_whole_number(self.config.get("global_train_batch_size"))

    @property
    def tokenizer(self) -> TokenizerSpec | None:
        """The run's tokenizer; None if the YAML names none. Its model_max_length is left out, since
        it changes no id.

        Raises RecipeError if `kwargs` is not a mapping.
        """
        section = self.config.get("tokenizer")
        keys = section if isinstance(section, Mapping) else {"name": section}
        if not keys.get("name"):
            return None
        kwargs = keys.get("kwargs") or {}
        if not isinstance(kwargs, Mapping):
            raise RecipeError(
                f"tokenizer.kwargs is {describe_value(kwargs)}, but must be keys and values; "
                "correct the training YAML."
            )
        return TokenizerSpec(
            name=str(keys["name"]),
            kwargs={key: value for key, value in kwargs.items() if key != "model_max_length"},
        )

    @property
    def stream_urls(self) -> list[str]:
        """The folders and URLs where the streams were published, train_loader's first."""
        sections = (self.train, *self.evals)
        return [s.url for loader in sections for s in loader.stream_sections if s.url]

    def value_at(self, *keys: str) -> Any:
        """Return the value at a path of keys in the config; None if one of the keys is missing."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


JUDGED = ("max_seq_len", "tokenizer", "train_loader", "eval_loader")
"Top-level keys that are checked, so every variable in their values must resolve."
Config = str | os.PathLike[str] | Settings


def read_training_yaml(config: Config, loader: str) -> TrainingYaml:
    """Read a training YAML from a path, or from a mapping of the same keys. Relative paths in the
    YAML start from the current folder. Only the section of `loader` and the tokenizer must resolve.

    Args:
        loader: `train_loader`, or `eval_loader.<label>`.
    """
    judged = (loader.partition(".")[0], "tokenizer")
    if isinstance(config, Mapping):
        return parse_training_yaml(dict(config), "the config", judged)
    return parse_training_yaml(read_text(config), str(config), judged)


def parse_training_yaml(tree: Any, origin: str, judged: Collection[str] = JUDGED) -> TrainingYaml:
    """Parse a training YAML from its text or from a mapping.

    Raises RecipeError if the YAML cannot be read, or if a variable in one of the `judged` sections
    does not resolve.

    Args:
        origin: the file's name for messages.
        judged: the top-level keys that will be checked.
    """
    with translate_errors(origin, "YAML file"):
        resolved = read_plain_yaml(tree) if isinstance(tree, str) else fill_in_length(tree)
        if resolved is None:
            resolved = _resolve_keys(make_config(tree), judged)
    if is_recipe_tree(resolved):
        phases = None if resolved.get("phase") else resolved.get("phases")
        named = "train.yaml"
        if phases and isinstance(phases, Mapping):
            named = f"the YAML of one phase, such as train.{next(iter(phases))}.yaml"
        raise RecipeError(
            f"{origin} is a recipe, which describes how streams are made, but a training YAML is "
            f"needed; render it with `mdsmix render-yaml {origin} -o train.yaml`, and name "
            f"{named}."
        )
    return TrainingYaml(origin=origin, config=resolved)


def read_unresolved(text: str, origin: str) -> dict[str, Any]:
    """Parse a config's text to keys and values; every `${...}` stays as it is written."""
    with translate_errors(origin, "YAML file"):
        plain = parse_plain_yaml(text)
        if plain is not None:
            return plain
        from omegaconf import OmegaConf

        tree: Any = OmegaConf.to_container(make_config(text))
        return dict(tree)


def _resolve_keys(config: Any, judged: Collection[str]) -> dict[str, Any]:
    """Resolve the variables in a config. Return it without the keys that cannot be resolved.

    Raises an error of OmegaConf if one of the keys in `judged` cannot be resolved.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    resolved: dict[str, Any] = {}
    for key in config:
        is_judged = key in judged
        try:
            value = config[key]
            # In a section that is not checked, only the keys that cannot be resolved are left out.
            if OmegaConf.is_dict(value) and not is_judged:
                value = _resolve_keys(value, ())
            elif OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=is_judged)
            resolved[str(key)] = value
        except OmegaConfBaseException:
            if is_judged:
                raise
    return resolved
