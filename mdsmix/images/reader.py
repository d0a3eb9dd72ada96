"""The images of conversations, read and judged: each is good, or makes its record bad.

Several are read at a time, as many as hold few enough bytes: a store takes 20 ms for each, and so do a network's disk and a cold one.
Of a few hundred conversations all images are held, up to KEEP_BYTES; what is beyond is read a second time when its row is laid
out, so memory is bounded however large the images are. An image that many records share is decoded once by a worker.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from threading import Semaphore
from typing import TYPE_CHECKING, Any

import xxhash

from mdsmix.encode.encoded import Detail, Rejected
from mdsmix.errors import Unreachable
from mdsmix.images.change import Rewriting
from mdsmix.images.fetching import MISSING, ImagePlace, content_at, find
from mdsmix.images.http import AT_ONCE
from mdsmix.images.judge import Bad, Rules, size_of
from mdsmix.record import Conversation
from mdsmix.storage import CHANGED, Location

if TYPE_CHECKING:
    from mdsmix.encode.processor_server import SizeCounts

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
"Images whose verdict a worker remembers, 200 bytes each."
SHOWN = 300
"Characters of a path that a bad record keeps."

_known: dict[tuple[Rules, bytes], tuple[int, int] | tuple[str, str]] = {}
"Height and width of an image by its bytes, or the reason code and why it is bad."


@dataclass(slots=True)
class Image:
    """An image of a record."""

    height: int
    width: int
    size: int
    "As they are stored."
    digest: str
    "xxh3_128 of the bytes as they were found."
    data: bytes | None
    "What is stored; None where it is to be read again."
    stamp: tuple[int, str] = MISSING
    "Size and stamp of its file."
    source: tuple[ImageReader, ImagePlace] | None = None
    "From where it is read again."
    tokens: int = 0
    "What the recipe's processor makes of it; 0 without one."

    @property
    def content(self) -> bytes:
        """Unreachable where the file was changed since."""
        if self.data is not None or not self.source:
            return self.data or b""
        reader, at = self.source
        found = reader.one(at)
        if not isinstance(found, Image) or found.digest != self.digest:
            raise Unreachable(CHANGED.format(url=at.url))
        return found.data or b""


@dataclass(frozen=True, slots=True)
class BadImage:
    """An image that is bad, or that could not be read."""

    reason: str
    why: str
    digest: str = ""
    "Of its bytes, where they could be read."
    stamp: tuple[int, str] = MISSING


@dataclass(slots=True)
class WindowImages:
    """What the images of a window were found to be, for its key and for the next run."""

    hasher: Any = field(default_factory=xxhash.xxh3_128)
    count: int = 0
    stamps: dict[str, tuple[int, str]] = field(default_factory=dict)
    "URL of each file -> its size and stamp; -1 where there was none."
    fetched: dict[str, str] = field(default_factory=dict)
    "URL -> hash of what a server gave."

    @property
    def digest(self) -> str:
        """Of all images, in order; "" where there are none. Equal digests of equal lines give equal rows."""
        return self.hasher.hexdigest() if self.count else ""

    def add(self, said: str) -> None:
        """The digest of an image, or the reason why it has none."""
        self.count += 1
        self.hasher.update(f"{said}\n")

    def note(self, at: ImagePlace, image: Image | BadImage) -> None:
        if at.place is None:
            self.fetched[at.url] = image.digest if isinstance(image, Image) else image.reason
        else:
            self.stamps[at.url] = image.stamp


@dataclass(slots=True, kw_only=True)
class ImageReader:
    """Reads the images of conversations."""

    rules: Rules = field(default_factory=Rules)
    change: Rewriting = field(default_factory=Rewriting)
    max_images: int | None = None
    root: Location | None = None
    "Where paths begin; None: at the folder of the record's file."
    inside: bool = False
    "Whether an image has to lie below there."
    fetches: bool = False
    "Whether http URLs are asked."
    judges: bool = True
    "Whether images are looked at, or only known by their bytes."
    seen: WindowImages = field(default_factory=WindowImages)
    _record_bytes: float = 0.0
    "Of the images of a record, on average over the last ones."
    _bytes: float = FIRST_BYTES
    "Of the largest of the last images, the less the longer ago it was."
    _decoding: Semaphore = field(default_factory=partial(Semaphore, DECODERS))

    @staticmethod
    def of(settings: Mapping[str, Any], root: Location | None = None) -> ImageReader:
        """By a stream's settings of images, as the manifest has them."""
        asked = {key: settings[key] for key in ("decode", "max_pixels") if key in settings}
        return ImageReader(
            rules=Rules(**asked),
            change=Rewriting.of(settings),
            max_images=settings.get("max_images"),
            root=root,
            inside=settings.get("outside") == "refuse",
            fetches=settings.get("http") == "fetch",
        )

    @property
    def most_records(self) -> int:
        """How many records to take at once."""
        if not self._record_bytes:
            return FIRST_RECORDS
        return max(1, min(MOST_RECORDS, int(AIM_BYTES / self._record_bytes)))

    def read(
        self,
        conversations: Sequence[Conversation],
        folders: Sequence[Location],
        counts: SizeCounts | None = None,
    ) -> list[list[Image] | Rejected]:
        """The images of each conversation, or why one of them makes it bad.

        Args:
            folders: of the file of each, where there is no root. With neither, as where a few records are only looked at, no image is
                read, and each is taken for good.
            counts: how many tokens the recipe's processor makes of an image of a size.
        """
        if not folders and self.root is None:
            return [[Image(0, 0, 0, "", b"") for _ in each.images] for each in conversations]
        bases = [self.root] * len(conversations) if self.root else folders
        each = list(zip(conversations, bases, strict=True))
        wanted = [[self._find(image, base) for image in self._few(said)] for said, base in each]
        found = self._all(dict.fromkeys(image for of in wanted for image in of))
        if counts:
            found = _counted(found, counts)
        read = [
            self._judged(position, said, [found[image] for image in of])
            for position, (said, of) in enumerate(zip(conversations, wanted, strict=True))
        ]
        self.weigh([() if isinstance(images, Rejected) else images for images in read])
        return read

    def _few(self, conversation: Conversation) -> Sequence[str | bytes]:
        """Its images; none where they are too many to be read."""
        most = self.max_images
        is_few = most is None or len(conversation.images) <= most
        return conversation.images if is_few else ()

    def _find(self, image: str | bytes, base: Location) -> ImagePlace | bytes | BadImage:
        try:
            return image if isinstance(image, bytes) else find(image, base, self.inside)
        except Bad as bad:
            return BadImage(bad.reason, bad.why)

    def _judged(
        self, position: int, conversation: Conversation, images: Sequence[Image | BadImage]
    ) -> list[Image] | Rejected:
        for image in images:
            self.seen.add(image.digest or getattr(image, "reason", ""))
        if len(images) < len(conversation.images):
            counts = {"images": len(conversation.images), "max_images": self.max_images or 0}
            self.seen.add("too_many_images")
            return Rejected(position, "too_many_images", False, counts)
        for number, image in enumerate(images):
            if isinstance(image, BadImage):
                path = conversation.images[number]
                named: Detail = {"image_number": number}
                if isinstance(path, str):
                    named = {"image": path[:SHOWN]}
                return Rejected(position, image.reason, False, {**named, "why": image.why})
        good = [image for image in images if isinstance(image, Image)]
        if (size := sum(image.size for image in good)) > MOST_ROW_BYTES:
            detail = {"bytes": size, "most": MOST_ROW_BYTES}
            return Rejected(position, "images_too_large", False, detail)
        return good

    def _all(self, wanted: Iterable[Any]) -> dict[Any, Image | BadImage]:
        """Each image once, however many records have it."""
        held, found = 0, dict[Any, Image | BadImage]()
        for at, image in self._ahead([*wanted]):
            found[at] = image
            if isinstance(at, ImagePlace):
                self.seen.note(at, image)
                if isinstance(image, Image) and image.data is not None:
                    if held + image.size > KEEP_BYTES:
                        image.data = None
                    else:
                        held += image.size
        return found

    def _ahead(self, wanted: Sequence[Any]) -> Iterator[tuple[Any, Image | BadImage]]:
        """What each is, in order. Pillow decodes outside of Python's lock, so two decode at a time: a source of few work units keeps
        more than as many processors busy."""
        is_remote = any(isinstance(at, ImagePlace) and at.place is None for at in wanted)
        most, pool = AT_ONCE if is_remote else IN_FLIGHT, _pool(os.getpid())
        coming, rest = deque[tuple[Any, Future[Image | BadImage]]](), iter(wanted)
        try:
            while True:
                room = max(1, min(most, int(AHEAD_BYTES / max(self._bytes, 1))))
                for at in islice(rest, max(0, room - len(coming))):
                    coming.append((at, pool.submit(self.one, at)))
                if not coming:
                    return
                at, image = coming.popleft()
                yield at, image.result()
        finally:
            for _, waiting in coming:
                waiting.cancel()

    def one(self, at: ImagePlace | bytes | BadImage) -> Image | BadImage:
        """Reads and judges one image."""
        if isinstance(at, BadImage):
            return at
        stamp, digest = MISSING, ""
        try:
            data, stamp = (at, MISSING) if isinstance(at, bytes) else content_at(at, self.fetches)
            self._bytes = max(len(data), self._bytes * 15 / 16)
            hashed = xxhash.xxh3_128(data)
            digest = hashed.hexdigest()
            if not self.judges:
                return Image(0, 0, len(data), digest, None, stamp)
            with self._decoding:
                size = _known_size(self.rules, hashed.digest(), data)
                stored, height, width = self.change.apply(data, *size)
        except Bad as bad:
            return BadImage(bad.reason, bad.why, digest, bad.stamp or stamp)
        source = (self, at) if isinstance(at, ImagePlace) else None
        return Image(height, width, len(stored), digest, stored, stamp, source)

    def weigh(self, images: Sequence[Sequence[Image]]) -> None:
        """Learns how large the images of a record are."""
        for of in images:
            size = sum(image.size for image in of)
            self._record_bytes += (size - self._record_bytes) / (16 if self._record_bytes else 1)


def _counted(
    found: Mapping[Any, Image | BadImage], counts: SizeCounts
) -> dict[Any, Image | BadImage]:
    """With the tokens that the processor makes of each image; one that it refuses is bad."""
    good = {at: image for at, image in found.items() if isinstance(image, Image)}
    tokens = counts.of((image.height, image.width) for image in good.values())
    refused = dict[Any, Image | BadImage]()
    for at, image in good.items():
        by = tokens[image.height, image.width]
        if isinstance(by, str):
            refused[at] = BadImage("image_refused", by, image.digest)
        else:
            image.tokens = by
    return {**found, **refused}


def _known_size(rules: Rules, digest: bytes, data: bytes) -> tuple[int, int]:
    """Height and width; Bad where the image is bad."""
    key = (rules, digest)
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        try:
            _known[key] = size_of(data, rules)
        except Bad as bad:
            _known[key] = (bad.reason, bad.why)
    one, other = _known[key]
    if isinstance(one, str):
        raise Bad(one, str(other))
    return one, int(other)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """One in each process: threads do not come along where a worker is forked."""
    return ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="images")
