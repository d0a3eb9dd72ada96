"""A Stream that knows its name, checks its shards and says which one is damaged.

Streaming trusts a file that is there and a hash algorithm that is named. Here the index is judged when the loader is
built, and a shard's size is compared with the index whenever it is made ready, its hash too where the index holds one:
reading a shard once more costs about 0.1 s per 64 MiB (sha1), once per run, before training on garbage would.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from streaming import Stream
from streaming.base.format import FileInfo, Reader
from streaming.base.hashing import get_hash, is_hash
from streaming.base.world import World

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.load.internals import drop_connection

BEST_HASH = "best"
"`validate_hash` when the YAML does not say: the fastest algorithm that every shard of the index holds, else none."

FASTEST_FIRST = ("xxh3_64", "xxh128", "xxh3_128", "xxh64", "sha1", "xxh32", "sha256", "md5")


class CheckedStream(Stream):  # type: ignore[misc]
    """streaming.Stream with a name, a judged index and checked shards."""

    def __init__(self, *, name: str, validate_hash: str | None = BEST_HASH, **settings: Any):
        super().__init__(validate_hash=validate_hash, **settings)
        self.name = name

    @property
    def url(self) -> str:
        """Where the stream was published."""
        return os.path.join(self.remote or self.local, self.split).rstrip("/")

    @property
    def is_cached(self) -> bool:
        """Whether `local` holds copies: what is damaged there may be deleted and fetched again."""
        if not self.remote:
            return False
        return bool(os.path.realpath(self.remote) != os.path.realpath(self.local))

    def get_shards(self, world: World, allow_unsafe_types: bool) -> list[Reader]:
        """The readers of index.json; Unreachable where there is none or it cannot be used."""
        try:
            shards: list[Reader] = super().get_shards(world, allow_unsafe_types)
        except Exception as error:
            raise Unreachable(
                f"Stream {self.name}: index.json under {self.url} cannot be used ({reason(error)}), so none of its "
                "rows can be loaded; convert the stream, or correct its remote, local and split."
            ) from error
        drop_connection(self)
        if not any(len(shard) for shard in shards):
            raise Unreachable(
                f"Stream {self.name}: index.json under {self.url} lists no samples; convert the stream again or take "
                "it out of the mix."
            )
        for info in (i for shard in shards for i in files(shard)):
            self._judge_name(info.basename)
        self.validate_hash = self._settled_hash(shards)
        return shards

    def _judge_name(self, basename: str) -> None:
        path = PurePosixPath(basename)
        if path.is_absolute() or ".." in path.parts:
            raise Unreachable(
                f"Stream {self.name}: index.json under {self.url} names the shard {basename!r}, outside its own "
                "folder; do not load this stream, it is damaged or hostile."
            )

    def _settled_hash(self, shards: list[Reader]) -> str | None:
        """The algorithm to check with; RecipeError where one was asked for that a shard lacks."""
        if not self.validate_hash:
            return None
        held = set.intersection(*(set(i.hashes) for shard in shards for i in files(shard)))
        if self.validate_hash == BEST_HASH:
            return next((algorithm for algorithm in FASTEST_FIRST if algorithm in held), None)
        if self.validate_hash in held and is_hash(self.validate_hash):
            return self.validate_hash
        raise RecipeError(
            f"Stream {self.name}: validate_hash is {self.validate_hash}, but the shards of its index.json hold "
            f"{', '.join(sorted(held)) or 'no hashes'}, and Streaming would give no rows at all; name one of those or "
            "leave validate_hash out."
        )

    def prepare_shard(self, shard: Reader) -> int:
        """Fetches and unpacks a shard and checks its size; returns the change in bytes of the cache."""
        try:
            if not self.is_cached:
                self._judge_presence(shard)
            change: int = super().prepare_shard(shard)
            self.check(shard, with_hash=False)
        except Exception as error:
            if self.is_cached:
                shard.evict()
            raise self.failure(shard, reason(error)) from error
        return change

    def _judge_presence(self, shard: Reader) -> None:
        """Streaming would try to fetch the file for 1-3 s, from nowhere, and say that a remote is missing."""
        folder = Path(self.local, self.split)
        for pair in shard.file_pairs:
            if not any((folder / info.basename).exists() for info in pair if info):
                raise FileNotFoundError("there is no such file")

    def check(self, shard: Reader, with_hash: bool = True) -> None:
        """Compares the files at hand with the index: ValueError on damage, FileNotFoundError when one is missing."""
        for raw, _ in shard.file_pairs:
            path = Path(self.local, self.split, raw.basename)
            if (size := path.stat().st_size) != raw.bytes:
                raise ValueError(f"{path} has {size} bytes, its index says {raw.bytes}")
            wanted = raw.hashes.get(self.validate_hash) if with_hash else None
            if wanted and get_hash(self.validate_hash, np.memmap(path, np.uint8, "r")) != wanted:
                raise ValueError(
                    f"{path} does not have the {self.validate_hash} that its index says"
                )

    def failure(self, shard: Reader, why: str) -> Unreachable:
        """What the training loop is told of a shard that cannot be used."""
        return Unreachable(
            f"Stream {self.name}: shard {shard.file_pairs[0][0].basename} under {self.url} is lost or damaged ({why}), "
            "and without it the epoch would lose rows; restore it there or convert the stream again."
        )


def files(shard: Reader) -> list[FileInfo]:
    """Every file of a shard that the index describes, packed and unpacked."""
    return [info for pair in shard.file_pairs for info in pair if info]


def reason(error: Exception) -> str:
    """An error of another library as a part of one of our sentences."""
    text = " ".join(str(error).split()).rstrip(".")
    return text or type(error).__name__
