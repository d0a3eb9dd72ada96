"""A mix as LLM-Foundry will see it: loaders, the streams each one reads, and what is known of every stream.

Whether it came from a recipe, from a training YAML or from bare folders, a mix has this one shape, so that a check is
written once. A stream's index and manifest are read at once, its stored files and first samples only when a check asks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mdsmix.errors import Unreachable
from mdsmix.mix.foundry import WEIGHT_KEYS
from mdsmix.shards.index import Index, Shard
from mdsmix.shards.manifest import Manifest, TokenizerCard
from mdsmix.storage import Location, Stat, together


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first samples of a stream's first shard, or why there are none."""

    samples: tuple[Mapping[str, Any], ...] = ()
    damage: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One published stream and its section in the loader."""

    name: str
    folder: Location
    "Where index.json lies: the remote, or the local folder of a stream without one."
    index: Index
    manifest: Manifest | None
    settings: Mapping[str, Any]
    "The keys that Streaming's Stream is built from, as they stand in the YAML."
    is_sourced: bool = False
    "The recipe names its source, so `mdsmix convert` on that recipe makes it."

    @property
    def is_trusted(self) -> bool:
        """The manifest speaks of this index; else a publication was interrupted, and it speaks of another."""
        return self.manifest is not None and self.manifest.index_hash == self.index.hash

    @property
    def card(self) -> Manifest | None:
        """The manifest where it can be believed."""
        return self.manifest if self.is_trusted else None

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.index.shards

    @property
    def columns(self) -> Mapping[str, str]:
        """Column -> MDS encoding, of the first shard; a check of its own compares the others."""
        return self.shards[0].columns if self.shards else {}

    @property
    def weight(self) -> dict[str, Any]:
        """What the YAML gives of repeat, proportion and choose: right is at most one."""
        return {k: self.settings[k] for k in WEIGHT_KEYS if self.settings.get(k) is not None}

    @cached_property
    def files(self) -> Mapping[str, Stat]:
        """Name -> size of what is stored beside the index: one listing, however many shards."""
        return dict(self.folder.list())

    def holds(self, shard: Shard) -> bool:
        stored = self.files.get(shard.stored.basename)
        return stored is not None and stored.size == shard.stored.bytes

    @cached_property
    def head(self) -> Head:
        from mdsmix.shards.sample import read_head

        if not self.shards or not self.holds(self.shards[0]):
            return Head()
        try:
            return Head(samples=tuple(read_head(self.folder, self.shards[0])))
        except Unreachable as error:
            if " is damaged: " not in str(error):
                raise
            return Head(damage=str(error))


@dataclass(frozen=True, kw_only=True)
class Loader:
    """`train_loader` or one entry of `eval_loader`, resolved."""

    label: str
    "How messages call it: train_loader, or eval_loader heldout."
    section: Mapping[str, Any]
    streams: tuple[Stream, ...]

    @property
    def name(self) -> str:
        return str(self.section.get("name"))

    @property
    def is_text(self) -> bool:
        return self.name == "text"

    @property
    def trains(self) -> bool:
        return self.label == "train_loader"

    @cached_property
    def dataset(self) -> Mapping[str, Any]:
        dataset = self.section.get("dataset")
        return dataset if isinstance(dataset, Mapping) else {}

    @property
    def max_seq_len(self) -> int | None:
        return whole(self.dataset.get("max_seq_len"))

    @property
    def targets(self) -> tuple[str, str]:
        """What finetuning trains on, in Foundry's words and with its defaults."""
        prompts, responses = (self.dataset.get(f"target_{t}") for t in ("prompts", "responses"))
        return str(prompts or "none").lower(), str(responses or "last").lower()


@dataclass(frozen=True, kw_only=True)
class Mix:
    """All loaders of a run and what they share."""

    origin: str
    "The file or the folders that were asked about."
    recipe: str | None = None
    "The recipe's path, for commands that a fix names."
    config: Mapping[str, Any]
    "The training YAML, resolved; from a recipe, the one it renders."
    train: Loader
    evals: tuple[Loader, ...] = ()
    is_bare: bool = False
    "Streams were named alone, so there is no loader's section to judge."
    tokenizer: TokenizerCard | None = None
    "Of the run; None where the YAML names none or it cannot be loaded here."
    tokenizer_problem: str | None = None

    @property
    def loaders(self) -> tuple[Loader, ...]:
        return (self.train, *self.evals)

    @property
    def streams(self) -> tuple[Stream, ...]:
        return tuple(stream for loader in self.loaders for stream in loader.streams)

    def look(self) -> None:
        """Lists what is stored of every stream, many at a time: at a store each listing takes 20 ms or more."""
        together(lambda stream: stream.files, {id(s): s for s in self.streams}.values())

    @property
    def batch_size(self) -> int | None:
        """Samples that all devices draw together at a time."""
        return whole(self.config.get("global_train_batch_size"))

    def makers(self, streams: Sequence[Stream], does: str, options: str = "") -> str:
        """Who can make the streams anew: the recipe that names their source, or whoever published them."""
        ours = [s.name for s in streams if s.is_sourced]
        theirs = [s for s in streams if not s.is_sourced]
        ways = (
            [f"{does} {', '.join(ours)}: `mdsmix convert {self.recipe}{options}`"] if ours else []
        )
        if theirs:
            # A manifest shows that some recipe made them: not this one, where there is one.
            by_us = not self.recipe and all(s.manifest for s in theirs)
            command = f" (`mdsmix convert RECIPE{options}`)" if by_us else ""
            whose = ", ".join(s.name for s in theirs)
            ways.append(f"have {whose} published again{command} by whoever made {them(theirs)}")
        return "; ".join(ways)

    def section(self, *keys: str) -> Any:
        """A value deep in the config; None where a key on the way is missing."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def plural(count: int, word: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def them(things: Sized) -> str:
    return "it" if len(things) == 1 else "them"


def whole(value: Any) -> int | None:
    """The value where it is a whole number; YAML's true, 2.5 and .inf are none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def cache_folder(settings: Mapping[str, Any]) -> str | None:
    """The folder that a training node keeps the stream in: local/split, with symlinks followed."""
    if not settings.get("local"):
        return None
    return os.path.realpath(os.path.join(str(settings["local"]), str(settings.get("split") or "")))
