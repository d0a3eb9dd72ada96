"""Whether a processor makes of stored rows, whose images are one token each, what it makes of whole conversations.

Families differ in what they do to the text around an image, and a loader sees one token in ids. So a processor is used only where it is
proved equal: rows of a few conversations made for this, and a few of the stream's own, go through transformers whole and as a loader
puts them together, and every key of the batches is compared. `docs/images.md` lists the families.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from mdsmix.encode import processor_server
from mdsmix.encode.backends import open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.pretrained import Tokenizer, cache_folder, keep_in_cache, version
from mdsmix.errors import Unreachable
from mdsmix.images.reader import ImageReader
from mdsmix.kinds.encodings import kind_of
from mdsmix.record import RichConversation
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import turns_of
from mdsmix.storage import locate

StoredRow = tuple[str, list[int], Sequence[bytes]]
"A row by which a processor is tried: what it is, for the sentence of a refusal; its ids, of each image one; its images."
LONGEST = 1 << 20
"Tokens: no made row is cut."
OWN_ROWS = 4
"Of a stream, beside the made ones."
WAY_OUT = (
    "set images.max_images: 1 where only rows of several images differ, or name the processor of another model (docs/images.md lists those "
    "that are equal)"
)
IMAGE = "<image>"
CONVERSATIONS = {
    "one image": [f"{IMAGE}\nWhat is it?"],
    "two images side by side": [f"{IMAGE}{IMAGE}\nWhich is larger?"],
    "two images apart": [f"Here is\n{IMAGE} and below\n\n{IMAGE}\nWhich is larger?"],
    "no image": ["What is it?"],
    "an image in a later turn": ["Hello.", f"{IMAGE}What is it?"],
}
"The questions of each."
DRAWINGS = ((160, 96), (72, 144))
"Width and height of a wide image and a high one."


def difference(
    folder: Path, encoding: Encoding, tokenizer: Tokenizer, own: Iterable[StoredRow]
) -> str | None:
    """The first between rows as a loader puts them together and what the processor in a folder makes of whole conversations; None where
    all are equal, which this machine then remembers. `folder`: of the processor's snapshot with its own tokenizer, which its hash does
    not tell; `own`: rows of the stream, of which a few with images are taken."""
    few = islice((row for row in own if row[2]), OWN_ROWS)
    rows = [*made_rows(encoding, tokenizer), *few]
    key = xxhash.xxh128(orjson.dumps([str(folder), version("transformers")]))
    for _, ids, images in rows:
        key.update(orjson.dumps([ids, list(map(len, images))]))
        key.update(b"".join(images))
    mark = cache_folder() / "processors" / "equal" / key.hexdigest()
    if mark.exists():
        return None
    if found := processor_server.ask(folder, {"rows": rows}):
        return str(found)
    with suppress(Unreachable):  # all that is lost is a question
        keep_in_cache(mark, b"")
    return None


def made_rows(encoding: Encoding, tokenizer: Tokenizer) -> Iterator[StoredRow]:
    """Rows of conversations with images in each place where they may stand, as the stream's own template prints them."""
    images = {key: value for key, value in encoding.images.items() if key != "processor"}
    kind = kind_of(replace(encoding, max_seq_len=LONGEST, images=images))
    encoder = kind.open(tokenizer, open_backend(tokenizer, "reference"))
    reader = ImageReader(images, locate("."))
    drawings = [_drawing(*size) for size in DRAWINGS]
    for name, questions in CONVERSATIONS.items():
        messages = list[dict[str, Any]]()
        for question in questions:
            parts = [_part(each) for each in re.split(f"({IMAGE})", question) if each]
            content = parts if IMAGE in question else question
            messages += [
                {"role": "user", "content": content},
                {"role": "assistant", "content": "This."},
            ]
        shown = drawings[: "".join(questions).count(IMAGE)]
        read = reader.read([RichConversation(messages, images=shown)])
        good = [said for said in read if not isinstance(said, str)]
        yield from rows_of(name, encoder.encode(good))


def _part(text: str) -> dict[str, str]:
    return {"type": "image"} if text == IMAGE else {"type": "text", "text": text}


def rows_of(name: str, encoded: Encoded) -> Iterator[StoredRow]:
    """Rows that were just encoded."""
    for number, images in enumerate(encoded.images):
        turns = orjson.loads(encoded.columns["turns"][number].tobytes())
        yield row_of(name, {"images": [image.content for image in images], "turns": turns})


def row_of(name: str, sample: Mapping[str, Any]) -> StoredRow:
    """A stored sample, decoded."""
    parts = [part for turn in turns_of({"turns": sample["turns"]}) for part in turn]
    return name, np.concatenate(parts).tolist(), sample["images"]


def _drawing(width: int, height: int) -> bytes:
    """Of no single colour."""
    from PIL import Image

    out, grey = io.BytesIO(), Image.linear_gradient("L").resize((width, height))
    Image.merge("RGB", [grey, grey.rotate(180), grey.rotate(90)]).save(out, "PNG")
    return out.getvalue()
