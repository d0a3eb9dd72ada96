"""Reads and judges the images of conversations. A bad image makes its record bad.

Several images are read at a time, within AHEAD_BYTES: a store takes 20 ms for each image, and so
does a disk in a network or a file that is not in the disk's cache. The images of up to 256
conversations are in memory at once, up to KEEP_BYTES. Further images are read a second time when
their row is written, so memory is bounded however large the images are. An image that many records
share is decoded once by each worker.
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
from typing import Any, NamedTuple

import xxhash

from mdsmix.errors import Unreachable
from mdsmix.images.fetching import (
    AT_ONCE,
    MISSING,
    NOWHERE,
    ImagePlace,
    locate_image,
    read_image_file,
)
from mdsmix.images.judge import BadImage, ImageSize, Rewriting, Rules, judge_image
from mdsmix.processor.counts import count_image_tokens
from mdsmix.record import Conversation, NoRecord
from mdsmix.shapes.preference import Preference
from mdsmix.storage import CHANGED, Location

KEEP_BYTES = 32 << 20
"The most bytes of images that are in memory at once."
AIM_BYTES = 16 << 20
"""About how many bytes of images are read for one group of records. The number of records in a
group is estimated from earlier records.
"""
IN_FLIGHT = 16
"The most images that one worker reads at a time."
AHEAD_BYTES = 32 << 20
"The most bytes of images that are read ahead, assuming that they are as large as earlier images."
FIRST_BYTES = 8 << 20
"The assumed size of an image before one was read."
DECODERS = 2
"The most images that one worker decodes at a time: the pixels of each are in memory."
FIRST_RECORDS = 16
"Records that are taken at once before any image was read."
MOST_RECORDS = 256
"The most records that are taken at once."
MOST_ROW_BYTES = 1 << 30
"The most bytes of all images of a record, since a shard has offsets of 32 bits."
MOST_REMEMBERED = 100_000
"""Good images that a worker remembers, 200 bytes each. Decoding a JPEG of 1,120 x 1,120 again would
take 4 ms.
"""
SHOWN = 300
"Characters of a path that a bad record keeps."

Pictured = Conversation | Preference
"A record that may have images."
_sizes: dict[tuple[Rules, str], ImageSize] = {}
"(rules for judging images, digest of an image) -> size, for images that were found good."


class ImageRequest(NamedTuple):
    """An image that a record names, before it is read."""

    image: str | bytes
    "The image's path or URL; or its bytes."
    folder: Location
    "The folder at which the path begins."


@dataclass(slots=True, kw_only=True)
class Image:
    """An image of a record after reading. A bad image has a reason code."""

    height: int = 0
    "Pixels of the stored image's height."
    width: int = 0
    "Pixels of the stored image's width."
    size: int = 0
    "The number of bytes that are stored."
    digest: str = ""
    "xxh3_128 of the bytes as they were read; empty if they could not be read."
    data: bytes | None = None
    "The bytes that are stored; None if they have to be read again."
    stamp: tuple[int, str] = MISSING
    "(size, stamp) of the image's file."
    location: ImagePlace = NOWHERE
    "The place of the image."
    reader: ImageReader | None = None
    "Reads the image again if `data` is None."
    tokens: int = 0
    "How many tokens the recipe's processor makes of the image; 0 without a processor."
    reason: str = ""
    "The reason code of a bad image; empty for a good image."
    why: str = ""
    "What is wrong with a bad image, in words."

    @property
    def content(self) -> bytes:
        """The bytes that are stored. If they are not in memory, the image is read again.

        Raises Unreachable if the image's file has changed since it was first read.
        """
        if self.data is None and self.reader:
            again = self.reader.read_image(self.location)
            if again.digest != self.digest:
                raise Unreachable(CHANGED.format(url=self.location))
            return again.data or b""
        return self.data or b""


@dataclass(slots=True)
class WindowImages:
    """Digests and stamps of the images of a window (a slice of a work unit). A stamp changes when a
    file is written, such as its mtime.

    The digests decide, with the window's records, whether its earlier rows can be used again. By
    the stamps the next run finds the images that have changed, without reading the others.
    """

    results: list[str] = field(default_factory=list)
    "The digest of each image in order; for an image without a digest, its reason code."
    stamps: dict[str, tuple[int, str]] = field(default_factory=dict)
    "URL of each image's file -> (size, stamp); MISSING if there was no such file."
    fetched: dict[str, str] = field(default_factory=dict)
    "http URL -> digest of the bytes that the server sent, or a reason code."

    @property
    def digest(self) -> str:
        """The xxh3_128 of the digests of all images in order; a bad image without a digest counts
        with its reason code. "" if there are no images.

        Two windows with equal records and equal digests of their images give equal rows.
        """
        if not self.results:
            return ""
        return xxhash.xxh3_128_hexdigest("".join(f"{result}\n" for result in self.results))


@dataclass
class ImageReader:
    """Reads the images of conversations and preferences, several at a time, and judges them."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    "A stream's settings of images, as the manifest has them (`Encoding.images`)."
    root: Location | None = None
    "The folder at which paths begin; None: the folder of each record's file."
    judges: bool = True
    "Whether images are judged; False: they are only read and hashed."
    window_images: WindowImages = field(default_factory=WindowImages)
    "Collects the digests and stamps of all images that are read."
    _record_bytes: float | None = None
    "A running average of the bytes of all images of a record; None before the first record."
    _image_bytes: float = FIRST_BYTES
    """Bytes of the largest recent image. The value shrinks by a sixteenth with each image that is
    smaller.
    """

    def __post_init__(self) -> None:
        """Read the settings: the rules for judging, the changes before storing, and the limits."""
        settings = self.settings
        rules = {key: settings[key] for key in ("decode", "max_pixels") if key in settings}
        self.rules = Rules(**rules)
        self.change = Rewriting(
            **(settings.get("resize") or {}),
            **(settings.get("reencode") or {}),
        )
        self.most_images = settings.get("max_images") or sys.maxsize  # of a record
        self.fetches = settings.get("http") == "fetch"
        self._decoding = Semaphore(DECODERS)
        self._processor = settings.get("processor") if self.judges else None
        "The hash of the recipe's processor, which counts the tokens of an image; None without one."

    @property
    def most_records(self) -> int:
        """How many records the caller shall give to `read` at once, so that their images have about
        AIM_BYTES; at least 1, and at most MOST_RECORDS.
        """
        if self._record_bytes is None:
            return FIRST_RECORDS
        records_of_aim = int(AIM_BYTES / max(1, self._record_bytes))
        return max(1, min(MOST_RECORDS, records_of_aim))

    def read(self, records: Sequence[Any], folders: Sequence[Location] = ()) -> list[Any]:
        """Return the records, each with its images as `Image` objects. A record with a bad image is
        replaced by a reason code (NoRecord, a str).

        Args:
            records: conversations or preferences; and reason codes (str) in place of bad records,
                which are returned unchanged.
            folders: the folder of each record's file, where relative paths of images begin; not
                used if the reader has a `root` for all of them. Without folders and root no image
                is read, and each is assumed to be good, as when a few records are only shown.
        """
        if not folders and self.root is None:
            return [_without_reading(record) for record in records]

        # Read the images of all records, each image once. A record with too many images has no
        # requests; `_judge` refuses it.
        requests = list[list[ImageRequest]]()
        for number, record in enumerate(records):
            images: Sequence[str | bytes] = ()
            if not isinstance(record, str) and len(record.images) <= self.most_images:
                images = record.images
            base = self.root or folders[number]
            requests.append([ImageRequest(image, base) for image in images])
        unique_requests = dict.fromkeys(chain(*requests))  # in the order of the records
        read = self._read_all(unique_requests)

        # Judge each record by its images.
        answers = list[Any]()
        for record, own_requests in zip(records, requests, strict=True):
            if isinstance(record, str):
                answers.append(record)
            else:
                answers.append(self._judge(record, [read[request] for request in own_requests]))
        return answers

    def _judge(self, record: Pictured, images: list[Image]) -> Pictured | NoRecord:
        """Return the record with its images, or a NoRecord (a reason code with details) if the
        images make the record bad. Also add the digests of the images to `window_images`, so that
        the next run can see whether an image has changed.

        Args:
            images: the images of the record after reading; [] if the record has too many.
        """
        for image in images:
            self.window_images.results.append(image.digest or image.reason)
        size = sum(image.size for image in images)
        count = len(record.images)
        self._note_record_size(size)
        if len(images) < count:  # too many images, of which none was read
            self.window_images.results.append("too_many_images")
            return NoRecord("too_many_images", images=count, max_images=self.most_images)
        for number, (path, image) in enumerate(zip(record.images, images, strict=True)):
            if image.reason:
                name = f"number {number} of the record"
                if isinstance(path, str):
                    name = path[:SHOWN]
                return NoRecord(image.reason, image=name, why=image.why)
        if size > MOST_ROW_BYTES:
            return NoRecord("images_too_large", bytes=size, most=MOST_ROW_BYTES)
        return record.with_images(images)

    def _note_record_size(self, size: int) -> None:
        """Add a record to the running average of image bytes per record, with a weight of one
        sixteenth. The average decides how many records are read at once (`most_records`).

        Args:
            size: the bytes of all images of the record.
        """
        average = self._record_bytes
        if average:
            self._record_bytes = average + (size - average) / 16
        else:
            self._record_bytes = float(size)

    def _read_all(self, requests: Mapping[ImageRequest, None]) -> dict[ImageRequest, Image]:
        """Read and judge the requested images. Return request -> image.

        Args:
            requests: the requests as keys, each once, however many records have the image.
        """
        images = dict[ImageRequest, Image]()
        bytes_kept = 0
        for request, image in zip(requests, self._read_ahead(requests), strict=True):
            images[request] = image
            # Note what the next run compares: nothing for bytes, which are in the record itself.
            if isinstance(image.location, str):  # an http URL
                self.window_images.fetched[image.location] = image.digest or image.reason
            elif not isinstance(image.location, bytes):
                self.window_images.stamps[image.location.url] = image.stamp
            # Drop the bytes if there are too many in memory; `Image.content` reads them again.
            if bytes_kept + image.size > KEEP_BYTES:
                image.data = None
            bytes_kept += len(image.data or b"")
        if self._processor:
            good_images = [image for image in images.values() if not image.reason]
            _count_tokens(self._processor, good_images)
        return images

    def _read_ahead(self, requests: Mapping[ImageRequest, None]) -> Iterator[Image]:
        """Yield the requested images in order. Threads read the next images meanwhile.

        Pillow decodes outside of Python's lock, so two threads decode at a time. A source of few
        work units then keeps more processors busy than it has units.
        """
        pending = deque[Any]()  # the futures of images that were requested and not yielded yet
        unsent = iter(requests)
        most_requests = AT_ONCE if self.fetches else IN_FLIGHT
        pool = _open_pool(os.getpid())
        while True:
            # Request as many images as fit into AHEAD_BYTES if each has `_image_bytes`.
            fitting = int(AHEAD_BYTES / self._image_bytes)
            room = max(1, min(most_requests, fitting))
            for request in islice(unsent, max(0, room - len(pending))):
                pending.append(pool.submit(self.find_and_read, *request))
            if not pending:
                return
            yield pending.popleft().result()

    def find_and_read(self, image: str | bytes, base: Location) -> Image:
        """Find, read and judge one image. A bad image is returned with its reason code.

        Args:
            image: the path or URL of the image; or its bytes.
            base: the folder at which relative paths begin.
        """
        try:
            refuses_outside = self.settings.get("outside") == "refuse"
            location = locate_image(image, base, refuses_outside)
        except BadImage as bad:
            return Image(reason=bad.reason, why=bad.why)
        return self.read_image(location)

    def read_image(self, location: ImagePlace) -> Image:
        """Read and judge the image at this place. A bad image is returned with its reason code."""
        image = Image(location=location, reader=self)
        try:
            data, image.stamp = read_image_file(location, self.fetches)
            # The size of the largest recent image: an earlier maximum shrinks by a sixteenth.
            self._image_bytes = max(len(data), self._image_bytes * 15 / 16, 1)
            image.digest = xxhash.xxh3_128_hexdigest(data)
            image.size = len(data)
            if self.judges:
                with self._decoding:
                    size = self._size_of(data, image.digest)
                    stored = self.change.apply(data, size.height, size.width)
                image.data, image.height, image.width = stored
                image.size = len(stored.data)
        except BadImage as bad:
            image.reason = bad.reason
            image.why = bad.why
            image.size = 0
            image.stamp = bad.stamp or image.stamp
        return image

    def _size_of(self, data: bytes, digest: str) -> ImageSize:
        """Return the height and width of an image after judging it. An image that this process has
        found good before is not judged again.

        Args:
            data: the bytes of the image.
            digest: the xxh3_128 of these bytes.

        Raises BadImage if the image is bad.
        """
        key = (self.rules, digest)
        size = _sizes.get(key)
        if size is None:
            size = judge_image(data, self.rules)
        if len(_sizes) >= MOST_REMEMBERED:
            _sizes.clear()
        _sizes[key] = size
        return size


def _without_reading(record: Any) -> Any:
    """Return a record with an empty image in place of each of its images, which are then
    taken as good. For records that are only shown, and whose images cannot be found. A reason code
    (str) is returned unchanged.
    """
    if isinstance(record, str):
        return record
    return record.with_images([Image(data=b"") for _ in record.images])


def _count_tokens(processor: str, images: Sequence[Image]) -> None:
    """Set the number of tokens of each image; or a reason code if the processor refuses the image.

    Args:
        processor: the hash of the recipe's processor.
        images: good images.
    """
    # (height, width) -> number of tokens; or a string that says why the processor refuses the size.
    answers = count_image_tokens(processor, ((image.height, image.width) for image in images))
    for image in images:
        answer = answers[image.height, image.width]
        if isinstance(answer, str):
            image.reason = "image_refused"
            image.why = answer
        else:
            image.tokens = answer


@cache
def _open_pool(process: int) -> ThreadPoolExecutor:
    """Return the threads that read images, one pool for each process: a forked worker does not
    inherit its parent's threads.

    Args:
        process: the id of this process, which is the key of the cached pool.
    """
    return ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="images")
