"""The keys of a loader's section that LLM-Foundry 0.22 and Streaming read, with the types and
defaults that they have there.

The keys are listed here as plain data, since importing either library takes 4-15 s and `check`
answers in one second. tests/foundry/test_batches.py compares them with the real signatures.
Sources: llmfoundry/data/ {text_data,data,utils}.py,
llmfoundry/data/finetuning/{dataloader,tasks}.py, streaming/base/{dataset,stream}.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from mdsmix import schema
from mdsmix.errors import RecipeError
from mdsmix.frozen import frozen
from mdsmix.shards.shard_samples import Sample

Number = int | float
IntType = Literal["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def as_whole_number(value: Any) -> int | None:
    """Return the value if it is a whole number, such as 2 or 2.0; None for true, 2.5 and .inf."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _make_least_bound(least: int) -> schema.Bound:
    """Return a bound of whole numbers as a pair: the words for a message, such as `a whole number
    of at least 1`, and a function that tests a value.
    """

    def fits(value: Any) -> bool:
        number = as_whole_number(value)
        return number is not None and number >= least

    return f"a whole number of at least {least}", fits


AT_LEAST_ONE = _make_least_bound(1)
SIZE = re.compile(r"(\d{0,18}\.?\d{1,18})\s*([a-z]*)")
"A number and a unit: `500gb`, `1.5 tb`, `64`."
_BYTE_SUFFIXES = ("b", "kb", "mb", "gb", "tb", "pb", "eb", "zb", "yb")
BYTE_UNITS = {"": 1} | {suffix: 1024**power for power, suffix in enumerate(_BYTE_SUFFIXES)}
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_quantity(value: Any, units: dict[str, int]) -> int | None:
    """Parse a size or count as Streaming does: `500gb`, `64M` or 1000. Return None if Streaming
    would refuse the value.

    Args:
        units: BYTE_UNITS for a size, COUNT_UNITS for a count.
    """
    if is_number(value):
        return int(value)
    match = SIZE.fullmatch(str(value).strip().lower())
    if match is None or match[2] not in units:
        return None
    return int(float(match[1]) * units[match[2]])


def is_number(value: Any) -> bool:
    """Check whether a value is a finite number. True and false do not count as numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


Types = dict[str, Any]
"Key -> the type of its value, or a `schema.Bound` of it."
LOADER_KEYS: Types = {
    "name": str,
    "dataset": Mapping[str, Any] | None,
    "drop_last": bool,
    "num_workers": int,
    "pin_memory": bool | None,
    "prefetch_factor": int | None,
    "persistent_workers": bool | None,
    "timeout": Number,
}
"The keys of `train_loader`, or of one entry of `eval_loader`."
LOADER_DEFAULTS: dict[str, Any] = {
    "drop_last": False,
    "num_workers": 0,
    "pin_memory": True,
    "prefetch_factor": 2,
    "persistent_workers": True,
    "timeout": 0,
}
"The values that torch's DataLoader gets if the section does not set them."
OWN_LOADER_KEYS = LOADER_KEYS | {"accept_changed": bool, "stream_ids": bool}
"""The keys of a loader with `name: mdsmix`. With `accept_changed` it resumes from a checkpoint of
other data, and logs the differences. With `stream_ids` a batch has the stream of each row.
"""
_BOTH: Types = {
    "remote": Any,
    "local": Any,
    "split": str,
    "download_retry": AT_LEAST_ONE,  # attempts, so that 0 downloads nothing
    "download_timeout": Number,
    "validate_hash": str,
    "keep_zip": bool,
}
"""Keys of a dataset, and of each of its streams. They may be null, and so may all keys below except
those in NOT_NULL.
"""
STREAM_KEYS: Types = _BOTH | {"proportion": Any, "repeat": Any, "choose": Any}
"The keys of one of `dataset.streams`."
DATASET_KEYS: Types = _BOTH | {
    "streams": Any,
    "epoch_size": Any,
    "predownload": int,
    "cache_limit": (
        "bytes, or a size such as 500gb",
        lambda value: parse_quantity(value, BYTE_UNITS) is not None,
    ),
    "sampling_method": Literal["balanced", "fixed"],
    "sampling_granularity": AT_LEAST_ONE,
    "partition_algo": Literal["orig", "relaxed"],
    "num_canonical_nodes": int,
    "shuffle": bool,
    "shuffle_algo": Literal["naive", "py1br", "py1e", "py1s", "py2s"],
    "shuffle_seed": (
        "a whole number of at least 0, without a decimal point",
        lambda seed: type(seed) is int and seed >= 0,
    ),
    "shuffle_block_size": (
        "a whole number",
        lambda size: as_whole_number(size) is not None,
    ),
    "batching_method": Literal["random", "stratified", "per_stream", "device_per_stream"],
    "allow_unsafe_types": bool,
    "replication": int,
    "stream_name": str,
    "stream_config": Mapping[str, Any],
    "max_seq_len": Any,
    "token_encoding_type": IntType,
    "seq_parallel_replication": ("1: LLM-Foundry implements no other", (0, 1).__contains__),
}
"Keys of `dataset` under both loaders: Streaming's own, and the length and dtype of rows."
NOT_NULL = frozenset(
    {"batching_method", "sampling_method", "sampling_granularity", "partition_algo"}
    | {"shuffle_algo", "shuffle_seed", "token_encoding_type", "target_prompts", "target_responses"}
)
"""Keys of `dataset` that must not be null, since LLM-Foundry 0.22 or Streaming 0.12 and 0.13 fail
on null. The loader of mdsmix reads null as the default.
"""
_SEPARATORS: Types = {
    "eos_token_id": int,
    "bos_token_id": int,
    "override_eos_token_id_mismatch_error": bool,
    "override_bos_token_id_mismatch_error": bool,
}
_FINETUNING: Types = DATASET_KEYS | {
    "hf_kwargs": None,  # accepted if null; it concerns only Hugging Face data sets
    "decoder_only_format": Any,
    "target_prompts": str,
    "target_responses": str,
    "packing_ratio": (
        "null, auto or a number of at least 1",
        lambda ratio: ratio == "auto" or (is_number(ratio) and ratio >= 1),
    ),
    "allow_pad_trimming": bool,
    "auto_packing_replication": int,
    "max_leftover_bins_to_keep": int,
    "pad_to_longest": bool,
}
MDSMIX_LOADER = "mdsmix"
"The name under which LLM-Foundry finds the loader of this package (docs/loading.md)."
STREAMS_CALLBACK = "mdsmix_streams"
"""The name under which LLM-Foundry finds the callback that logs the figures of each stream, a key
of `callbacks` (docs/streams-of-a-run.md).
"""
DATASETS: dict[str, Types] = {
    "text": DATASET_KEYS | _SEPARATORS | {"mlm_probability": Number},
    "finetuning": _FINETUNING,
    MDSMIX_LOADER: _FINETUNING | _SEPARATORS | {"processor": str, "dummy_image": bool},
}
"""Name of a loader -> the keys of its `dataset` that have an effect. Any other key is silently
dropped by the text loader, and makes the finetuning loader fail.

