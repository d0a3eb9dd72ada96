"""The images of conversations, read and judged. A bad image makes its record bad.

Several images are read at a time, within AHEAD_BYTES: a store takes 20 ms for each, and so does a
network's disk or a cold one. The images of up to 256 conversations are held at once, up to
KEEP_BYTES. Images beyond are read a second time when their row is laid out, so memory is bounded
however large the images are. A worker decodes an image that many records share once.
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

from mdsmix.errors import Unreachable
from mdsmix.images.fetching import AT_ONCE, MISSING, NOWHERE, ImagePlace, content_at, locate_image
from mdsmix.images.judge import Bad, Rewriting, Rules, judge_image
from mdsmix.processor.counts import count_image_tokens
from mdsmix.record import Conversation, NoRecord
from mdsmix.storage import CHANGED, Location

KEEP_BYTES = 32 << 20
"The most bytes of images that are held at once."
AIM_BYTES = 16 << 20
"""So many records are taken at once that their images come to about as many bytes, judged by the
records before.
"""
IN_FLIGHT = 16
"The most images that one worker reads at a time."
AHEAD_BYTES = 32 << 20
"The most bytes of images that are read ahead, if they are as large as the images before."
FIRST_BYTES = 8 << 20
"The assumed size of an image before one was read."
DECODERS = 2
"The most images that one worker decodes at a time; its memory holds the pixels of each."
FIRST_RECORDS, MOST_RECORDS = 16, 256
"Records taken at once: before any image was seen, and at most."
MOST_ROW_BYTES = 1 << 30
"The most bytes of all images of a record, since a shard has offsets of 32 bits."
MOST_KNOWN = 100_000
"""Good images that a worker remembers, 200 bytes each. Decoding a JPEG of 1,120 x 1,120 again would
take 4 ms.
"""
SHOWN = 300
"Characters of a path that a bad record keeps."
Wanted = tuple[str | bytes, Location]
"An image's path or bytes in its record, and the folder at which the path begins."

_known: dict[tuple[Rules, str], tuple[int, int]] = {}
"Height and width of a good image by its digest."


@dataclass(slots=True, kw_only=True)
class Image:
    """An image of a record; a bad one has a reason code."""

    height: int = 0
    "Pixels, as `width`, of the stored image."
    width: int = 0
    size: int = 0
    "The number of bytes that are stored."
    digest: str = ""
    "xxh3_128 of the bytes as they were found; empty where they could not be read."
    data: bytes | None = None
    "The bytes that are stored; None where they have to be read again."
    stamp: tuple[int, str] = MISSING
    "Size and stamp of the image's file."
    at: ImagePlace = NOWHERE
    reader: ImageReader | None = None
    "Reads the image again."
    tokens: int = 0
    "The tokens that the recipe's processor makes of the image; 0 without a processor."
    reason: str = ""
    "The reason code of a bad image; empty for a good one."
    why: str = ""

    @property
    def content(self) -> bytes:
        """The bytes that are stored, read again where they are not held. Unreachable where the file
        has changed since.
        """
        if self.data is None and self.reader:
            again = self.reader.judged(self.at)
            if again.digest != self.digest:
                raise Unreachable(CHANGED.format(url=self.at))
            return again.data or b""
        return self.data or b""


@dataclass(slots=True)
class WindowImages:
    """Digests and stamps of the images of a window, for the window's key and for the next run."""

    said: list[str] = field(default_factory=list)
    "The digest of each image in order; the reason code of an image that has none."
    stamps: dict[str, tuple[int, str]] = field(default_factory=dict)
    "URL of each file -> its size and stamp; MISSING where there was none."
    fetched: dict[str, str] = field(default_factory=dict)
    "http URL -> digest of the bytes that the server gave, or a reason code."

    @property
    def digest(self) -> str:
        """xxh3_128 of `said`; "" where there are no images. Equal records with equal digests give
        equal rows.
        """
        lines = "".join(f"{said}\n" for said in self.said)
        return xxhash.xxh3_128_hexdigest(lines) if lines else ""


