"""Proves that a loader's batch of stored rows equals the batch that a processor makes of the whole
conversations.

Processors print different text around an image, but a stored row only has one token for it. So a
processor is used only if it is proved equal, on rows of a few made-up conversations and a few rows
of the stream itself: transformers makes one batch of their whole texts, the loader makes another of
the stored rows, and every key of both batches is compared. `docs/images.md` lists the families of
processors.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
import xxhash

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.encode.backends import open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.errors import Unreachable
from mdsmix.kinds.resolved_stream import kind_of
from mdsmix.processor.loaded import StoredRow
from mdsmix.processor.server import ask_processor
from mdsmix.record import Conversation, Message
from mdsmix.shapes.image_parts import PLACEHOLDER, place_images
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import decode_turns
from mdsmix.storage import locate
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.snapshot import package_version

MADE_ROW_TOKENS = 1 << 20
"max_seq_len of the made-up rows, so that none is truncated."
OWN_ROWS = 4
"How many rows of the stream itself are compared, in addition to the made-up ones."
FIX_UNEQUAL = (
    "set images.max_images: 1 if only rows of several images differ, or name the processor of "
    "another model (docs/images.md lists those that are equal)"
)
CONVERSATIONS = {
    "one image": ["<image>\nWhat is it?"],
    "two images side by side": ["<image><image>\nWhich is larger?"],
    "two images apart": ["Here is\n<image> and below\n\n<image>\nWhich is larger?"],
    "no image": ["What is it?"],
    "an image in a later turn": ["Hello.", "<image>What is it?"],
}
"Name of a made-up conversation -> its questions; each is answered `This.`."
DRAWINGS = ((160, 96), (72, 144))
"Width and height, in pixels, of a wide image and a high one."
ODD_DRAWINGS = {
    "a low image": (600, 3),
    "a narrow image": (3, 600),
    "an image of one pixel": (1, 1),
    "an image of four pixels": (2, 2),
}
"""Name of a made-up row -> width and height of its image, in pixels. Sizes that the processor
refuses are left out.
"""


def find_difference(
    folder: Path, encoding: Encoding, tokenizer: Tokenizer, stream_rows: Iterable[StoredRow]
) -> str | None:
    """Compare the batch that a loader makes of stored rows with the batch that the processor makes
    of whole conversations. Return a message on the first difference. If there is none, record that
    in the cache, and return None.

    Args:
        folder: the snapshot of the processor. It contains the processor's tokenizer, which the
            processor's hash does not cover.
        stream_rows: rows of the stream; the first OWN_ROWS with images are compared.
    """
    with_images = (row for row in stream_rows if row.images)
    rows = [*make_rows(encoding, tokenizer), *islice(with_images, OWN_ROWS)]
    key = xxhash.xxh128(orjson.dumps([str(folder), package_version("transformers")]))
    for row in rows:
        key.update(orjson.dumps([row.ids, list(map(len, row.images))]))
        key.update(b"".join(row.images))
    mark = cache_folder() / "processors" / "equal" / key.hexdigest()
    if mark.exists():
        return None
    difference = ask_processor(folder, {"rows": rows})
    if difference:
        return str(difference)
    with suppress(Unreachable):  # without the mark the next run only asks again
        keep_in_cache(mark, b"")
    return None


def make_rows(encoding: Encoding, tokenizer: Tokenizer) -> Iterator[StoredRow]:
    """Yield the rows of CONVERSATIONS and of ODD_DRAWINGS, rendered by the stream's own template
    and encoded by the reference.
    """
    from mdsmix.images.reader import ImageReader  # imports http and ssl

    images = {key: value for key, value in encoding.images.items() if key != "processor"}
    kind = kind_of(replace(encoding, max_seq_len=MADE_ROW_TOKENS, images=images))
    encoder = kind.open(tokenizer, open_backend(tokenizer, "reference"))
    reader = ImageReader(images, locate("."))

    def encode(name: str, questions: Sequence[str], drawings: Sequence[bytes]) -> list[StoredRow]:
        conversation = place_images(_make_conversation(questions), drawings, PLACEHOLDER)
        usable = [read for read in reader.read([conversation]) if not isinstance(read, str)]
        return [*list_stored_rows(name, encoder.encode(usable))]

    drawings = [_draw(*size) for size in DRAWINGS]
    for name, questions in CONVERSATIONS.items():
        yield from encode(name, questions, drawings[: "".join(questions).count(PLACEHOLDER)])
    for name, size in ODD_DRAWINGS.items():
        yield from encode(name, CONVERSATIONS["one image"], [_draw(*size)])


def _make_conversation(questions: Sequence[str]) -> Conversation:
    """Return a conversation of these questions, each answered `This.`."""
    messages = list[Message]()
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": "This."})
    return Conversation(messages)


def list_stored_rows(name: str, encoded: Encoded) -> Iterator[StoredRow]:
    """Yield encoded samples as StoredRows, all with this name."""
    for number, images in enumerate(encoded.images):
        turns = orjson.loads(encoded.columns["turns"][number].tobytes())
        sample = {"images": [image.content for image in images], "turns": turns}
        yield make_stored_row(name, sample)


def make_stored_row(name: str, sample: Sample) -> StoredRow:
    """Return a stored sample, with its columns decoded, as a StoredRow."""
    sides = [side for turn in decode_turns({"turns": sample["turns"]}) for side in turn]
    return StoredRow(name, np.concatenate(sides).tolist(), sample["images"])


def _draw(width: int, height: int) -> bytes:
    """Return a PNG whose three channels are different gradients."""
    from PIL import Image

    png = io.BytesIO()
    grey = Image.linear_gradient("L").resize((width, height))
    Image.merge("RGB", [grey, grey.rotate(180), grey.rotate(90)]).save(png, "PNG")
    return png.getvalue()
