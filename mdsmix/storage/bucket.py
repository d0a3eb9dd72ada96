"""What all stores of objects share: a place in a bucket, and its listings.

A store has one listing, which gives files and folders together.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, ClassVar

from mdsmix.errors import RecipeError
from mdsmix.storage.location import Entries, Listing, Location, Stat, has_pattern, refuse_dots
from mdsmix.storage.object_reader import make_version_reader
from mdsmix.storage.threads import map_threads

if TYPE_CHECKING:  # Python 3.10 has no Self
    from typing_extensions import Self


class BucketPath(Location):
    """An object or folder in a bucket. The path is the bucket, a slash and the key, without slashes
    around the key; the path of the bucket itself is the bucket.
    """

    __slots__ = ()
    container_noun = "bucket"
    container_depth = 1
    has_cheap_listings = True
    needs_credentials = True
    bucket_name: ClassVar[re.Pattern[str]] = re.compile(".+")
    "Matches each name that a bucket of the store may have."
    bucket_rule = ""
    "A phrase on such names for a message, such as `names of buckets have no capital letters`."

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return the location of a URL such as `s3://bucket/key`.

        Raises RecipeError if the URL has no bucket or a name that no bucket has, such as a pattern,
        or if its key has a part `..`.
        """
        refuse_dots(url)
        bucket, _, key = url.removeprefix(cls.scheme).partition("/")
        if not bucket or has_pattern(bucket):
            raise RecipeError(
                f"{url} does not name a bucket: write {cls.example_url}, with the bucket's full "
                "name and no pattern in it"
            )
        if not cls.bucket_name.fullmatch(bucket):
            raise RecipeError(
                f"{url} names the {cls.container_noun} {bucket}, but {cls.bucket_rule}: correct "
                "the name"
            )
        return cls(f"{bucket}/{key.strip('/')}".rstrip("/"))

    @property
    def bucket(self) -> str:
        """The bucket's name; on the hub its id, `org/name`."""
        return self.container

    @property
    def key(self) -> str:
        """The path in the bucket; "" for the bucket itself."""
        return self.path[len(self.container) + 1 :]

    @property
    def _prefix(self) -> str:
        """The beginning of the keys of all objects in this folder: `key/`; "" for the bucket."""
        return f"{self.key}/" if self.key else ""

    def open_random(self, stat: Stat, ahead: int = 1 << 20) -> BinaryIO:
        """Return a reader of this object that can seek. It reads the version whose size and stamp
        are `stat`; a request asks for at least `ahead` bytes.

        Raises Unreachable at a read if the object has another stamp.
        """
        return make_version_reader(self, stat, ahead)

    def delete_all(self, names: Sequence[str]) -> None:
        """Delete the objects with these names below this folder, sixteen at a time."""
        map_threads(lambda name: (self / name).delete(), names)

    def list(self, recursive: bool = False, beginning: str = "") -> Listing:
        files, _ = self._list_entries(recursive, beginning)
        yield from sorted(files.items())  # some stores list in another order

    def folders(self) -> Iterator[str]:
        _, folders = self.entries()
        yield from sorted(folders)

    def entries(self) -> Entries:
        return self._list_entries()

    @abstractmethod
    def _list_entries(self, recursive: bool = False, beginning: str = "") -> Entries:
        """Return (files, folders) below this folder: name -> Stat of the files, and the names of
        the folders. Names are relative to this folder.

        Args:
            recursive: False: only files and folders directly in this folder; True: files at any
                depth, and no folders.
            beginning: a hint: a store may leave out names that do not start with this string.
        """
