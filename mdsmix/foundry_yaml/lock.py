"""mix.lock: what a run's data was when it was planned, and what decides the order in which it is
drawn.

A checkpoint says how many samples of an epoch are behind, and not which samples: resumed on data
that was published anew, it repeats samples and leaves others out without a word. So a lock is
written in two places, in a file beside the training YAML and in a checkpoint. It holds a hash of
each stream's shards, in their order, and every setting that decides which samples a batch holds.
Settings that only the model or the optimiser reads are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
import xxhash

from mdsmix import typed
from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import COUNT_UNITS, parse_quantity
from mdsmix.foundry_yaml.training_yaml import LoaderSection
from mdsmix.recipe.stream_spec import NOT_NEGATIVE, must_be
from mdsmix.shards.manifest import FORMAT_VERSION
from mdsmix.words import in_line, plural, spelled

VERSION = FORMAT_VERSION
SUFFIX = ".mix.lock"
"Behind the whole name of the YAML, so that several in one folder have a lock each."
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
"""Keys of `dataset` that decide the order of samples and what becomes of each, target policies
aside, with the defaults of Streaming and LLM-Foundry.
"""


@dataclass(frozen=True, kw_only=True)
class LockedStream:
    """One stream as it was published."""

    name: str
    drawn: int = field(metadata=NOT_NEGATIVE)
    "Samples an epoch, by its weight."
    samples: int = field(metadata=NOT_NEGATIVE)
    "Samples in the stream."
    shards: str = field(metadata=must_be("a hash of 32 digits", HASH_FORM.fullmatch))
    "xxh128 of the contents of its shards, in their order."

    def __str__(self) -> str:
        return f"{plural(self.drawn, 'sample')} an epoch of {self.samples:,} in shards {self.shards[:8]}"


LockedShard = tuple[int, str, int, Mapping[str, str]]
"Samples, file name, bytes and hashes of a shard before compression."


def lock_stream(name: str, drawn: int, shards: Iterable[LockedShard]) -> LockedStream:
    """A stream of these shards. Each is known by its content where the index holds a hash of it,
    else by its name and size.
    """
    held = [*shards]
    known = [[n, sorted(hashes.items())[:1] or [file, size]] for n, file, size, hashes in held]
    return LockedStream(
        name=name,
        drawn=drawn,
        samples=sum(n for n, *_ in held),
        shards=xxhash.xxh128_hexdigest(orjson.dumps(known)),
    )


@dataclass(frozen=True, kw_only=True)
class LoaderLock:
    """One loader's streams, in its order, and its settings."""

    streams: list[LockedStream]
    settings: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_text(self) -> str:
        """One line of JSON, as it stands in a checkpoint."""
        return orjson.dumps(self, option=orjson.OPT_SORT_KEYS).decode()


@dataclass(frozen=True, kw_only=True)
class Lock:
    """All of mix.lock."""

    loaders: dict[str, LoaderLock]
    "Label of a loader in messages (`train_loader`, or `eval_loader heldout`) -> its lock."
    version: int = VERSION

    def to_bytes(self) -> bytes:
        return orjson.dumps(self, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"


def locked_settings(section: LoaderSection, **more: Any) -> dict[str, Any]:
    """The settings of a loader that a lock holds: the section's, else the defaults. `more`: values
    that are known better.
    """
    given = LOCKED | {k: v for k in LOCKED if (v := section.dataset.get(k)) is not None}
    given |= zip(("target_prompts", "target_responses"), section.targets, strict=True)
    given["epoch_size"] = parse_quantity(given["epoch_size"] or 0, COUNT_UNITS) or None
    given |= {key: None for key in ("packing_ratio", "replication") if given[key] == 1}
    return given | {key: value for key, value in more.items() if value is not None}


AnyLock = TypeVar("AnyLock", Lock, LoaderLock)


def parse_lock(cls: type[AnyLock], content: str | bytes, where: str, fix: str) -> AnyLock:
    """A file's `Lock` or a checkpoint's `LoaderLock`; RecipeError where it is none, or of another
    version.
    """
    try:
        tree = orjson.loads(content)
        version = tree.get("version") if isinstance(tree, Mapping) else None
        if isinstance(version, int) and version != VERSION:
            whose = "an earlier commit of mdsmix" if version < VERSION else "a newer mdsmix"
            raise RecipeError(
                f"{where} was written by {whose} (version {version}, and this one reads {VERSION}); {fix}."
            )
        return typed.read(cls, tree)
    except (orjson.JSONDecodeError, typed.Misfit) as error:
        raise RecipeError(f"{where} is no lock of a mix: {in_line(error)}; {fix}.") from None


LockDifference = tuple[str, Sequence[str]]
"A sentence on one thing in which data is not what was locked, and the streams that it is about."


def find_differences(was: LoaderLock, now: LoaderLock) -> Iterator[LockDifference]:
    """Every difference that changes which samples come, and when. Settings that only one lock holds
    are not compared.
    """
    old, new = ({stream.name: stream for stream in lock.streams} for lock in (was, now))
    for name in sorted(old | new):
        before, after = (found.get(name, "not in the mix") for found in (old, new))
        if before != after:
            yield f"{name} was {before} and is {after}", [name]
    if list(old) != list(new) and old.keys() == new.keys():
        yield f"the streams stand in another order: {', '.join(new)}", list(new)
    for key in sorted(was.settings.keys() & now.settings.keys()):
        before, after = was.settings[key], now.settings[key]
        if before != after:
            yield f"{key} was {spelled(before)} and is {spelled(after)}", ()
