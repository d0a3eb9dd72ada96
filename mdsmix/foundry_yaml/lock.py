"""The lock of a mix: a record of a run's data as it was when the run was planned, and of the
settings that decide its order.

A checkpoint stores how many samples of an epoch were read, but not which samples. Resumed on data
that was published again, a run silently repeats samples and skips others. So a lock is written in
two places: in a file next to the training YAML, and in each checkpoint. It contains a hash of each
stream's shards, in their order, and every setting that decides which samples a batch contains.
Settings that only the model or the optimiser reads are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, TypeVar

import orjson
import xxhash

from mdsmix import schema
from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import COUNT_UNITS, parse_quantity
from mdsmix.foundry_yaml.training_yaml import LoaderSection
from mdsmix.frozen import frozen
from mdsmix.messages import flatten_error, format_yaml_value, plural
from mdsmix.recipe.stream_spec import NOT_NEGATIVE, must_be
from mdsmix.shards.manifest import FORMAT_VERSION

VERSION = FORMAT_VERSION
SUFFIX = ".mix.lock"
"Appended to the YAML's name, so each YAML has its own lock."
HASH_FORM = re.compile("[0-9a-f]{32}")
LOCKED: dict[str, Any] = {
    "batching_method": "random",
    "bos_token_id": None,
    "decoder_only_format": True,
    "eos_token_id": None,
    "epoch_size": None,
    "max_leftover_bins_to_keep": None,
    "max_seq_len": None,
    "num_canonical_nodes": None,
    "packing_ratio": None,
    "partition_algo": "relaxed",
    "replication": None,
    "sampling_granularity": 1,
    "sampling_method": "balanced",
    "shuffle": False,
    "shuffle_algo": "py1e",
    "shuffle_block_size": None,
    "shuffle_seed": 9176,
    "token_encoding_type": "int64",
}
"""Keys of `dataset` that decide the order of samples and how each is truncated, with the defaults
of Streaming and LLM-Foundry. `list_locked_settings` adds target_prompts and target_responses.
"""


@frozen(kw_only=True)
class LockedStream:
    """One stream as it was published."""

    name: str
    drawn: int = field(metadata=NOT_NEGATIVE)
    "How many samples of the stream the stream's weight makes an epoch read."
    samples: int = field(metadata=NOT_NEGATIVE)
    "How many samples the stream contains."
    shards: str = field(metadata=must_be("a hash of 32 digits", HASH_FORM.fullmatch))
    "xxh128 of the contents of its shards, in their order."

    def __str__(self) -> str:
        drawn = plural(self.drawn, "sample")
        return f"{drawn} an epoch of {self.samples:,} in shards {self.shards[:8]}"


class LockedShard(NamedTuple):
    """What identifies a shard of a stream, before compression."""

    samples: int
    "How many samples it contains."
    file: str
    "Its file name."
    bytes: int
    "The size of the file."
    hashes: Mapping[str, str]
    "Algorithm -> hash of the content; may be empty."


def lock_stream(name: str, drawn: int, shards: Iterable[LockedShard]) -> LockedStream:
    """Return the lock of one stream.

    A shard is identified by its number of samples and the hash of its content; if the index has no
    hash of it, by its number of samples, file name and size.

    Args:
        drawn: samples of the stream that an epoch reads.
    """
    samples = 0
    identities = list[list[Any]]()
    for shard in shards:
        samples += shard.samples
        if shard.hashes:
            # One pair of algorithm and hash: the first algorithm by name.
            content: list[Any] = [min(shard.hashes.items())]
        else:
            content = [shard.file, shard.bytes]
        identities.append([shard.samples, content])
    digest = xxhash.xxh128_hexdigest(orjson.dumps(identities))
    return LockedStream(name=name, drawn=drawn, samples=samples, shards=digest)


@frozen(kw_only=True)
class LoaderLock:
    """What is recorded of one loader, to notice later that its data has changed: its streams as
    they were published, in the loader's order, and the settings that decide which samples a batch
    contains.
    """

    streams: list[LockedStream]
    settings: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_text(self) -> str:
        """Return one line of JSON, as it is written into a checkpoint."""
        return orjson.dumps(self, option=orjson.OPT_SORT_KEYS).decode()


@frozen(kw_only=True)
class Lock:
    """The content of a lock's file."""

    loaders: dict[str, LoaderLock]
    "Label of a loader in messages (`train_loader`, or `eval_loader heldout`) -> its lock."
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """Return indented JSON, as it is written next to the YAML."""
        return orjson.dumps(self, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"


def list_locked_settings(section: LoaderSection, **further: Any) -> dict[str, Any]:
    """Return the settings of a loader for its lock: the values of the section, or the defaults of
    keys that it does not set.

    Args:
        section: the loader's section.
        further: settings that are not in the section, such as `batch=512`; None is left out.
    """
    settings = dict(LOCKED)
    for key in LOCKED:
        if section.dataset.get(key) is not None:
            settings[key] = section.dataset[key]
    settings["target_prompts"] = section.targets.prompts
    settings["target_responses"] = section.targets.responses
    settings["epoch_size"] = parse_quantity(settings["epoch_size"] or 0, COUNT_UNITS) or None
    for key in ("packing_ratio", "replication"):
        if settings[key] == 1:  # the same as not set
            settings[key] = None
    return settings | {key: value for key, value in further.items() if value is not None}


AnyLock = TypeVar("AnyLock", Lock, LoaderLock)


def parse_lock(cls: type[AnyLock], content: str | bytes, where: str, fix: str) -> AnyLock:
    """Parse a lock from its JSON: `Lock` from a file, or `LoaderLock` from a checkpoint.

    Args:
        where: the file or checkpoint, for a message.
        fix: what the user can do, for a message.

    Raises RecipeError if the content is not a lock, or is a lock of another version.
    """
    try:
        tree = orjson.loads(content)
        version = tree.get("version") if isinstance(tree, Mapping) else None
        if isinstance(version, int) and version != VERSION:
            writer = "an earlier commit of mdsmix" if version < VERSION else "a newer mdsmix"
            raise RecipeError(
                f"{where} was written by {writer}: it has version {version}, but this mdsmix reads "
                f"only version {VERSION}; {fix}."
            )
        return schema.parse_mapping(cls, tree)
    except (orjson.JSONDecodeError, schema.Misfit) as error:
        raise RecipeError(
            f"{where} cannot be read as a lock, the JSON in which mdsmix records the data and "
            f"settings of a run: {flatten_error(error)}; {fix}."
        ) from None


class LockDifference(NamedTuple):
    """One difference between a stored lock and the current data and settings."""

    message: str
    "For example: `shuffle_seed was 17 and is 18`."
    streams: Sequence[str]
    "The streams that differ; empty for a setting of the loader."


def find_differences(stored: LoaderLock, current: LoaderLock) -> Iterator[LockDifference]:
    """Compare two locks, and yield every difference that changes which samples are read or when.
    Settings that only one of the locks has are not compared.

    Args:
        stored: the lock that was stored when the run was planned.
        current: the lock of the current data and settings.
    """
    old_streams = {stream.name: stream for stream in stored.streams}
    new_streams = {stream.name: stream for stream in current.streams}
    for name in sorted(old_streams | new_streams):
        old_stream = old_streams.get(name, "not in the mix")
        new_stream = new_streams.get(name, "not in the mix")
        if old_stream != new_stream:
            yield LockDifference(f"stream {name} was {old_stream} and is {new_stream}", [name])
    if list(old_streams) != list(new_streams) and old_streams.keys() == new_streams.keys():
        order = list(new_streams)
        yield LockDifference(f"the streams are in another order: {', '.join(order)}", order)
    for key in sorted(stored.settings.keys() & current.settings.keys()):
        old_value = stored.settings[key]
        new_value = current.settings[key]
        if old_value != new_value:
            yield LockDifference(
                f"{key} was {format_yaml_value(old_value)} and is {format_yaml_value(new_value)}",
                (),
            )
