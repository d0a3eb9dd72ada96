"""What LLM-Foundry 0.22 and Streaming read of a loader's section: every key with the type and default it has there.

A field's name is a key, its annotation what the key may hold. Held here as plain data, since importing either takes 4-15 s and
`check` answers in one; tests/foundry/test_yaml.py compares it with the real signatures. Sources: llmfoundry/data/
{text_data,data,utils}.py, llmfoundry/data/finetuning/{dataloader,tasks}.py, streaming/base/{dataset,stream}.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mdsmix.recipe.spec import must_be

Number = int | float
IntType = Literal["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def whole(value: Any) -> int | None:
    """The value where it is a whole number; YAML's true, 2.5 and .inf are none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _at_least(least: int) -> dict[str, Any]:
    words = f"a whole number of at least {least}"
    return must_be(words, lambda value: (n := whole(value)) is not None and n >= least)


@dataclass(frozen=True, kw_only=True)
class LoaderKeys:
    """`train_loader`, or one entry of `eval_loader`."""

    name: str = ""
    dataset: Mapping[str, Any] | None = None
    drop_last: bool = False
    num_workers: int = 0
    pin_memory: bool = True
    prefetch_factor: int | None = 2
    persistent_workers: bool = True
    timeout: Number = 0


@dataclass(frozen=True, kw_only=True)
class OwnLoaderKeys(LoaderKeys):
    """The same of `name: mdsmix`."""

    accept_changed: bool = False
    "Goes on from a checkpoint of other data, and says what repeats."


@dataclass(frozen=True, kw_only=True)
class StreamKeys:
    """One of `dataset.streams`."""

    remote: Any = None
    local: Any = None
    split: str | None = None
    proportion: Any = None
    repeat: Any = None
    choose: Any = None
    download_retry: Number | None = None
    download_timeout: Number | None = None
    validate_hash: str | None = None
    keep_zip: bool | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetKeys:
    """The keys of `dataset` that both loaders read: Streaming's own, and the length and dtype of rows."""

    streams: Any = None
    remote: Any = None
    local: Any = None
    split: str | None = None
    download_retry: Number | None = None
    download_timeout: Number | None = None
    validate_hash: str | None = None
    keep_zip: bool | None = None
    epoch_size: Any = None
    predownload: int | None = None
    cache_limit: Any = None
    sampling_method: Literal["balanced", "fixed"] | None = None
    sampling_granularity: Any = field(default=None, metadata=_at_least(1))
    partition_algo: Literal["orig", "relaxed"] | None = None
    num_canonical_nodes: int | None = None
    shuffle: bool | None = None
    shuffle_algo: Literal["naive", "py1br", "py1e", "py1s", "py2s"] | None = None
    shuffle_seed: Any = field(default=None, metadata=_at_least(0))
    shuffle_block_size: int | None = None
    batching_method: Literal["random", "stratified", "per_stream", "device_per_stream"] | None = (
        None
    )
    allow_unsafe_types: bool | None = None
    replication: int | None = None
    stream_name: str | None = None
    stream_config: Mapping[str, Any] | None = None
    max_seq_len: Any = None
    token_encoding_type: IntType | None = None
    seq_parallel_replication: int | None = None


@dataclass(frozen=True, kw_only=True)
class TextKeys(DatasetKeys):
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    mlm_probability: Number | None = None
    override_eos_token_id_mismatch_error: bool | None = None
    override_bos_token_id_mismatch_error: bool | None = None


@dataclass(frozen=True, kw_only=True)
class FinetuningKeys(DatasetKeys):
    decoder_only_format: Any = None
    target_prompts: str | None = None
    target_responses: str | None = None
    packing_ratio: Any = None
    allow_pad_trimming: bool | None = None
    auto_packing_replication: int | None = None
    max_leftover_bins_to_keep: int | None = None
    pad_to_longest: bool | None = None


@dataclass(frozen=True, kw_only=True)
class OwnKeys(FinetuningKeys):
    """Of `name: mdsmix`, which reads both kinds: what either loader reads, but for masked language models."""

    eos_token_id: int | None = None
    bos_token_id: int | None = None
    override_eos_token_id_mismatch_error: bool | None = None
    override_bos_token_id_mismatch_error: bool | None = None
    processor: str | None = None
    "Folder or hub name: what turns the images of streams into what a model sees."
    dummy_image: bool | None = None
    "A batch without an image gets a masked one."


OWN = "mdsmix"
"The name under which LLM-Foundry finds the loader of this package (docs/loading.md)."
DATASETS: dict[str, type[DatasetKeys]] = {
    "text": TextKeys,
    "finetuning": FinetuningKeys,
    OWN: OwnKeys,
}
LOADERS: dict[str, type[LoaderKeys]] = {OWN: OwnLoaderKeys}
"Loaders with keys of their own beside those of all."


@dataclass(frozen=True, kw_only=True)
class OtherLoader:
    """A loader of neither LLM-Foundry nor mdsmix, which reads one kind of stream: the kind brings it (`Kind.loader`)."""

    name: str
    "`train_loader.name`."
    whose: str
    "In a sentence: it is the loader of ..."
    keys: type[DatasetKeys]
    "Of `dataset`."
    columns: Mapping[str, str]
    "Column name -> MDS encoding, of the columns that every sample must have."
    row: Callable[[Mapping[str, Any], int], Any]
    "(decoded sample, max_seq_len) -> row; MixRefused where there is none."
    batch: Callable[[Sequence[Any], int, int, int], dict[str, Any]]
    "(rows, max_seq_len, EOS, id of padding) -> arrays of a batch, `input_ids` among them."


OTHERS: dict[str, OtherLoader] = {}
"By name."


def register(loader: OtherLoader) -> None:
    """Makes a loader known to the checks of a section, to `render-yaml` and to `mdsmix.load`."""
    OTHERS[loader.name] = loader
    DATASETS[loader.name] = loader.keys
    DATASET_KEYS[loader.name] = names_of(loader.keys)


def names_of(keys: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(keys))


LOADER_KEYS, STREAM_KEYS = names_of(LoaderKeys), names_of(StreamKeys)
DATASET_KEYS = {name: names_of(keys) for name, keys in DATASETS.items()}
"""Keys of `dataset` that have an effect. Any other is dropped by the text loader without a word and makes the finetuning
loader fail; `batch_size` and `tokenizer` are passed by both builders themselves and fail when given twice."""
PASSED_TWICE = frozenset({"batch_size", "tokenizer"})
LOADER_NEEDS = {
    "text": ("dataset", "drop_last", "num_workers"),
    "finetuning": ("dataset", "num_workers"),
}
WEIGHT_KEYS = ("repeat", "proportion", "choose")
TARGET_KEYS = frozenset({"decoder_only_format", "target_prompts", "target_responses"})

BYTE_UNITS = {
    u: 1024**n for n, u in enumerate(("b", "kb", "mb", "gb", "tb", "pb", "eb", "zb", "yb"))
}
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def in_units(value: Any, units: dict[str, int]) -> int | None:
    """A size or count as Streaming reads it (`500gb`, `64M`, 1000); None where it would not."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value) if math.isfinite(value) else None
    text = str(value).strip().lower()
    number = text.rstrip("bkmgtpezy")
    unit = units.get(text[len(number) :], 1 if text == number else None)
    try:
        return None if unit is None else int(float(number) * unit)
    except (ValueError, OverflowError):
        return None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