@dataclass
class ImageReader:
    """Reads the images of conversations."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    "A stream's settings of images, as the manifest has them (`Encoding.images`)."
    root: Location | None = None
    "The folder where paths begin; None: that of the record's file."
    judges: bool = True
    "Whether images are judged; False: they are only read and hashed."
    window_images: WindowImages = field(default_factory=WindowImages)
    _record_bytes: float | None = None
    "Bytes of the images of a record: a running average; None before the first record."
    _bytes: float = FIRST_BYTES
    """Bytes of the largest recent image; the value shrinks by a sixteenth with each image that is
    smaller.
    """

    def __post_init__(self) -> None:
        given = self.settings
        self.rules = Rules(**{key: given[key] for key in ("decode", "max_pixels") if key in given})
        changes = [given.get(key) or {} for key in ("resize", "reencode")]
        self.change = Rewriting(**changes[0], **changes[1])
        self.most_images = given.get("max_images") or sys.maxsize
        self.fetches = given.get("http") == "fetch"
        self._decoding = Semaphore(DECODERS)
        self._processor = given.get("processor") if self.judges else None
        "The hash of the recipe's processor, which tells the tokens of an image; None without one."

    @property
    def most_records(self) -> int:
        """How many records to take at once."""
        if self._record_bytes is None:
            return FIRST_RECORDS
        return max(1, min(MOST_RECORDS, int(AIM_BYTES / max(1, self._record_bytes))))

    def read(self, found: Sequence[Any], folders: Sequence[Location] = ()) -> list[Any]:
        """Conversations with their images as `Image`; a conversation with a bad image is replaced
        by its reason code.

        Args:
            found: conversations; reason codes (str) among them stay.
            folders: the folder of each record's file, for a reader without a root. Without folders
            and root, as where a few records are
                only shown, no image is read, and each is taken for good.
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
            self.window_images.said.append(image.digest or image.reason)
        size, count = sum(image.size for image in images), len(said.images)
        self.weigh(size)
        if len(images) < count:
            self.window_images.said.append("too_many_images")
            return NoRecord("too_many_images", images=count, max_images=self.most_images)
        for number, (path, image) in enumerate(zip(said.images, images, strict=True)):
            if image.reason:
                named = path[:SHOWN] if isinstance(path, str) else f"number {number} of the record"
                return NoRecord(image.reason, image=named, why=image.why)
        if size > MOST_ROW_BYTES:
            return NoRecord("images_too_large", bytes=size, most=MOST_ROW_BYTES)
        return said._replace(images=images)

    def weigh(self, size: int) -> None:
        """Adds a record to the running average of `_record_bytes`. `size`: bytes of its images."""
        before = self._record_bytes
        self._record_bytes = before + (size - before) / 16 if before else float(size)

    def _all(self, wanted: Mapping[Wanted, None]) -> dict[Wanted, Image]:
        """The images, each read and judged once, however many records have it."""
        held, found = 0, dict[Wanted, Image]()
        for each, image in zip(wanted, self._ahead(wanted), strict=True):
            found[each] = image
            if isinstance(image.at, str):
                self.window_images.fetched[image.at] = image.digest or image.reason
            elif not isinstance(image.at, bytes):
                self.window_images.stamps[image.at.url] = image.stamp
            if held + image.size > KEEP_BYTES:
                image.data = None
            held += len(image.data or b"")
        if self._processor:
            good = [image for image in found.values() if not image.reason]
            tokens = count_image_tokens(self._processor, ((i.height, i.width) for i in good))
            for image in good:
                of = tokens[image.height, image.width]
                if isinstance(of, str):
                    image.reason, image.why = "image_refused", of
                else:
                    image.tokens = of
        return found

    def _ahead(self, wanted: Mapping[Wanted, None]) -> Iterator[Image]:
        """The images in order, read ahead by threads. Pillow decodes outside of Python's lock, so
        two threads decode at a time: a source of few work units keeps more processors busy than it
        has units.
        """
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
        """Finds, reads and judges one image; a bad one is returned with its reason code. `image`: a
        path, or the bytes.
        """
        try:
            return self.judged(locate_image(image, base, self.settings.get("outside") == "refuse"))
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
                    size = _known.get(key) or judge_image(data, self.rules)
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
    """The threads of a process, by its id: a forked worker needs its own, since it does not inherit
    its parent's.
    """
    return ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="images")
