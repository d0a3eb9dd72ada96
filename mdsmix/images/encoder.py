"""Conversations with images -> samples: those whose images are all good are encoded as any others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mdsmix.encode.base import Encoded, Rejected
from mdsmix.encode.finetuning import Chat
from mdsmix.encode.processor import Counter
from mdsmix.images.pictures import Image, Pictures
from mdsmix.record import Conversation
from mdsmix.storage import Location


@dataclass(slots=True, kw_only=True)
class Pictured:
    """The encoder of conversations with images."""

    chat: Chat
    pictures: Pictures
    counter: Counter | None = None
    "Of a recipe with a processor."

    def encode(
        self, conversations: Sequence[Conversation], folders: Sequence[Location] = ()
    ) -> Encoded:
        """Column `turns`, and `images` of each row, which `ImageRows` lays out."""
        read = self.pictures.read(conversations, folders)
        rejected = [each for each in read if isinstance(each, Rejected)]
        good = [i for i, each in enumerate(read) if not isinstance(each, Rejected)]
        if self.counter:
            _count(self.counter, [image for at in good for image in _of(read[at])])
        spans = [[image.tokens for image in _of(read[i])] for i in good] if self.counter else None
        encoded = self.chat.encode([conversations[i] for i in good], spans)
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


def _count(counter: Counter, images: Sequence[Image]) -> None:
    """Says of each image what the processor makes of it."""
    found = counter.of((image.height, image.width) for image in images)
    for image in images:
        image.tokens = found[image.height, image.width]


def _of(each: list[Image] | Rejected) -> Sequence[Image]:
    return () if isinstance(each, Rejected) else each


@dataclass(slots=True, kw_only=True)
class Look:
    """An encoder for those who read images only to know them again."""

    pictures: Pictures

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
