"""Whether a processor makes of stored rows, whose images are one token each, what it makes of whole conversations.

Families differ in what they do to the text around an image, and a loader sees one token in ids. So a processor is used only where it is
proved equal: rows of a few conversations made for this, and a few of the stream's own, go through transformers whole and as a loader
puts them together, and every key of the batches is compared. `docs/images.md` lists the families.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from mdsmix.encode.backends import open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.encode.processor_server import Inequality, StoredRow, first_inequality
from mdsmix.kinds.encodings import kind_of
from mdsmix.record import PicturedConversation
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import turns_of
from mdsmix.storage import locate

LONGEST = 1 << 20
"Tokens: no made row is cut."
OWN_ROWS = 4
"Of a stream, beside the made ones."
_IMAGE = {"type": "image"}


def difference(
    folder: Path, encoding: Encoding, tokenizer: Tokenizer, own: Iterable[StoredRow]
) -> Inequality | None:
    """The first between rows as a loader puts them together and what the processor in a folder makes of whole conversations. `own`:
    rows of the stream, of which a few with images are taken."""
    own = islice((row for row in own if row.images), OWN_ROWS)
    return first_inequality(folder, [*made_rows(encoding, tokenizer), *own])


def made_rows(encoding: Encoding, tokenizer: Tokenizer) -> Iterator[StoredRow]:
    """Rows of conversations with images in each place where they may stand, as the stream's own template prints them."""
    images = {key: value for key, value in encoding.images.items() if key != "processor"}
    encoding = replace(encoding, max_seq_len=LONGEST, images=images)
    kind = kind_of(encoding)
    encoder: Any = kind.open(tokenizer, open_backend(tokenizer, "reference"))
    encoder.pictures.root = locate(".")
    for name, conversation in _conversations():
        yield from rows_of(name, encoder.encode([conversation]))


def rows_of(name: str, encoded: Encoded) -> Iterator[StoredRow]:
    """Rows that were just encoded."""
    for number, images in enumerate(encoded.images):
        turns = orjson.loads(encoded.columns["turns"][number].tobytes())
        yield row_of(name, {"images": [image.content for image in images], "turns": turns})


def row_of(name: str, sample: Mapping[str, Any]) -> StoredRow:
    """A stored sample, decoded."""
    parts = [part for turn in turns_of({"turns": sample["turns"]}) for part in turn]
    return StoredRow(name, np.concatenate(parts).tolist(), sample["images"])


def _conversations() -> Iterator[tuple[str, PicturedConversation]]:
    asked: dict[str, list[Any]] = {
        "one image": [_IMAGE, "\nWhat is it?"],
        "two images side by side": [_IMAGE, _IMAGE, "\nWhich is larger?"],
        "two images apart": ["Here is\n", _IMAGE, " and below\n\n", _IMAGE, "\nWhich is larger?"],
        "no image": ["What is it?"],
    }
    for name, parts in asked.items():
        yield name, _conversation(parts)
    yield "an image in a later turn", _conversation(["Hello."], [_IMAGE, "What is it?"])


def _conversation(*questions: list[Any]) -> PicturedConversation:
    messages = list[dict[str, Any]]()
    for question in questions:
        parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in question]
        content = parts if _IMAGE in question else question[0]
        messages += [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "This."},
        ]
    count = sum(question.count(_IMAGE) for question in questions)
    return PicturedConversation(messages, images=[_drawings()[number] for number in range(count)])


@lru_cache(maxsize=1)
def _drawings() -> list[bytes]:
    """A wide image and a high one, of no single colour."""
    from PIL import Image

    found = []
    for width, height in ((160, 96), (72, 144)):
        values = np.arange(3 * width * height, dtype=np.uint32) * 2654435761 >> 24
        out = io.BytesIO()
        Image.fromarray(values.astype(np.uint8).reshape(height, width, 3)).save(out, "PNG")
        found.append(out.getvalue())
    return found
