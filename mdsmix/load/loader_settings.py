"""A training YAML -> the settings that one of its loaders is built from.

`mdsmix.foundry_yaml` reads the YAML and has the rules that `mdsmix check` reports too. Only the
loader's own section and the tokenizer must resolve, so that a config whose model section needs an
environment variable can still be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import DATASET_KEYS, LOADER_DEFAULTS, TARGET_KEYS
from mdsmix.foundry_yaml.rules import refuse_broken_rules
from mdsmix.foundry_yaml.training_yaml import Config, LoaderSection, Settings, read_training_yaml
from mdsmix.frozen import frozen
from mdsmix.load.checked_stream import BEST_HASH
from mdsmix.recipe import TokenizerSpec

RULES_SKIPPED_HERE = ("workers", "key-missing", "remote-alone", "setting-null", "split-nested")
"""Ids of rules that hold only for LLM-Foundry's own loaders. In this loader, keys that are missing
or null have working defaults, and a stream needs only one of local and remote.
"""
REFUSED_KEYS = {
    "allow_unsafe_types": "which runs any code that a shard of pickles contains; remove it, and "
    "write the streams that contain pickles again in another encoding",
    "mlm_probability": "but this loader masks no tokens; remove it",
}
"Keys of LLM-Foundry that this loader refuses -> why."
KEYS_NOT_PASSED_ON = frozenset(
    {"streams", "remote", "local", "split", "validate_hash", "max_seq_len", "token_encoding_type"}
    | {"seq_parallel_replication"}
)
"Keys of every dataset that are not passed to StreamingDataset unchanged."


@frozen(kw_only=True)
class LoaderSettings:
    """The settings that one loader is built from."""

    section: LoaderSection
    loader: Settings
    "The keys of the section itself, each with its value or default."
    streams: Mapping[str, Settings]
    "Name of a stream -> the keywords for Streaming's Stream."
    streaming: Settings
    "The other keywords for StreamingDataset, besides `streams`."
    tokenizer: TokenizerSpec | None
    "The tokenizer that the config names, if it names one."

    @property
    def places(self) -> list[str]:
        """The URLs or folders at which the loader's streams were published."""
        return [stream.url for stream in self.section.stream_sections if stream.url]

    def row_key(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the section's `dataset`, or `default` if the key is missing
        or null.
        """
        value = self.section.dataset.get(key)
        return default if value is None else value


def read_settings(config: Config, loader: str = "train_loader") -> LoaderSettings:
    """Read the settings of a loader. Raises RecipeError if they are wrong.

    Args:
        loader: `train_loader`, or `eval_loader.<label>`.
    """
    yaml = read_training_yaml(config, loader)
    return make_settings(yaml.loader(loader), yaml.tokenizer)


def make_settings(section: LoaderSection, tokenizer: TokenizerSpec | None = None) -> LoaderSettings:
    """Return the settings of one loader.

    Raises RecipeError if a key of the section is wrong, or cannot be used by the loader of mdsmix.

    Args:
        section: the loader's section of a training YAML, such as train_loader.
        tokenizer: the tokenizer that the config names; None if it names none, or if the caller
            passes the token ids itself.
    """
    checked_section = section
    if section.is_text:
        # LLM-Foundry's text loader does not know target_prompts and target_responses, so the rules
        # would refuse them. This loader reads them also under `name: text`.
        dataset = {key: value for key, value in section.dataset.items() if key not in TARGET_KEYS}
        checked_section = replace(section, section={**section.section, "dataset": dataset})
    refuse_broken_rules(checked_section, ignored=RULES_SKIPPED_HERE)
    for key, why in REFUSED_KEYS.items():
        if section.dataset.get(key):
            raise RecipeError(f"{section.label}: {key} is set, {why}.")
    default_hash = section.dataset.get("validate_hash", BEST_HASH)
    streams = {}
    for stream in section.stream_sections:
        validate_hash = stream.settings.get("validate_hash") or default_hash
        streams[stream.name] = {**stream.settings, "validate_hash": validate_hash}
    passed_on = DATASET_KEYS.keys() - KEYS_NOT_PASSED_ON
    return LoaderSettings(
        section=section,
        loader={**LOADER_DEFAULTS, **section.section},
        streams=streams,
        streaming={
            key: value
            for key, value in section.dataset.items()
            if key in passed_on and value is not None
        },
        tokenizer=tokenizer,
    )
