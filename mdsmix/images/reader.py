"""The images of conversations, read and judged: each is good, or makes its record bad.

Several are read at a time, as many as hold few enough bytes: a store takes 20 ms for each, and so do a network's disk and a cold one.
Of a few hundred conversations all images are held, up to KEEP_BYTES; what is beyond is read a second time when its row is laid
out, so memory is bounded however large the images are. An image that many records share is decoded once by a worker.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from threading import Semaphore
from typing import Any

import xxhash

from mdsmix.encode.processor_server import SizeCounts
from mdsmix.errors import Unreachable
from mdsmix.images.fetching import AT_ONCE, MISSING, NOWHERE, ImagePlace, content_at, find
from mdsmix.images.judge import Bad, Rewriting, Rules, size_of
from mdsmix.record import Conversation, NoRecord
from mdsmix.storage import CHANGED, Location

KEEP_BYTES = 32 << 20
"Of images that are held at once."
AIM_BYTES = 16 << 20
"Of the images of the records that are taken at once, by the size of those before."
IN_FLIGHT = 16
"Images that one worker reads at a time."
AHEAD_BYTES = 32 << 20
"Of images that are read ahead, while they are no larger than those before."
FIRST_BYTES = 8 << 20
"Of an image, before one was read."
DECODERS = 2
"Images that one worker decodes at a time: its memory holds the pixels of as many."
FIRST_RECORDS, MOST_RECORDS = 16, 256
"Taken at once before any image was seen, and however small they are."
MOST_ROW_BYTES = 1 << 30
"Of all images of a record: a shard has offsets of 32 bits."
MOST_KNOWN = 100_000
"Images whose verdict a worker remembers, 200 bytes each: to decode a JPEG of 1,120 x 1,120 takes 4 ms."
SHOWN = 300
"Characters of a path that a bad record keeps."
Wanted = tuple[str | bytes, Location]
"An image as its record says it, and the folder at which its path begins."

_known: dict[tuple[Rules, str], tuple[int, int]] = {}
"Height and width of a good image by its digest."


@dataclass(slots=True, kw_only=True)
class Image:
    """An image of a record, or why it is bad or could not be read."""

    height: int = 0
    width: int = 0
    size: int = 0
    "Of the bytes that are stored."
    digest: str = ""
    "xxh3_128 of the bytes as they were found; empty where they could not be read."
    data: bytes | None = None
    "What is stored; None where it is to be read again."
    stamp: tuple[int, str] = MISSING
    "Size and stamp of its file."
    at: ImagePlace = NOWHERE
    reader: ImageReader | None = None
    "By which it is read again."
    tokens: int = 0
    "What the recipe's processor makes of it; 0 without one."
    reason: str = ""
    "The reason code of a bad one."
    why: str = ""

    @property
    def content(self) -> bytes:
        """Unreachable where the file was changed since."""
        if self.data is None and self.reader:
            again = self.reader.judged(self.at)
            if again.digest != self.digest:
                raise Unreachable(CHANGED.format(url=self.at.url))
            return again.data or b""
        return self.data or b""


@dataclass(slots=True)
class WindowImages:
    """What the images of a window were found to be, for its key and for the next run."""

    said: list[str] = field(default_factory=list)
    "The digest of each image, or the reason why it has none."
    stamps: dict[str, tuple[int, str]] = field(default_factory=dict)
    "URL of each file -> its size and stamp; -1 where there was none."
    fetched: dict[str, str] = field(default_factory=dict)
    "URL -> hash of what a server gave."

    @property
    def digest(self) -> str:
        """Of all images, in order; "" where there are none. Equal digests of equal lines give equal rows."""
        lines = "".join(f"{said}\n" for said in self.said)
        return xxhash.xxh3_128_hexdigest(lines) if lines else ""


@dataclass
class ImageReader:
    """Reads the images of conversations."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    "Of a stream's images, as the manifest has them."
    root: Location | None = None
    "Where paths begin; None: at the folder of the record's file."
    judges: bool = True
    "Whether images are looked at, or only known by their bytes."
    seen: WindowImages = field(default_factory=WindowImages)
    _record_bytes: float | None = None
    "Of the images of a record, on average over the last ones; None before the first."
    _bytes: float = FIRST_BYTES
    "Of the largest of the last images, the less the longer ago it was."

    def __post_init__(self) -> None:
        given = self.settings
        self.rules = Rules(**{key: given[key] for key in ("decode", "max_pixels") if key in given})
        changes = [given.get(key) or {} for key in ("resize", "reencode")]
        self.change = Rewriting(**changes[0], **changes[1])
        self.most_images = given.get("max_images") or sys.maxsize
        self.fetches = given.get("http") == "fetch"
        self._decoding = Semaphore(DECODERS)
        digest = given.get("processor") if self.judges else None
        self._counts = SizeCounts(digest) if digest else None
        "How many tokens the recipe's processor makes of an image of a size."

    @property
    def most_records(self) -> int:
        """How many records to take at once."""
        if self._record_bytes is None:
            return FIRST_RECORDS
        return max(1, min(MOST_RECORDS, int(AIM_BYTES / max(1, self._record_bytes))))

    def read(self, found: Sequence[Any], folders: Sequence[Location] = ()) -> list[Any]:
        """Conversations with their images as `Image`; in place of one with a bad image its reason code. What is a reason already stays.

        Args:
            folders: of the file of each, where there is no root. With neither, as where a few records are only looked at, no image is
                read, and each is taken for good.
        """
        if not folders and self.root is None:
            return [
                said
                if isinstance(said, str)
                else said._replace(images=[Image(data=b"") for _ in said.images])
                for said in found
            ]
        wanted = list[list[Wanted]]()
        for number, said in enumerate(found):
            is_read = not isinstance(said, str) and len(said.images) <= self.most_images
            base = self.root or folders[number]
            wanted.append([(image, base) for image in said.images] if is_read else [])
        images = self._all(dict.fromkeys(chain(*wanted)))
        return [
            said if isinstance(said, str) else self._judge(said, [images[each] for each in of])
            for said, of in zip(found, wanted, strict=True)
        ]

    def _judge(self, said: Conversation, images: list[Image]) -> Conversation | NoRecord:
        for image in images:
            self.seen.said.append(image.digest or image.reason)
        size, count = sum(image.size for image in images), len(said.images)
        self.weigh(size)
        if len(images) < count:
            self.seen.said.append("too_many_images")
            return NoRecord("too_many_images", images=count, max_images=self.most_images)
        for number, (path, image) in enumerate(zip(said.images, images, strict=True)):
            if image.reason:
                named = path[:SHOWN] if isinstance(path, str) else f"number {number} of the record"
                return NoRecord(image.reason, image=named, why=image.why)
        if size > MOST_ROW_BYTES:
            return NoRecord("images_too_large", bytes=size, most=MOST_ROW_BYTES)
        return said._replace(images=images)

    def weigh(self, size: int) -> None:
        """Learns how large the images of a record are."""
        before = self._record_bytes
        self._record_bytes = before + (size - before) / 16 if before else float(size)

    def _all(self, wanted: Mapping[Wanted, None]) -> dict[Wanted, Image]:
        """Each image once, however many records have it."""
        held, found = 0, dict[Wanted, Image]()
        for each, image in zip(wanted, self._ahead(wanted), strict=True):
            found[each] = image
            if image.at.place:
                self.seen.stamps[image.at.url] = image.stamp
            elif image.at.url:
                self.seen.fetched[image.at.url] = image.digest or image.reason
            if held + image.size > KEEP_BYTES:
                image.data = None
            held += len(image.data or b"")
        if self._counts:
            good = [image for image in found.values() if not image.reason]
            tokens = self._counts.of((image.height, image.width) for image in good)
            for image in good:
                of = tokens[image.height, image.width]
                if isinstance(of, str):
                    image.reason, image.why = "image_refused", of
                else:
                    image.tokens = of
        return found

    def _ahead(self, wanted: Mapping[Wanted, None]) -> Iterator[Image]:
        """Each image, in order. Pillow decodes outside of Python's lock, so two decode at a time: a source of few work units keeps
        more than as many processors busy."""
        coming, rest = deque[Any](), iter(wanted)
        most, pool = AT_ONCE if self.fetches else IN_FLIGHT, _pool(os.getpid())
        while True:
            room = max(1, min(most, int(AHEAD_BYTES / self._bytes)))
            for each in islice(rest, max(0, room - len(coming))):
                coming.append(pool.submit(self.one, *each))
            if not coming:
                return
            yield coming.popleft().result()

    def one(self, image: str | bytes, base: Location) -> Image:
        """Finds, reads and judges one image."""
        try:
            return self.judged(find(image, base, self.settings.get("outside") == "refuse"))
        except Bad as bad:
            return Image(reason=bad.reason, why=bad.why)

    def judged(self, at: ImagePlace) -> Image:
        found = Image(at=at, reader=self)
        try:
            data, found.stamp = content_at(at, self.fetches)
            self._bytes = max(len(data), self._bytes * 15 / 16, 1)
            found.digest, found.size = xxhash.xxh3_128_hexdigest(data), len(data)
            if self.judges:
                with self._decoding:
                    key = self.rules, found.digest
                    size = _known.get(key) or size_of(data, self.rules)
                    if len(_known) >= MOST_KNOWN:
                        _known.clear()
                    _known[key] = size
                    found.data, found.height, found.width = self.change.apply(data, *size)
                found.size = len(found.data)
        except Bad as bad:
            found.reason, found.why, found.size = bad.reason, bad.why, 0
            found.stamp = bad.stamp or found.stamp
        return found


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """One in each process: threads do not come along where a worker is forked."""
    return ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="images")
