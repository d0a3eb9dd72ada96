"""What LLM-Foundry 0.22 and Streaming read of a loader's section: every key, and the values that they allow.

Held here as plain data, since importing either takes 4-15 s and `check` answers in one; tests/foundry/test_yaml.py
compares it with the real signatures. Sources: llmfoundry/data/{text_data,data,utils}.py, llmfoundry/data/finetuning/
{dataloader,tasks}.py, streaming/base/{dataset,stream}.py.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from typing import Any

LOADER_KEYS = frozenset(
    [
        "name",
        "dataset",
        "drop_last",
        "num_workers",
        "pin_memory",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
    ]
)
LOADER_NEEDS = {
    "text": ("dataset", "drop_last", "num_workers"),
    "finetuning": ("dataset", "num_workers"),
}
LOADER_DEFAULTS: dict[str, Any] = {"prefetch_factor": 2, "persistent_workers": True}

STREAM_KEYS = frozenset(
    [
        "remote",
        "local",
        "split",
        "proportion",
        "repeat",
        "choose",
        "download_retry",
        "download_timeout",
        "validate_hash",
        "keep_zip",
    ]
)
WEIGHT_KEYS = ("repeat", "proportion", "choose")

_STREAMING = frozenset(
    [
        "streams",
        "remote",
        "local",
        "split",
        "download_retry",
        "download_timeout",
        "validate_hash",
        "keep_zip",
        "epoch_size",
        "predownload",
        "cache_limit",
        "sampling_method",
        "sampling_granularity",
        "partition_algo",
        "num_canonical_nodes",
        "shuffle",
        "shuffle_algo",
        "shuffle_seed",
        "shuffle_block_size",
        "batching_method",
        "allow_unsafe_types",
        "replication",
        "stream_name",
        "stream_config",
        "max_seq_len",
        "token_encoding_type",
    ]
)
DATASET_KEYS = {
    "text": _STREAMING
    | frozenset(
        [
            "eos_token_id",
            "bos_token_id",
            "mlm_probability",
            "override_eos_token_id_mismatch_error",
            "override_bos_token_id_mismatch_error",
            "seq_parallel_replication",
        ]
    ),
    "finetuning": _STREAMING
    | frozenset(
        [
            "decoder_only_format",
            "target_prompts",
            "target_responses",
            "packing_ratio",
            "allow_pad_trimming",
            "seq_parallel_replication",
            "auto_packing_replication",
            "max_leftover_bins_to_keep",
            "pad_to_longest",
        ]
    ),
}
"""Keys of `dataset` that have an effect. Any other is dropped by the text loader without a word and makes the finetuning
loader fail; `batch_size` and `tokenizer` are passed by both builders themselves and fail when given twice."""
PASSED_TWICE = frozenset({"batch_size", "tokenizer"})

VALUES: dict[str, tuple[Any, ...]] = {
    "sampling_method": ("balanced", "fixed"),
    "batching_method": ("random", "stratified", "per_stream", "device_per_stream"),
    "partition_algo": ("orig", "relaxed"),
    "shuffle_algo": ("naive", "py1br", "py1e", "py1s", "py2s"),
    "token_encoding_type": tuple(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)),
}

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


def nearest(key: str, known: Collection[str]) -> str:
    """How a fix names the key that was meant."""
    near = difflib.get_close_matches(key, sorted(known), 1, 0.5)
    return (
        f"write {near[0]}, if that is what was meant, or leave it out" if near else "leave it out"
    )
