"""Proof that a loader's batch of stored rows equals the batch that a processor makes of the whole
conversations.

Processors differ in the text that they print around an image, and a loader has only one token in
its place. So a processor is used only where it is proved equal. The rows are those of a few made
conversations and a few of the stream's own. transformers is given their whole text, the loader puts
the stored rows together, and every key of both batches is compared. `docs/images.md` lists the
families.
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
from mdsmix.processor.server import ask_processor
from mdsmix.record import Conversation
from mdsmix.shapes.image_parts import PLACEHOLDER, place_images
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import decode_turns
from mdsmix.storage import locate
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.snapshot import package_version

StoredRow = tuple[str, list[int], Sequence[bytes]]
"""A row by which a processor is tried: its name, for the sentence of a refusal; its ids, one for
each image; the bytes of its images.
"""
LONGEST = 1 << 20
"max_seq_len of the made rows, in tokens: none is cut."
OWN_ROWS = 4
"How many of the stream's own rows are compared, beside the made ones."
FIX_UNEQUAL = (
    "set images.max_images: 1 where only rows of several images differ, or name the processor of another model (docs/images.md lists those "
    "that are equal)"
)
CONVERSATIONS = {
    "one image": ["<image>\nWhat is it?"],
    "two images side by side": ["<image><image>\nWhich is larger?"],
    "two images apart": ["Here is\n<image> and below\n\n<image>\nWhich is larger?"],
    "no image": ["What is it?"],
    "an image in a later turn": ["Hello.", "<image>What is it?"],
}
ODD_DRAWINGS = {
    "a low image": (600, 3),
    "a narrow image": (3, 600),
    "an image of one pixel": (1, 1),
    "an image of four pixels": (2, 2),
}
"""Name of a made row -> width and height of its image. The batch of all rows has them next to usual
images. Sizes that the processor refuses are left out."""
"Name of a made conversation -> its questions; each is answered `This.`."
DRAWINGS = ((160, 96), (72, 144))
"Width and height of a wide image and a high one."


def find_difference(
    folder: Path, encoding: Encoding, tokenizer: Tokenizer, own: Iterable[StoredRow]
) -> str | None:
    """A sentence on the first difference between a loader's rows and those that the processor makes
    of whole conversations; None where all are equal, which the cache then remembers.

    Args:
        folder: the snapshot of the processor with its own tokenizer, which is not in the
        processor's hash.
        own: rows of the stream; the first OWN_ROWS with images are compared.
    """
    rows = [*make_rows(encoding, tokenizer), *islice((row for row in own if row[2]), OWN_ROWS)]
    key = xxhash.xxh128(orjson.dumps([str(folder), package_version("transformers")]))
    for _, ids, images in rows:
        key.update(orjson.dumps([ids, list(map(len, images))]))
        key.update(b"".join(images))
    mark = cache_folder() / "processors" / "equal" / key.hexdigest()
    if mark.exists():
        return None
    if found := ask_processor(folder, {"rows": rows}):
        return str(found)
    with suppress(Unreachable):  # without the mark the next run only asks again
        keep_in_cache(mark, b"")
    return None


def make_rows(encoding: Encoding, tokenizer: Tokenizer) -> Iterator[StoredRow]:
    """Yield the rows of CONVERSATIONS and of ODD_DRAWINGS, rendered by the stream's own template
    and encoded by the reference.
    """
    from mdsmix.images.reader import ImageReader  # http and ssl come with it

    images = {key: value for key, value in encoding.images.items() if key != "processor"}
    kind = kind_of(replace(encoding, max_seq_len=LONGEST, images=images))
    encoder = kind.open(tokenizer, open_backend(tokenizer, "reference"))
    reader = ImageReader(images, locate("."))
    drawings = [_drawing(*size) for size in DRAWINGS]
    made = [(name, questions, drawings) for name, questions in CONVERSATIONS.items()]
    (asked,) = CONVERSATIONS["one image"]
    made += [(name, [asked], [_drawing(*size)]) for name, size in ODD_DRAWINGS.items()]
    for name, questions, shown in made:
        answered = ((("user", question), ("assistant", "This.")) for question in questions)
        messages = [{"role": role, "content": text} for turn in answered for role, text in turn]
        shown = shown[: "".join(questions).count(PLACEHOLDER)]
        read = reader.read([place_images(Conversation(messages), shown, PLACEHOLDER)])
        yield from list_stored_rows(
            name, encoder.encode([said for said in read if not isinstance(said, str)])
        )


def list_stored_rows(name: str, encoded: Encoded) -> Iterator[StoredRow]:
    """Encoded samples as StoredRows. `name`: for all of them."""
    for number, images in enumerate(encoded.images):
        turns = orjson.loads(encoded.columns["turns"][number].tobytes())
        yield make_stored_row(name, {"images": [image.content for image in images], "turns": turns})


def make_stored_row(name: str, sample: Sample) -> StoredRow:
    """A stored sample, its columns decoded, as a StoredRow."""
    parts = [part for turn in decode_turns({"turns": sample["turns"]}) for part in turn]
    return name, np.concatenate(parts).tolist(), sample["images"]


def _drawing(width: int, height: int) -> bytes:
    """A PNG whose three channels are different gradients."""
    from PIL import Image

    out, grey = io.BytesIO(), Image.linear_gradient("L").resize((width, height))
    Image.merge("RGB", [grey, grey.rotate(180), grey.rotate(90)]).save(out, "PNG")
    return out.getvalue()
