"""Conversations with images: a row stores the images' bytes and sizes, and the turns with one token
for each image.

Neither pixels nor expanded image tokens are stored. How many tokens an image becomes depends on the
processor and its limits, so a stream with one token for each image can be used with any processor.
If the recipe names a processor, its token counts decide which rows fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
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
from mdsmix.kinds.kind import Kind
from mdsmix.kinds.turn_renderer import TurnRenderer
from mdsmix.kinds.turn_rows import TurnRows
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
"""Bytes of a work unit in files of lines, whose images are files of their own: 3,500 records of 300
bytes, whose images of 400 KB take seconds to read. In tables and archives, whose records contain
the images themselves, a unit is as large as one of text: 96 MiB of images take two seconds or more.
"""


class ConversationsWithImages(Conversations):
    """The kind of conversations with images. Each image is one token in the stored turns."""

    name = "images"
    reads = Conversation
    key_groups = ("finetuning", "messages", "messages with images")
    has_images = True
    window_bytes = Kind.window_bytes
    reasons: ClassVar[Mapping[str, str]] = {
        **Conversations.reasons,
        **IMAGE_REASONS,
        "image_placeholders": (
            "The tokens contain more or fewer image tokens than the record has images."
        ),
    }

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the fields of Encoding that this kind sets: besides those of conversations, the
        settings of images. Raises RecipeError if Pillow or an image token is missing.
        """
        from mdsmix.images.judge import require_pillow

        require_pillow()
        images = _image_settings(recipe, stream, tokenizer)
        return {
            **super().settings(recipe, stream, tokenizer),
            "columns": dict(COLUMNS),
            "compact": False,
            "compression": None,
            "images": images,
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each wrong or contradictory setting, among them those that only
        concern images, such as `images.field`.
        """
        yield from super().contradictions(recipe, stream)
        if stream.pack or not recipe.decoder_only_format:
            yield (
                "has images, and rows with images cannot be packed and are for decoder-only models "
                "only: remove pack and decoder_only_format."
            )
        field = (stream.images or DEFAULTS).field
        if field is None:
            return
        if not all([field, *field]):
            yield "images.field names no field; leave it out for images or image, or name one."
        shape = SHAPES.get((stream.source and stream.source.shape) or "")
        if shape and shape.has_images == "inside":
            yield (
                f"images.field is for images in fields of their own, but those of {shape.name} are "
                "in the texts; it would change nothing, so take it out."
            )

    @cached_property
    def renderer(self) -> TurnRenderer:
        return ImageTurnRenderer(self.encoding, self.tokenizer, self.backend)

    def expanded_lengths(self, turns: Turns, rows: TurnRows) -> Lengths | None:
        """Return int64: the length in tokens of each prompt and response, with each image counted
        as the tokens that the processor makes of it. None if the recipe names no processor.
        """
        if "processor" not in self.encoding.images:
            return None
        # A row with n image tokens contains the first n images of its record.
        counts = turns.count(self.untrained).tolist()
        tokens = np.array(
            [
                image.tokens
                for images, count in zip(rows.images, counts, strict=True)
                for image in images[:count]
            ]
        )
        # Add the tokens of each image to the prompt or response that contains its image token.
        offsets = turns.find(self.untrained)
        segments = np.searchsorted(turns.ids.offsets, offsets, "right") - 1
        # One token of each image is already there: hence the - 1.
        added = np.bincount(segments, tokens - 1, len(turns.ids))
        return np.asarray(turns.ids.lengths + added, np.int64)

    @property
    def untrained(self) -> int:
        return int(self.encoding.images["id"])

    def open_rows(self, layout: ShardLayout, dtype: str) -> Assembler:
        return ImageRows(layout, self.encoding.max_seq_len, dtype)


def _image_settings(recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the field `images` of the Encoding: the image token, the keys of the recipe's section
    that are not at their defaults, and the processor.
    """
    spec = stream.images or DEFAULTS
    processor = open_processor(recipe.processor) if recipe.processor else None
    token = choose_image_token(spec, tokenizer, processor)
    if processor and token != processor.image_token:
        raise RecipeError(
            f"stream {stream.name}: images.token is {token}, but the processor {processor.name} "
            f"expands {processor.image_token}: remove images.token, or name another processor."
        )
    token_id = None if token is None else find_token_id(token, tokenizer)
    if token is None or token_id is None:
        raise RecipeError(_missing_image_token(stream, tokenizer, token))
    settings: dict[str, Any] = {"token": token, "id": token_id}
    defaults = asdict(DEFAULTS)
    for key, value in asdict(spec).items():
        if key in ("root", "token") or value == defaults[key]:
            continue
        is_single_field = key == "field" and isinstance(value, str)
        settings[key] = [value] if is_single_field else value
    if processor:
        settings["processor"] = processor.hash
        if any(processor.around):
            settings["around"] = list(processor.around)
    return settings


def _missing_image_token(stream: StreamSpec, tokenizer: Tokenizer, token: str | None) -> str:
    """Return the message for a stream with images whose tokenizer lacks the image token.

    Args:
        token: the image token that was chosen; None if no token was.
    """
    image_tokens = [name for name in tokenizer.special_tokens if "image" in name.lower()]
    fault = f"has no token {token} of its own" if token else "declares no image_token"
    suggestion = suggest_key(
        token or "", image_tokens or tokenizer.special_tokens, "its own tokens are"
    )
    return (
        f"stream {stream.name} has images, but the tokenizer {tokenizer.name} {fault} to mark "
        f"their positions: set images.token; {suggestion}"
    )


def choose_image_token(
    spec: ImagesSpec, tokenizer: Tokenizer, processor: Processor | None = None
) -> str | None:
    """Return the image token: the recipe's `images.token`, or else the processor's image token, or
    else the tokenizer's `image_token`. None if all three are missing.
    """
    if spec.token:
        return spec.token
    declared = processor and processor.image_token
    declared = declared or tokenizer.template_variables.get("image_token")
    return declared if isinstance(declared, str) else None


def find_token_id(token: str, tokenizer: Tokenizer) -> int | None:
    """Return the id of an added or special token, which tokenizers match as a whole in any text;
    None if the tokenizer has no such token.
    """
    if token in tokenizer.special_tokens:
        return tokenizer.special_ids[tokenizer.special_tokens.index(token)]
    added = orjson.loads(Path(tokenizer.path).read_bytes()).get("added_tokens", [])
    return next((entry["id"] for entry in added if entry.get("content") == token), None)


class ImageTurnRenderer(TurnRenderer):
    """Renders conversations with one image token for each image. The strings that the processor
    puts before and after an image are printed around it.
    """

    @property
    def token(self) -> str:
        """The token that stands for an image in a text."""
        return str(self.encoding.images["token"])

    @property
    def controls(self) -> Sequence[str]:
        return [*super().controls, self.token]

    def rows_of(self, conversation: Conversation, unread: Counter[str]) -> list[list[Turn]]:
        """Return the rows of a conversation, each a list of turns.

        Raises RecordRefused (image_placeholders) if a row has more or fewer image tokens than its
        messages have images.
        """
        token = self.token
        template = self.chat.for_tools(conversation.tools)
        rows = super().rows_of(forms.fit_images(template, token, conversation), unread)
        contents = [message.get("content") for message in conversation.messages]
        parts = [content if isinstance(content, list) else () for content in contents]
        # The last row ends with the last trained answer, the row before it with the trained answer
        # before that, and so on.
        for row, end in zip(rows, find_trained_answers(conversation)[-len(rows) :], strict=True):
            images = sum(item["type"] == "image" for item in chain(*parts[: end + 1]))
            placeholders = sum(text.count(token) for text in chain(*row))
            if images != placeholders:
                raise RecordRefused("image_placeholders", images=images, placeholders=placeholders)
        # Put the image token between the processor's two strings: before + token + after.
        framed = token.join(self.encoding.images.get("around", ("", "")))
        return [
            [
                (prompt.replace(token, framed), response.replace(token, framed))
                for prompt, response in row
            ]
            for row in rows
        ]


class ImageRows(SampleRows):
    """Rows with images. Full shards are handed out while rows are added, since the rows of a work
    unit may be many GB. A shard ends before the row that would make it larger than SHARD_BYTES, so
    its end depends only on the rows, not on the batches.
    """

    _size = 0
    "Bytes of the rows that are kept."

    def add(self, batch: Encoded) -> Iterator[Rows]:
        """Add a batch. Yield the rows of each shard that is full; these rows are then no longer
        kept here.
        """
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
            row_count = len(self._columns["rows"])
            size = len(row)
            # An MDS shard begins with its number of rows and their n + 1 offsets, 4 bytes each.
            if row_count and self._size + size + 4 * (row_count + 2) > SHARD_BYTES:
                yield Chunked.from_parts(self.take_column("rows"))
                self._size = 0
            self._size += size
            self.keep({"rows": Ragged.from_rows([row], np.uint8)})


def _frames(images: Sequence[Image]) -> Iterator[bytes]:
    """Yield the value of a column `list[jpeg]` in pieces, in Streaming's layout: a reserved 0, the
    number of images, the size of each in bytes, all uint32 (little endian), then the images.
    """
    yield np.array([0, len(images), *(image.size for image in images)], "<u4").tobytes()
    for image in images:
        yield image.content
