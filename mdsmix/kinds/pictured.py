"""Conversations with images: a row stores the images' bytes and sizes, and the turns with one token
for each image.

Neither pixels nor expanded image tokens are stored: how many tokens an image takes depends on a
processor and its limits, so a stream with one token an image serves any processor. Where the recipe
names a processor, its counts tell which rows fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import orjson

from mdsmix.encode import forms
from mdsmix.encode.chat import Turn, find_trained_answers
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.labels import Lengths, Turns
from mdsmix.errors import RecipeError
from mdsmix.images.reasons import IMAGE_REASONS
from mdsmix.kinds.assemble import Assembler, SampleRows
from mdsmix.kinds.conversations import Conversations
from mdsmix.kinds.finetuning import TurnRows
from mdsmix.kinds.kind import Kind
from mdsmix.messages import suggest_key
from mdsmix.processor.card import Processor, open_processor
from mdsmix.ragged import Chunked, Ragged
from mdsmix.recipe import ImagesSpec, Recipe, StreamSpec
from mdsmix.record import Conversation, RecordRefused
from mdsmix.shapes import SHAPES
from mdsmix.shards.shard_files import SHARD_BYTES, Rows, ShardLayout, lay_out_sample
from mdsmix.tokenizer.card import Tokenizer

if TYPE_CHECKING:
    from mdsmix.images.reader import Image

COLUMNS = {"images": "list[jpeg]", "sizes": "json", "turns": "json"}
DEFAULTS = ImagesSpec()
LINE_BYTES = 1 << 20
"""Bytes of a work unit in files of lines: 3,500 records of 300 bytes, whose images of 400 KB take
seconds; more where fewer records have images. In tables and archives, whose records hold the images
themselves, a unit is as large as one of text: 96 MiB of images are two seconds of work and more.
"""


class ConversationsWithImages(Conversations):
    name = "images"
    reads = Conversation
    called = ("finetuning", "messages", "messages with images")
    has_images = True
    reasons: ClassVar[Mapping[str, str]] = {
        **Conversations.reasons,
        **IMAGE_REASONS,
        "image_placeholders": (
            "The tokens hold more or fewer image tokens than the record has images."
        ),
    }
    window_bytes = Kind.window_bytes

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        from mdsmix.images.judge import require_pillow

        require_pillow()
        given, plain = stream.images or DEFAULTS, asdict(DEFAULTS)
        processor = open_processor(recipe.processor) if recipe.processor else None
        token = token_of(given, tokenizer, processor)
        if processor and token != processor.image_token:
            raise RecipeError(
                f"stream {stream.name}: images.token is {token}, and the processor {processor.name} expands {processor.image_token}: leave "
                "images.token out, or name another processor."
            )
        known = [name for name in tokenizer.special_tokens if "image" in name.lower()]
        if token is None or (id := id_of(token, tokenizer)) is None:
            raise RecipeError(
                f"stream {stream.name} has images, and the tokenizer {tokenizer.name} "
                f"{f'has no token {token} of its own' if token else 'declares no image_token'}, by which they are found in the tokens: name "
                f"one by images.token; "
                f"{suggest_key(token or '', known or tokenizer.special_tokens, 'its own tokens are')}"
            )
        images: dict[str, Any] = {"token": token, "id": id}
        for key, value in asdict(given).items():
            if value != plain[key] and key not in ("root", "token"):
                images[key] = [value] if key == "field" and isinstance(value, str) else value
        if processor:
            images["processor"] = processor.hash
            if any(processor.around):
                images["around"] = list(processor.around)
        own = {"columns": dict(COLUMNS), "compact": False, "compression": None, "images": images}
        return super().settings(recipe, stream, tokenizer) | own

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        yield from super().contradictions(recipe, stream)
        given = stream.images or DEFAULTS
        if stream.pack or not recipe.decoder_only_format:
            yield "has images, whose rows are not packed and are for decoder-only models alone: leave pack and decoder_only_format out."
        if given.field is not None and not all([given.field, *given.field]):
            yield "images.field names no field; leave it out for images or image, or name one."
        shape = SHAPES.get((stream.source and stream.source.shape) or "")
        if given.field is not None and shape and shape.has_images == "inside":
            yield f"images.field is for images beside the texts, and those of {shape.name} stand in them; take it out, it would change nothing."

    def rows_of(self, conversation: Conversation, unread: Counter[str]) -> list[list[Turn]]:
        """The rows of a conversation, each a list of turns. RecordRefused (image_placeholders)
        where a row has more or fewer image tokens than its messages have images.
        """
        token = self.token
        template = self.chat.for_tools(conversation.tools)
        rows = super().rows_of(forms.fit_images(template, token, conversation), unread)
        contents = [message.get("content") for message in conversation.messages]
        parts = [content if isinstance(content, list) else () for content in contents]
        # The last row ends with the last trained answer, the row before it with the trained answer
        # before that, and so on.
        for row, end in zip(rows, find_trained_answers(conversation)[-len(rows) :], strict=True):
            images = sum(part["type"] == "image" for part in chain(*parts[: end + 1]))
            placeholders = sum(text.count(token) for text in chain(*row))
            if images != placeholders:
                raise RecordRefused("image_placeholders", images=images, placeholders=placeholders)
        whole = token.join(self.encoding.images.get("around", ("", "")))
        return [
            [(p.replace(token, whole), r.replace(token, whole)) for p, r in row] for row in rows
        ]

    def grown(self, turns: Turns, rows: TurnRows) -> Lengths | None:
        """int64: the lengths with each image token as the processor's tokens. A row with fewer
        image tokens than its record has images holds the first of them.
        """
        if "processor" not in self.encoding.images:
            return None
        held = zip(rows.images, turns.count(self.untrained).tolist(), strict=True)
        tokens = np.array([image.tokens for of, count in held for image in of[:count]])
        places = turns.places(self.untrained)
        segments = np.searchsorted(turns.ids.offsets, places, "right") - 1
        more = np.bincount(segments, tokens - 1, len(turns.ids))
        return np.asarray(turns.ids.lengths + more, np.int64)

    @property
    def token(self) -> str:
        """The token that stands for an image in a text."""
        return str(self.encoding.images["token"])

    @property
    def untrained(self) -> int:
        return int(self.encoding.images["id"])

    @property
    def controls(self) -> Sequence[str]:
        return [*super().controls, self.token]

    def open_rows(self, layout: ShardLayout, dtype: str) -> Assembler:
        return ImageRows(layout, self.encoding.max_seq_len, dtype)


def token_of(
    given: ImagesSpec, tokenizer: Tokenizer, processor: Processor | None = None
) -> str | None:
    """The image token: that of the recipe's images.token, else its processor's, else the
    tokenizer's `image_token`; None without any.
    """
    declared = processor and processor.image_token
    declared = declared or tokenizer.template_variables.get("image_token")
    return given.token or (declared if isinstance(declared, str) else None)


def id_of(token: str, tokenizer: Tokenizer) -> int | None:
    """The id of an added or special token, which tokenizers match as a whole in any text; None
    where the tokenizer has no such token.
    """
    if token in tokenizer.special_tokens:
        return tokenizer.special_ids[tokenizer.special_tokens.index(token)]
    added = orjson.loads(Path(tokenizer.path).read_bytes()).get("added_tokens", [])
    return next((each["id"] for each in added if each.get("content") == token), None)


class ImageRows(SampleRows):
    """Rows with images, cut into shards while they come, since those of a work unit may be many GB.
    A shard ends before the row that would make it larger than SHARD_BYTES, so its end depends on
    the rows alone.
    """

    _size = 0
    "Bytes of the rows that are kept."

    def add(self, batch: Encoded) -> Iterator[Rows]:
        stored = [image for images in batch.images for image in images]
        self._totals += replace(
            batch.totals,
            images=len(stored),
            image_bytes=sum(image.size for image in stored),
            image_tokens=sum(image.tokens for image in stored),
        )
        for images, turns in zip(batch.images, batch.columns["turns"].slices(), strict=True):
            sizes = orjson.dumps([[image.height, image.width] for image in images])
            row = lay_out_sample([b"".join(_frames(images)), sizes, turns])
            rows, size = len(self._columns["rows"]), len(row)
            if rows and self._size + size + 4 * (rows + 2) > SHARD_BYTES:
                yield Chunked.from_parts(self.kept("rows"))
                self._size = 0
            self._size += size
            self.keep({"rows": Ragged.from_rows([row], np.uint8)})


def _frames(images: Sequence[Image]) -> Iterator[bytes]:
    """The value of a column `list[jpeg]`, in pieces, in Streaming's layout: a reserved 0, the
    number of images, the size of each in bytes, all uint32 (little endian), then the images.
    """
    yield np.array([0, len(images), *(image.size for image in images)], "<u4").tobytes()
    for image in images:
        yield image.content
