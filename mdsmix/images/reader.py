"""The images of conversations, read and looked at: each is good, or makes its record bad.

Of a few hundred conversations all images are held, up to KEEP_BYTES; what is beyond is read a second time when its row is laid
out, so memory is bounded however large the images are. An image that many records share is decoded once by a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from mdsmix.encode.encoded import Detail, Rejected
from mdsmix.errors import Unreachable
from mdsmix.images.change import Rewriting
from mdsmix.images.check import Bad, Looked, Rules, look
from mdsmix.images.files import Files, Read, ahead
from mdsmix.images.paths import ImagePlace, find
from mdsmix.record import Conversation
from mdsmix.storage import CHANGED, Location

KEEP_BYTES = 32 << 20
"Of images that are held at once."
AIM_BYTES = 16 << 20
"Of the images of the records that are taken at once, by the size of those before."
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

_known: dict[tuple[Rules, bytes], Looked] = {}


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
    source: Any = None
    tokens: int = 0
    "What the recipe's processor makes of it; 0 without one."

    @property
    def content(self) -> bytes:
        return self.data if self.data is not None else self.source.again(self)


@dataclass(frozen=True, slots=True)
class BadImage:
    """An image that is bad, or that could not be read."""

    reason: str
    why: str
    digest: str = ""
    "Of its bytes, where they could be read."


ImageSource = ImagePlace | bytes | BadImage
"An image of a record: where it is, itself, or why its path names no place."


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

    def add(self, image: Image | BadImage) -> None:
        self.count += 1
        said = image.digest or (image.reason if isinstance(image, BadImage) else "")
        self.hasher.update(f"{said}\n")


@dataclass(frozen=True, slots=True)
class _Again:
    """Where an image that is not held is read again."""

    files: Files
    at: ImagePlace
    change: Rewriting

    def again(self, image: Image) -> bytes:
        (found,) = self.files.read([self.at])
        if xxhash.xxh3_128_hexdigest(found.data) != image.digest:
            raise Unreachable(CHANGED.format(url=self.at.url))
        return self.change.apply(
            found.data, look(found.data, Rules(decode="header", max_pixels=1 << 62))
        )[0]


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
    files: Files = field(default_factory=Files)
    judges: bool = True
    "Whether images are looked at, or only known by their bytes."
    seen: WindowImages = field(default_factory=WindowImages)
    _record_bytes: float = 0.0
    "Of the images of a record, on average over the last ones."

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
            files=Files(fetches=settings.get("http") == "fetch"),
        )

    @property
    def most_records(self) -> int:
        """How many records to take at once."""
        if not self._record_bytes:
            return FIRST_RECORDS
        return max(1, min(MOST_RECORDS, int(AIM_BYTES / self._record_bytes)))

    def read(
        self, conversations: Sequence[Conversation], folders: Sequence[Location]
    ) -> list[list[Image] | Rejected]:
        """The images of each conversation, or why one of them makes it bad. `folders`: of the file of each, where there is no root.
        With neither, as where a few records are only looked at, no image is read, and each is taken for good."""
        if not folders and self.root is None:
            return [[Image(0, 0, 0, "", b"") for _ in each.images] for each in conversations]
        bases = [self.root] * len(conversations) if self.root else folders
        each = zip(conversations, bases, strict=True)
        wanted = [[self._place(image, base) for image in self._few(said)] for said, base in each]
        found = self._all(dict.fromkeys(image for of in wanted for image in of))
        return [
            self._judged(position, said, [found[image] for image in of])
            for position, (said, of) in enumerate(zip(conversations, wanted, strict=True))
        ]

    def _few(self, conversation: Conversation) -> Sequence[str | bytes]:
        """Its images; none where they are too many to be read."""
        most = self.max_images
        is_few = most is None or len(conversation.images) <= most
        return conversation.images if is_few else ()

    def _place(self, image: str | bytes, base: Location) -> ImageSource:
        try:
            return image if isinstance(image, bytes) else find(image, base, self.inside)
        except Bad as bad:
            return BadImage(bad.reason, bad.why)

    def _judged(
        self, position: int, conversation: Conversation, images: Sequence[Image | BadImage]
    ) -> list[Image] | Rejected:
        for image in images:
            self.seen.add(image)
        if len(images) < len(conversation.images):
            counts = {"images": len(conversation.images), "max_images": self.max_images or 0}
            self.seen.add(BadImage("too_many_images", ""))
            return Rejected(position, "too_many_images", False, counts)
        return judged(position, conversation, images)

    def _all(self, wanted: Mapping[ImageSource, None]) -> dict[ImageSource, Image | BadImage]:
        """Each image once, however many records have it."""
        held, found = 0, dict[ImageSource, Image | BadImage]()
        places = [each for each in wanted if isinstance(each, ImagePlace)]
        for each in wanted:
            if isinstance(each, bytes):
                found[each] = self._look(Read(each), None)
            elif isinstance(each, BadImage):
                found[each] = each
        for at, read, image in self._looked(places):
            self._note(at, read, image)
            if isinstance(image, Image) and image.data is not None:
                if held + image.size > KEEP_BYTES:
                    image.data = None
                else:
                    held += image.size
            found[at] = image
        return found

    def _looked(
        self, places: Sequence[ImagePlace]
    ) -> Iterator[tuple[ImagePlace, Read, Image | BadImage]]:
        """The images at these places, in order. Pillow decodes outside of Python's lock, so two decode at a time: a source of few
        work units keeps more than as many processors busy."""
        reads = zip(places, self.files.read(places), strict=True)
        if not self.judges or (self.rules.decode != "full" and self.change.is_none):
            yield from ((at, read, self._look(read, at)) for at, read in reads)
            return

        def look_at(each: tuple[ImagePlace, Read]) -> tuple[ImagePlace, Read, Image | BadImage]:
            return *each, self._look(each[1], each[0])

        yield from ahead(DECODERS, lambda: 2 * DECODERS, look_at, reads)

    def _look(self, read: Read, at: ImagePlace | None) -> Image | BadImage:
        if read.reason:
            return BadImage(read.reason, read.why)
        digest = xxhash.xxh3_128(read.data)
        if not self.judges:
            return Image(0, 0, len(read.data), digest.hexdigest(), None)
        looked = _looked(self.rules, digest.digest(), read.data)
        if looked.reason:
            return BadImage(looked.reason, looked.why, digest.hexdigest())
        try:
            data, stored = self.change.apply(read.data, looked)
        except Bad as bad:
            return BadImage(bad.reason, bad.why, digest.hexdigest())
        source = _Again(self.files, at, self.change) if at else None
        return Image(stored.height, stored.width, len(data), digest.hexdigest(), data, source)

    def _note(self, at: ImagePlace, read: Read, image: Image | BadImage) -> None:
        if at.place is None:
            said = image.digest if isinstance(image, Image) else image.reason
            self.seen.fetched[at.url] = said
        else:
            self.seen.stamps[at.url] = (read.stat.size, read.stat.stamp) if read.stat else (-1, "")

    def weigh(self, images: Sequence[Sequence[Image]]) -> None:
        """Learns how large the images of a record are."""
        for of in images:
            size = sum(image.size for image in of)
            self._record_bytes += (size - self._record_bytes) / (16 if self._record_bytes else 1)


def judged(
    position: int, conversation: Conversation, images: Sequence[Image | BadImage]
) -> list[Image] | Rejected:
    """The images of a conversation, or why the first bad one, or all together, make it bad."""
    good = [image for image in images if isinstance(image, Image)]
    if len(good) == len(images):
        size = sum(image.size for image in good)
        if size > MOST_ROW_BYTES:
            detail = {"bytes": size, "most": MOST_ROW_BYTES}
            return Rejected(position, "images_too_large", False, detail)
        return good
    number, bad = next((n, i) for n, i in enumerate(images) if isinstance(i, BadImage))
    path = conversation.images[number]
    named: Detail = {"image": path[:SHOWN]} if isinstance(path, str) else {"image_number": number}
    return Rejected(position, bad.reason, False, {**named, "why": bad.why})


def _looked(rules: Rules, digest: bytes, data: bytes) -> Looked:
    key = (rules, digest)
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = look(data, rules)
    return _known[key]
