"""A stream of a loader whose index and shards are checked before a row is read. An error names the
stream, the shard and what is wrong with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from streaming import Stream
from streaming.base.format import FileInfo, Reader
from streaming.base.hashing import get_hash
from streaming.base.world import World

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.load.internals import copy_without_connection, drop_connection
from mdsmix.messages import flatten_error, plural

BEST_HASH = "best"
"""`validate_hash` if the YAML does not set it: the fastest algorithm whose hash the index has for
every shard, or none.
"""
FASTEST_FIRST = ("xxh3_64", "xxh128", "xxh3_128", "xxh64", "sha1", "xxh32", "sha256", "md5")
"Hash algorithms that an index may name, the fastest first."


class CheckedStream(Stream):  # type: ignore[misc]
    """A stream of the loader: Streaming's Stream with a name. Its index is checked when it is
    opened, and each shard before it is read.
    """

    def __init__(self, *, name: str, **settings: Any):
        """Open the stream. Raises Unreachable if a package that Streaming needs is not installed.

        Args:
            name: the stream's name, for messages and the lock.
            settings: the keywords of Streaming's Stream.
        """
        try:
            super().__init__(**settings)
        except ImportError as error:
            raise Unreachable(
                f"Stream {name}: a package with which Streaming reads {settings.get('remote')} is "
                f"not installed ({error}); install mosaicml-streaming with the extra for this "
                "store."
            ) from error
        self.name = name

    def __getstate__(self) -> dict[str, Any]:
        return copy_without_connection(self)

    @property
    def url(self) -> str:
        """The folder or URL at which the stream was published."""
        return os.path.join(self.remote or self.local, self.split).rstrip("/")

    @property
    def is_cached(self) -> bool:
        """Whether `local` contains copies of a remote stream. A damaged copy may be deleted and
        fetched again.
        """
        real = os.path.realpath
        return bool(self.remote) and real(self.remote) != real(self.local)

    def get_shards(self, world: World, allow_unsafe_types: bool) -> list[Reader]:
        """Return a reader for each shard of index.json. Raises Unreachable if the index is missing
        or cannot be used.
        """
        try:
            shards: list[Reader] = super().get_shards(world, allow_unsafe_types)
            files = _list_files(shards)
            if not any(map(len, shards)):
                raise ValueError("the index lists no samples")
            for file in files:
                path = PurePosixPath(file.basename)
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(f"the index lists the shard {path}, outside its own folder")
        except Exception as error:
            raise Unreachable(
                f"Stream {self.name}: index.json under {self.url} cannot be used "
                f"({describe_error(error)}), so no row of the stream can be loaded; convert the "
                "stream, or correct its remote, local and split in the training YAML."
            ) from error
        # The index is read; a forked worker would share the connection that fetched it.
        drop_connection(self)
        self.validate_hash = self._choose_hash(files)
        self._refuse_deletion(shards)
        return shards

    def _refuse_deletion(self, shards: Sequence[Reader]) -> None:
        """Raise RecipeError if Streaming would delete decompressed shards of a stream without a
        remote. It does so if their compressed files, which it wants to keep, are missing.
        """
        if self.remote and self.remote != self.local:
            return
        folder = Path(self.local, self.split)
        endangered = 0
        for shard in shards:
            for raw, compressed in shard.file_pairs:
                is_missing = compressed and not (folder / compressed.basename).exists()
                if is_missing and (folder / raw.basename).exists():
                    endangered += 1
        if endangered:
            raise RecipeError(
                f"Stream {self.name}: {folder} looks like the cache of a remote: its index.json "
                f"lists {plural(len(shards), 'shard')} as compressed, but {endangered:,} of them "
                "exist only decompressed. Without a remote, Streaming would delete these "
                "decompressed shards when it opens the stream, so nothing was opened or changed. "
                "Set the stream's remote in the training YAML to the URL that it was fetched from."
            )

    def _choose_hash(self, files: list[FileInfo]) -> str | None:
        """Return the hash algorithm with which shards are checked, or None if they are not checked
        by hashes.

        Raises RecipeError if the YAML names an algorithm that a shard lacks.
        """
        # The algorithms for which every file has a hash.
        available = set.intersection(*(set(file.hashes) for file in files))
        if self.validate_hash == BEST_HASH:
            return next((name for name in FASTEST_FIRST if name in available), None)
        if not self.validate_hash or self.validate_hash in available:
            return self.validate_hash
        names = ", ".join(sorted(available))
        present = f"hashes by {names}" if available else "no hashes"
        raise RecipeError(
            f"Stream {self.name}: validate_hash is {self.validate_hash}, but the shards in its "
            f"index.json have {present}, so Streaming would give no rows at all; set "
            "validate_hash in the training YAML to an algorithm of the index, or remove it."
        )

    def prepare_shard(self, shard: Reader) -> int:
        """Fetch and decompress a shard, and check its size. Return by how many bytes the cache
        grew.
        """
        try:
            change: int = super().prepare_shard(shard)
            self.check(shard, with_hash=False)
        except Exception as error:
            if self.is_cached:
                shard.evict()  # deletes the damaged copy, so that it is fetched again
            raise self.make_shard_error(shard, describe_error(error)) from error
        return change

    def check(self, shard: Reader, with_hash: bool = True) -> None:
        """Compare the sizes of a shard's decompressed files, and `with_hash` their hashes, with the
        index.

        Raises ValueError if one is damaged, FileNotFoundError if one is missing.
        """
        for raw, _ in shard.file_pairs:
            path = Path(self.local, self.split, raw.basename)
            size = path.stat().st_size
            if size != raw.bytes:
                raise ValueError(
                    f"{path} has {size} bytes, but the stream's index states {raw.bytes}"
                )
            algorithm = self.validate_hash
            expected = raw.hashes.get(algorithm) if with_hash else None
            if expected and get_hash(algorithm, np.memmap(path, np.uint8, "r")) != expected:
                raise ValueError(
                    f"{path} does not have the {algorithm} hash that the stream's index states"
                )

    def is_leftover_whole(self, shard: Reader) -> bool:
        """Check a shard that an earlier run left in `local`. Return False if it is a damaged copy,
        which can be fetched again.

        Return True if its decompressed file is missing, since it was evicted or only the compressed
        file is there: the file is checked when Streaming prepares it.
        Raises Unreachable if the shard is damaged and is not a copy.
        """
        try:
            self.check(shard)
        except FileNotFoundError:
            return True
        except ValueError as damage:
            if not self.is_cached:
                raise self.make_shard_error(shard, describe_error(damage)) from damage
            return False
        return True

    def make_shard_error(self, shard: Reader, why: str) -> Unreachable:
        """Return the error that the training loop gets for a shard that cannot be used."""
        raw, _ = shard.file_pairs[0]  # an MDS shard has one pair: decompressed, compressed
        return Unreachable(
            f"Stream {self.name}: shard {raw.basename} under {self.url} is lost or damaged "
            f"({why}), so the epoch would lose its rows; restore the file there or convert the "
            "stream again."
        )

    def make_row_error(self, shard: Reader, position: int, error: Exception) -> Unreachable:
        """Return the error that the training loop gets for a row that cannot be read or decoded.

        Args:
            position: the number of the row in the shard.
        """
        return self.make_shard_error(shard, f"row {position}: {describe_error(error)}")

    def describe_row(self, shard: Reader, position: int) -> str:
        """Return the name of a row, for messages: its stream, its shard and its number there."""
        return f"Stream {self.name}, shard {shard.file_pairs[0][0].basename}, row {position}"


def _list_files(shards: Sequence[Reader]) -> list[FileInfo]:
    """List the files of shards, decompressed and compressed."""
    files = list[FileInfo]()
    for shard in shards:
        for raw, compressed in shard.file_pairs:
            files.append(raw)
            if compressed:
                files.append(compressed)
    return files


def describe_error(error: Exception) -> str:
    """Return the message of another library's error on one line, to be put into a sentence; the
    name of the error's class if it has no message.
    """
    return flatten_error(error) or type(error).__name__
