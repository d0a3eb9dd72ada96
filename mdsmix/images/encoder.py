"""Conversations with images -> samples: those whose images are all good are encoded as any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mdsmix.encode.encoded import Encoded, Rejected
from mdsmix.encode.processor import Counter
from mdsmix.images.reader import BadImage, Image, ImageReader, judged
from mdsmix.record import Conversation
from mdsmix.storage import Location


@dataclass(slots=True, kw_only=True)
class Pictured:
    """The encoder of conversations with images."""

    chats: Callable[[Sequence[Conversation], Sequence[Sequence[int]] | None], Encoded]
    "The encoder of conversations, which is told how many tokens each image of each becomes."
    pictures: ImageReader
    counter: Counter | None = None
    "Of a recipe with a processor."

    def encode(
        self, conversations: Sequence[Conversation], folders: Sequence[Location] = ()
    ) -> Encoded:
        """Column `turns`, and `images` of each row, which `ImageRows` lays out."""
        read = self.pictures.read(conversations, folders)
        if self.counter:
            read = _counted(self.counter, conversations, read)
        rejected = [each for each in read if isinstance(each, Rejected)]
        good = [i for i, each in enumerate(read) if not isinstance(each, Rejected)]
        spans = [[image.tokens for image in _of(read[i])] for i in good] if self.counter else None
        encoded = self.chats([conversations[i] for i in good], spans)
        out = {each.position for each in encoded.rejected}
        left = [at for number, at in enumerate(good) if number not in out]
        if encoded.rows_of is not None:
            left = np.repeat(left, encoded.rows_of).tolist()
        images = [
            [*_of(read[at])][:count]
            for at, count in zip(left, encoded.placeholders.tolist(), strict=True)
        ]
        self.pictures.weigh([_of(each) for each in read])
        rejected += [replace(each, position=good[each.position]) for each in encoded.rejected]
        return replace(encoded, rejected=rejected, images=images)


def _counted(
    counter: Counter, conversations: Sequence[Conversation], read: Sequence[list[Image] | Rejected]
) -> list[list[Image] | Rejected]:
    """Says of each image what the processor makes of it; a conversation with one that it refuses is bad."""
    found = counter.of((image.height, image.width) for each in read for image in _of(each))
    return [
        each
        if isinstance(each, Rejected)
        else judged(at, said, [_told(image, found[image.height, image.width]) for image in each])
        for at, (said, each) in enumerate(zip(conversations, read, strict=True))
    ]


def _told(image: Image, by: int | str) -> Image | BadImage:
    if isinstance(by, str):
        return BadImage("image_refused", by, image.digest)
    image.tokens = by
    return image


def _of(each: list[Image] | Rejected) -> Sequence[Image]:
    return () if isinstance(each, Rejected) else each


@dataclass(slots=True, kw_only=True)
class ImageHasher:
    """An encoder for those who read images only to know them again."""

    pictures: ImageReader

    def encode(
        self, conversations: Sequence[Conversation], folders: Sequence[Location] = ()
    ) -> Encoded:
        read = self.pictures.read(conversations, folders)
        self.pictures.weigh([_of(each) for each in read])
        return Encoded(columns={}, tokens=0, loss_tokens=0, lengths=(), largest_id=-1)


def frames(images: Sequence[Image]) -> Iterator[bytes]:
    """The value of a column `list[jpeg]`, in pieces: as Streaming lays it out, a number for later (0), how many images there are,
    the bytes of each, all uint32, then the images."""
    sizes = np.array([0, len(images), *(image.size for image in images)], "<u4")
    yield sizes.tobytes()
    for image in images:
        yield image.content
