"""A rendered YAML or a whole LLM-Foundry config -> the settings of one of its loaders.

OmegaConf resolves what the loader's own section refers to and nothing else, so that a config whose model section needs
an environment variable can still be read. A key that no one would read is refused: LLM-Foundry's text loader drops it
silently, its finetuning loader fails on it.
"""

from __future__ import annotations

import difflib
import inspect
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from streaming import Stream, StreamingDataset

from mdsmix import typed
from mdsmix.errors import RecipeError
from mdsmix.load.stream import BEST_HASH
from mdsmix.recipe import TokenizerSpec
from mdsmix.recipe.rules import TARGET_PROMPTS
from mdsmix.recipe.text import read_text

Config = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LoaderSection:
    """`train_loader`, or one entry of `eval_loader`, with LLM-Foundry's keys and defaults."""

    name: Literal["text", "finetuning"]
    dataset: dict[str, Any]
    label: str | None = None
    drop_last: bool = False
    num_workers: int = 0
    pin_memory: bool = True
    prefetch_factor: int | None = 2
    persistent_workers: bool = True
    timeout: int | float = 0


@dataclass(frozen=True, kw_only=True)
class RowSection:
    """The keys of `dataset` that shape rows and batches; all others are Streaming's."""

    max_seq_len: int
    decoder_only_format: bool | None = None
    target_prompts: str | None = None
    target_responses: str | None = None
    token_encoding_type: str = "int64"
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    override_eos_token_id_mismatch_error: bool = False
    override_bos_token_id_mismatch_error: bool = False
    packing_ratio: int | float | str | None = None
    max_leftover_bins_to_keep: int | None = None
    allow_pad_trimming: bool = False
    pad_to_longest: bool = False
    seq_parallel_replication: int | None = None
    auto_packing_replication: int | None = None

    @property
    def targets(self) -> tuple[str, str]:
        """target_prompts and target_responses; LLM-Foundry reads them in any case and takes null for the default."""
        return (self.target_prompts or "none").lower(), (self.target_responses or "last").lower()


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What one loader is built from."""

    where: str
    "How errors name it: train_loader, eval_loader.faq."
    loader: LoaderSection
    rows: RowSection
    streams: Mapping[str, Mapping[str, Any]]
    "Name -> keywords of Stream."
    streaming: Mapping[str, Any]
    "Further keywords of StreamingDataset."
    tokenizer: TokenizerSpec | None = None

    @property
    def packing(self) -> float:
        """Samples drawn for each packed row; 1 without packing."""
        return float(self.rows.packing_ratio or 1)


def read_settings(config: Config, loader: str = "train_loader") -> LoaderSettings:
    """The settings of `train_loader`, or `eval_loader.<label>`; RecipeError says in a sentence what is wrong."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = _tree(config)
        section = typed.read(LoaderSection, _entry(tree, loader), loader)
        settings = _settings(section, loader, _tokenizer(tree))
    except typed.Misfit as misfit:
        raise RecipeError(str(misfit)) from None
    except (OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise RecipeError(f"{config} is not a config that can be read: {text}.") from None
    for sentence in _contradictions(settings):
        raise RecipeError(f"{loader}: {sentence}")
    return settings


def _tree(config: Config) -> Any:
    import yaml
    from omegaconf import DictConfig, OmegaConf

    try:
        if isinstance(config, Mapping):
            tree: Any = OmegaConf.create(dict(config))
        else:
            tree = OmegaConf.load(io.StringIO(read_text(Path(config))))
    except yaml.YAMLError as error:
        raise RecipeError(f"{config} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(tree, DictConfig):
        raise RecipeError(f"{config} holds no loader: its top level must be keys and values.")
    return tree


def _entry(tree: Any, loader: str) -> Any:
    """The loader's section, resolved: one of a list is picked by its label."""
    name, _, label = loader.partition(".")
    section = _resolved(tree, name)
    if section is None:
        raise RecipeError(
            f"There is no {name} in the config; it holds {', '.join(map(str, tree))}."
        )
    if not isinstance(section, list):
        return section
    labels = [str(entry.get("label")) for entry in section]
    chosen = [entry for entry in section if not label or str(entry.get("label")) == label]
    if len(chosen) != 1:
        raise RecipeError(
            f"{loader} is not one loader; name one as {name}.<label> of {', '.join(labels)}."
        )
    return chosen[0]


def _resolved(tree: Any, key: str) -> Any:
    from omegaconf import OmegaConf

    section = tree.get(key)
    if not OmegaConf.is_config(section):
        return section
    return OmegaConf.to_container(section, resolve=True, throw_on_missing=True)


def _tokenizer(tree: Any) -> TokenizerSpec | None:
    section = _resolved(tree, "tokenizer")
    if section is None:
        return None
    return typed.read(
        TokenizerSpec, {"name": section} if isinstance(section, str) else section, "tokenizer"
    )


def _settings(
    section: LoaderSection, where: str, tokenizer: TokenizerSpec | None
) -> LoaderSettings:
    keys = dict(section.dataset)
    streams = _streams(keys, f"{where}.dataset")
    own = {f.name for f in fields(RowSection)}
    rows = typed.read(RowSection, {k: v for k, v in keys.items() if k in own}, f"{where}.dataset")
    streaming = {k: v for k, v in keys.items() if k not in own}
    _judge_keys(streaming, StreamingDataset, own, f"{where}.dataset")
    return LoaderSettings(
        where=where,
        loader=section,
        rows=rows,
        streams=streams,
        streaming=streaming,
        tokenizer=tokenizer,
    )


def _streams(keys: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Takes the streams out of the dataset's keys; `remote` and `local` beside each other are one stream."""
    streams = keys.pop("streams", None)
    alone = {k: v for k in ("remote", "local") if (v := keys.pop(k, None)) is not None}
    if bool(streams) == bool(alone):
        raise RecipeError(
            f"{where} must hold either streams or remote and local, which say what to load."
        )
    if alone:
        streams = {os.path.basename(str(next(iter(alone.values()))).rstrip("/")): alone}
    if not isinstance(streams, dict):
        raise RecipeError(f"{where}.streams must be names and their streams, not {streams!r}.")
    validate_hash = keys.pop("validate_hash", BEST_HASH)
    for name, stream in streams.items():
        if not isinstance(stream, dict):
            raise RecipeError(f"{where}.streams.{name} must be keys and values, not {stream!r}.")
        _judge_keys(stream, Stream, set(), f"{where}.streams.{name}")
    return {
        str(name): stream | {"validate_hash": stream.get("validate_hash") or validate_hash}
        for name, stream in streams.items()
    }


def _judge_keys(keys: Mapping[str, Any], reader: type, own: set[str], where: str) -> None:
    known = (own | set(inspect.signature(reader).parameters)) - {"streams", "batch_size"}
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"it reads {', '.join(sorted(known))}."
            raise RecipeError(f"{where}: {key} is not a key here; {hint}")


def _contradictions(settings: LoaderSettings) -> Iterator[str]:
    """What LLM-Foundry refuses too, or silently reads otherwise."""
    rows, is_text = settings.rows, settings.loader.name == "text"
    if settings.streaming.get("allow_unsafe_types"):
        yield (
            "allow_unsafe_types is set, which runs whatever code a shard of pickles holds; take it out, and write such "
            "a stream again in another encoding."
        )
    if rows.max_seq_len < 2:
        yield f"max_seq_len is {rows.max_seq_len}; a row of one token has no label."
    if rows.decoder_only_format is None and not is_text:
        yield "decoder_only_format must be true or false, as LLM-Foundry wants it; set it to true for a causal model."
    if (rows.seq_parallel_replication or 1) > 1:
        yield "seq_parallel_replication above 1 is not supported; LLM-Foundry refuses it too. Leave it out."
    if not np.issubdtype(_dtype(rows.token_encoding_type), np.integer):
        yield f"token_encoding_type is {rows.token_encoding_type!r}; it must be an integer type such as uint16."
    yield from _separator_contradictions(rows, is_text)
    yield from _target_contradictions(rows)
    yield from _packing_contradictions(rows, is_text)


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(object)


def _separator_contradictions(rows: RowSection, is_text: bool) -> Iterator[str]:
    given = [k for k in ("eos_token_id", "bos_token_id") if getattr(rows, k) is not None]
    if len(given) == 2:
        yield "eos_token_id and bos_token_id cannot both mark where documents meet; keep one."
    if given and not is_text:
        yield f"{given[0]} belongs to name: text; the finetuning loader of LLM-Foundry fails on it. Leave it out."


def _target_contradictions(rows: RowSection) -> Iterator[str]:
    prompts, responses = rows.targets
    if not TARGET_PROMPTS.fullmatch(prompts):
        yield f"target_prompts is {prompts!r}; it must be none, all or length>=N with N of at least 1."
    if responses not in ("last", "all"):
        yield f"target_responses is {responses!r}; it must be last or all."
    if rows.decoder_only_format is False and (prompts, responses) != ("none", "last"):
        yield "decoder_only_format: false allows only target_prompts: none and target_responses: last."


def _packing_contradictions(rows: RowSection, is_text: bool) -> Iterator[str]:
    ratio = rows.packing_ratio
    if ratio is None:
        if rows.max_leftover_bins_to_keep is not None:
            yield "max_leftover_bins_to_keep says how packing goes; set packing_ratio too or leave it out."
    elif isinstance(ratio, str):
        yield (
            f"packing_ratio is {ratio!r}, and this loader takes a number such as 1.5. LLM-Foundry reads `auto`, finds a number "
            "at every start and logs it as `Using packing ratio`: write that one."
        )
    elif ratio < 1:
        yield f"packing_ratio is {ratio}; it counts samples per packed row, so it is 1 or more."
    elif ratio > 1 and (is_text or rows.decoder_only_format is False):
        yield "packing_ratio is for name: finetuning with decoder_only_format: true; leave it out."
    if is_text and (rows.allow_pad_trimming or rows.pad_to_longest):
        yield "allow_pad_trimming and pad_to_longest are for name: finetuning; leave them out."
