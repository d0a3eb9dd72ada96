"""A training YAML -> what one of its loaders is built from.

`mdsmix.foundry_yaml` reads it and has the rules that `mdsmix check` reports too. Only the
loader's own section and the tokenizer must resolve, so that a config whose model section needs an
environment variable can still be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import DATASET_KEYS, LOADER_DEFAULTS, TARGET_KEYS
from mdsmix.foundry_yaml.rules import refuse_broken_rules
from mdsmix.foundry_yaml.training_yaml import Config, LoaderSection, Settings, read_training_yaml
from mdsmix.load.dataset import BEST_HASH
from mdsmix.recipe import TokenizerSpec

RULES_SKIPPED_HERE = ("workers", "key-missing", "remote-alone", "setting-null", "split-nested")
"""Rules for LLM-Foundry's loaders alone. In this one, keys that are missing or null have defaults
that fit, and one place of a stream is enough.
"""
REFUSED_KEYS = {
    "allow_unsafe_types": "which runs whatever code a shard of pickles holds; take it out, and write such a stream again in another encoding",
    "mlm_probability": "and no token is masked here; take it out",
}
"Keys of LLM-Foundry that this loader refuses -> why."
KEYS_NOT_PASSED_ON = frozenset(
    {"streams", "remote", "local", "split", "validate_hash", "max_seq_len", "token_encoding_type"}
    | {"seq_parallel_replication"}
)
"Keys of every dataset that are not handed to StreamingDataset as they stand."


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """The settings that one loader is built from."""

    section: LoaderSection
    loader: Settings
    "The keys of the section itself, each with its value or default."
    streams: Mapping[str, Settings]
    "Name -> keywords of Stream."
    streaming: Settings
    "Further keywords of StreamingDataset."
    tokenizer: TokenizerSpec | None

    @property
    def places(self) -> list[str]:
        """The places where its streams were published."""
        return [stream.url for stream in self.section.stream_sections if stream.url]

    def row_key(self, key: str, default: Any = None) -> Any:
        """A key of `dataset`; null is the default."""
        value = self.section.dataset.get(key)
        return default if value is None else value


def read_settings(config: Config, loader: str = "train_loader") -> LoaderSettings:
    """The settings of `train_loader`, or `eval_loader.<label>`; RecipeError says in a sentence what
    is wrong.
    """
    yaml = read_training_yaml(config, loader)
    return make_settings(yaml.loader(loader), yaml.tokenizer)


def make_settings(section: LoaderSection, tokenizer: TokenizerSpec | None = None) -> LoaderSettings:
    """The settings of one loader's section; RecipeError says in a sentence what is wrong."""
    judged, dataset = section, section.dataset
    if section.is_text:
        # LLM-Foundry's text loader has no target policies, so its rules would refuse them; this
        # loader reads them under either name.
        dataset = {key: value for key, value in dataset.items() if key not in TARGET_KEYS}
        judged = replace(section, section={**section.section, "dataset": dataset})
    refuse_broken_rules(judged, ignored=RULES_SKIPPED_HERE)
    for key, why in REFUSED_KEYS.items():
        if section.dataset.get(key):
            raise RecipeError(f"{section.label}: {key} is set, {why}.")
    own = DATASET_KEYS.keys() - KEYS_NOT_PASSED_ON
    default = section.dataset.get("validate_hash", BEST_HASH)
    return LoaderSettings(
        section=section,
        loader={**LOADER_DEFAULTS, **section.section},
        streams={
            s.name: {**s.settings, "validate_hash": s.settings.get("validate_hash") or default}
            for s in section.stream_sections
        },
        streaming={k: v for k, v in section.dataset.items() if k in own and v is not None},
        tokenizer=tokenizer,
    )
