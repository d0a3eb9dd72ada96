"""Proves that the batch which a loader makes of stored rows equals the batch which a processor
makes of whole conversations.

Processors print different text around an image, but a stored row has only one token for an image.
So a processor is used only after a proof, on rows of a few made-up conversations and a few rows of
the stream itself: transformers makes a batch of their whole texts, the loader makes a batch of the
stored rows, and every key of the two batches is compared. `docs/images.md` lists the families of
processors that are equal.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import xxhash

from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.encode.backends import open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.errors import Unreachable
from mdsmix.lazy_numpy import np
from mdsmix.processor.image_rows import StoredRow
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
    "name the processor of another model (docs/images.md lists those that mdsmix can use); if the "
    "rows that differ have several images, images.max_images: 1 may be enough"
)
"What a message advises if the two batches differ."
CONVERSATIONS = {
    "one image": ["<image>\nWhat is it?"],
    "two images side by side": ["<image><image>\nWhich is larger?"],
    "two images apart": ["Here is\n<image> and below\n\n<image>\nWhich is larger?"],
    "no image": ["What is it?"],
    "an image in a later turn": ["Hello.", "<image>What is it?"],
}
"Name of a made-up conversation -> its questions. The answer to each question is `This.`."
DRAWINGS = ((160, 96), (72, 144))
"Width and height, in pixels, of a wide image and a high one."
ODD_DRAWINGS = {
    "a low image": (600, 3),
    "a narrow image": (3, 600),
    "an image of one pixel": (1, 1),
    "an image of four pixels": (2, 2),
}
"""Name of a made-up row -> width and height of its image, in pixels. A row is left out if its
image is refused.
"""


def find_difference(
    folder: Path, encoding: Encoding, tokenizer: Tokenizer, stream_rows: Iterable[StoredRow]
) -> str | None:
    """Check that training on stored rows equals training on the conversations themselves: compare
    the batch that a loader makes of stored rows with the batch that the model's processor makes of
    the whole conversations.

    Return a message on the first difference. If all rows are equal, return None, and write an
    empty file to the cache, so that the same rows are not compared again.

    Args:
        folder: the snapshot of the processor, with its tokenizer.
        encoding: the settings of the stream.
        tokenizer: the tokenizer of the stream.
        stream_rows: rows of the stream; the first OWN_ROWS with images are compared, and made-up
            rows (`make_rows`) too.
    """
    with_images = (row for row in stream_rows if row.images)
    rows = [*make_rows(encoding, tokenizer), *islice(with_images, OWN_ROWS)]
    # The name of the mark is a hash of all that the result depends on.
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
    with suppress(Unreachable):  # without the mark the next run only compares again
        keep_in_cache(mark, b"")
    return None


def make_rows(encoding: Encoding, tokenizer: Tokenizer) -> Iterator[StoredRow]:
    """Yield made-up rows, on which the processor is tested before the stream's own rows: one for
    each of CONVERSATIONS, and one for each image of ODD_DRAWINGS (such as an image of one pixel).

    They are rendered by the stream's own chat template and encoded by the reference backend.

    Args:
        encoding: the settings of the stream.
        tokenizer: the tokenizer of the stream.
    """
    from mdsmix.images.reader import ImageReader  # imports http and ssl
    from mdsmix.kinds.pictured import COLUMNS, ConversationsWithImages

    # Without a processor in the settings, its token counts refuse no row.
    images = {key: value for key, value in encoding.images.items() if key != "processor"}
    # Preferences have the same prompts as conversations.
    settings = replace(
        encoding,
        kind=ConversationsWithImages.word,
        columns=COLUMNS,
        max_seq_len=MADE_ROW_TOKENS,
        images=images,
    )
    encoder = ConversationsWithImages(settings).open(
        tokenizer, open_backend(tokenizer, "reference")
    )
    reader = ImageReader(images, locate("."))

    def encode(name: str, questions: Sequence[str], drawings: Sequence[bytes]) -> list[StoredRow]:
        """Return the row of a conversation with images; an empty list if an image is refused.

        Args:
            name: the name of the row.
            questions: the questions, with a placeholder for each image.
            drawings: the content of each image.
        """
        conversation = place_images(_make_conversation(questions), drawings, PLACEHOLDER)
        # `read` returns a string, a reason code, for a conversation whose images are refused.
        results = reader.read([conversation])
        usable = [result for result in results if not isinstance(result, str)]
        return [*list_stored_rows(name, encoder.encode(usable))]

    drawings = [_draw(*size) for size in DRAWINGS]
    for name, questions in CONVERSATIONS.items():
        image_count = "".join(questions).count(PLACEHOLDER)
        yield from encode(name, questions, drawings[:image_count])
    for name, size in ODD_DRAWINGS.items():
        yield from encode(name, CONVERSATIONS["one image"], [_draw(*size)])


def _make_conversation(questions: Sequence[str]) -> Conversation:
    """Return a conversation with these questions. The answer to each question is `This.`."""
    messages = list[Message]()
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": "This."})
    return Conversation(messages)


def list_stored_rows(name: str, encoded: Encoded) -> Iterator[StoredRow]:
    """Yield each encoded sample as a StoredRow: its token ids, its images, and this name for
    messages.
    """
    for number, images in enumerate(encoded.images):
        sample: dict[str, Any] = {"images": [image.content for image in images]}
        for column, rows in encoded.columns.items():
            cell = rows[number].tobytes()
            sample[column] = orjson.loads(cell) if column == "turns" else cell
        yield make_stored_row(name, sample)


def make_stored_row(name: str, sample: Sample) -> StoredRow:
    """Return a stored sample as a StoredRow: its token ids, its images, and a name.

    Args:
        name: the name of the row, for messages.
        sample: its decoded columns: `images`, and `turns` or those of a preference.
    """
    # Join the ids of all prompts and responses.
    sides = [side for turn in decode_turns(sample) for side in turn]
    return StoredRow(name, np.concatenate(sides).tolist(), sample["images"])


def _draw(width: int, height: int) -> bytes:
    """Return a PNG whose three channels are different gradients."""
    from PIL import Image

    png = io.BytesIO()
    grey = Image.linear_gradient("L").resize((width, height))
    Image.merge("RGB", [grey, grey.rotate(180), grey.rotate(90)]).save(png, "PNG")
    return png.getvalue()