The loader of mdsmix reads the keys of both others, except `mlm_probability`. Its `processor`, a
folder or hub name, turns the images of streams into a model's inputs; with `dummy_image` a batch
without an image gets a masked image. Loaders that belong to one kind of stream are in
`mdsmix.foundry_yaml.extra_loaders`.
"""


def describe_expected(expected: Any, value: Any) -> str | None:
    """Return None if a key accepts `value`, otherwise a description of what the key accepts, such
    as `a whole number of at least 1.`.

    Args:
        expected: the key's type, or a `schema.Bound`.
        value: the key's value in the YAML.
    """
    if isinstance(expected, tuple):  # a Bound: words and a test
        words, fits = expected
        return None if fits(value) else f"{words}."
    try:
        schema.Reader(expected).read(value, "")
    except schema.Misfit as misfit:
        # The message is `... is 3; it must be a string.`: return what follows.
        return str(misfit).partition("; it must be ")[2]
    return None


@frozen(kw_only=True)
class BatchRules:
    """What the rows and batches of an `ExtraLoader` depend on, besides the samples."""

    max_seq_len: int
    max_gen_len: int = 0
    "The tokens that a model may write after a prompt; 0 for loaders that do not set it."
    eos: int = -1
    "The id of EOS; -1 if the tokenizer has none."
    fill: int = -1
    "The id of the token for padding, which may be EOS; -1 if the tokenizer has neither."
    is_left: bool = False
    "Whether the tokenizer pads on the left."


@frozen(kw_only=True)
class ExtraLoader:
    """A loader of another library, such as ComposeRL, which reads one kind of stream. The kind
    defines the loader (`Kind.loader`), and `extra_loaders.py` lists all of them.
    """

    name: str
    "`train_loader.name`."
    whose: str
    "The library that the loader belongs to, for messages."
    keys: Types
    "The keys of `dataset`."
    columns: Mapping[str, str]
    "Column name -> MDS encoding of the columns that every sample must have."
    needs: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    "The keys of `dataset` without a default -> function from max_seq_len to a first value."
    pads_left: bool = False
    "Whether the loader needs a tokenizer that pads on the left."
    row: Callable[[BatchRules, Sample, int], Any]
    """(rules, decoded sample, its number in the dataset) -> row. Raises MixRefused if the sample
    does not give a row.
    """
    batch: Callable[[BatchRules, Sequence[Any]], dict[str, Any]]
    "(rules, rows) -> a batch: arrays, and lists of strings."
    pads_to_longest: bool = False
    "Whether batches are as wide as their longest row, and not max_seq_len tokens."
    least_batch: int = 1
    "The fewest rows of a device's batch with which training makes sense."
    multiple: int = 1
    "The loader takes only a max_seq_len that is a multiple of this."

    def fault(self, max_seq_len: int) -> str:
        """Return why the loader refuses this max_seq_len, for a message; an empty string if the
        loader accepts it.
        """
        if max_seq_len % self.multiple:
            return f"{self.whose}'s {self.name} loader takes only multiples of {self.multiple}"
        return ""

    def refuse_small_batch(self, label: str, rows: int, advice: str) -> None:
        """Raise RecipeError if a device's batch has fewer rows than the loader needs.

        Args:
            label: the loader's section, such as `train_loader`, for the message.
            rows: rows of a device's batch.
            advice: what to set, for the message.
        """
        if rows < self.least_batch:
            raise RecipeError(
                f"{label}: the {self.name} loader needs batches of {self.least_batch} rows or more "
                "on each device, since it pairs each row with another one of the batch, but the "
                f"batch size is {rows}: {advice}."
            )


PASSED_TWICE = frozenset({"batch_size", "tokenizer"})
"Keys that LLM-Foundry passes to its builders, which therefore fail if a section has them too."
_NEEDED = {"dataset": "", "num_workers": ": 8"}
LOADER_NEEDS = {"text": _NEEDED | {"drop_last": ": true"}, "finetuning": _NEEDED}
"Name of a loader -> its keys without a default in LLM-Foundry, each with an example of the value."
WEIGHT_KEYS = ("repeat", "proportion", "choose")
TARGET_KEYS = frozenset({"decoder_only_format", "target_prompts", "target_responses"})
