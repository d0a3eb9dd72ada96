"""Conversations with images: their original bytes, their sizes, and the turns with one token for each image.

No pixels are stored, and no expanded placeholders: how many tokens an image takes depends on a processor and its limits, so a
stream that holds one token an image serves any. Where the recipe names the processor, its counts say which rows fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
import orjson

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import Encoded, Encoder
from mdsmix.encode.image_tokens import ImageToken
from mdsmix.encode.processor import Counter, Processor, open_processor
from mdsmix.encode.special import SpecialStrings
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds.assemble import Assembled, Assembler, totals_of
from mdsmix.kinds.conversations import Conversations
from mdsmix.kinds.kind import Kind
from mdsmix.recipe import ImagesSpec, Recipe, StreamSpec
from mdsmix.record import Conversation
from mdsmix.shapes import SHAPES
from mdsmix.shards.counts import Totals
from mdsmix.shards.shard_layout import SHARD_BYTES, Rows, ShardLayout
from mdsmix.words import hint

COLUMNS = {"images": "list[jpeg]", "sizes": "json", "turns": "json"}
DEFAULTS = ImagesSpec()
LINE_BYTES = 1 << 20
"""Of the lines of a text file: 3,500 records of 300 bytes, seconds of work for images of 400 KB. Where images stand in the records
themselves (tables, archives), a window is as long as
one of text: 96 MiB of images are two seconds of work and more."""


class Images(Conversations):
    name = "images"
    reads = Conversation
    keys = (
        "images",
        *(key for key in Conversations.keys if key != "columns"),
    )
    called = "messages with images"
    has_images = True
    window_bytes = Kind.window_bytes
    line_bytes = LINE_BYTES

    @classmethod
    def columns(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, str]:
        return dict(COLUMNS)

    @classmethod
    def settings(
        cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer
    ) -> Mapping[str, Any]:
        given = stream.images or DEFAULTS
        processor = open_processor(recipe.processor) if recipe.processor else None
        token = token_of(given, tokenizer, processor)
        assert token is not None, "`lacking` has asked for it"
        found = {"token": token, "id": id_of(token, tokenizer), **_stated(given)}
        if processor:
            found["processor"] = processor.hash
            if any(processor.around):
                found["around"] = list(processor.around)
        common = super().settings(recipe, stream, tokenizer)
        return {**common, "compact": False, "compression": None, "images": found}

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        yield from super().contradictions(recipe, stream)
        given = stream.images or DEFAULTS
        if stream.pack:
            yield "is of images, which stand beside the tokens of their own row, and pack: true joins rows of tokens: take pack out."
        if not recipe.decoder_only_format:
            yield "is of images, which no encoder-decoder of LLM-Foundry sees: set decoder_only_format: true."
        if given.field is not None and not all([given.field, *given.field]):
            yield "images.field names no field; leave it out for images or image, or name one."
        shape = SHAPES.get((stream.source and stream.source.shape) or "")
        if given.field is not None and shape and shape.has_images == "inside":
            yield f"images.field is for images beside the texts, and those of {shape.name} stand in them; take it out, it would change nothing."

    @classmethod
    def lacking(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> Iterator[str]:
        from mdsmix.images.check import require_pillow

        require_pillow()
        yield from super().lacking(recipe, stream, tokenizer)
        processor = open_processor(recipe.processor) if recipe.processor else None
        token = token_of(stream.images or DEFAULTS, tokenizer, processor)
        if processor and token != processor.image_token:
            yield (
                f"stream {stream.name}: images.token is {token}, and the processor {processor.name} expands {processor.image_token}: leave "
                "images.token out, or name another processor."
            )
        known = [name for name in tokenizer.special_tokens if "image" in name.lower()]
        if token is None:
            yield (
                f"stream {stream.name} has images, and the tokenizer {tokenizer.name} declares no image_token that would stand for "
                f"one: name it by images.token{f', as {known[0]}' if known else ''}."
            )
        elif id_of(token, tokenizer) is None:
            yield (
                f"stream {stream.name}: images.token is {token}, which is no token of its own in the tokenizer {tokenizer.name}, so "
                f"that images could not be found in the tokens: {hint(token, known or tokenizer.special_tokens, 'its own tokens are')}"
            )

    def open_encoder(self, tokenizer: Tokenizer, backend: Backend) -> Encoder:
        from mdsmix.images.check import require_pillow
        from mdsmix.images.encoder import Pictured
        from mdsmix.images.reader import ImageReader

        require_pillow()
        super().open_encoder(tokenizer, backend)
        digest = self.encoding.images.get("processor")
        counter = Counter(digest) if digest else None
        return Pictured(
            chats=self.encode, pictures=ImageReader.of(self.encoding.images), counter=counter
        )

    @cached_property
    def image(self) -> ImageToken:
        around: Any = tuple(self.encoding.images.get("around", ("", "")))
        return ImageToken(self.encoding.images["token"], self.encoding.images["id"], around)

    @cached_property
    def specials(self) -> SpecialStrings:
        return SpecialStrings.of([*self.tokenizer.special_tokens, self.image.text])

    @property
    def untrained(self) -> int:
        return self.image.id

    def open_rows(self, layout: ShardLayout, dtype: str) -> Assembler:
        return ImageRows()


def token_of(
    given: ImagesSpec, tokenizer: Tokenizer, processor: Processor | None = None
) -> str | None:
    """What stands for an image: as the recipe says, as its processor expands it, or as the tokenizer declares it."""
    declared = processor and processor.image_token
    declared = declared or tokenizer.template_variables.get("image_token")
    return given.token or (declared if isinstance(declared, str) else None)


def id_of(token: str, tokenizer: Tokenizer) -> int | None:
    """The id of a token that stands for itself in any text, None where there is no such token."""
    if token in tokenizer.special_tokens:
        return tokenizer.special_ids[tokenizer.special_tokens.index(token)]
    from pathlib import Path

    added = orjson.loads(Path(tokenizer.path).read_bytes()).get("added_tokens", [])
    return next((each["id"] for each in added if each.get("content") == token), None)


def _stated(given: ImagesSpec) -> dict[str, Any]:
    """The settings that shape samples and are not at their defaults: `root` shapes none, `token` is said beside them."""
    found, plain = asdict(given), asdict(DEFAULTS)
    stated = {key: value for key, value in found.items() if value != plain[key]}
    for key in ("root", "token"):
        stated.pop(key, None)
    if isinstance(field := stated.get("field"), str):
        stated["field"] = [field]
    return stated


class ImageRows:
    """Rows of images, cut into shards as they come: those of a work unit may be many GB. A shard is as full as it may be, so
    where one ends depends on the rows alone."""

    def __init__(self) -> None:
        self._body, self._sizes, self._totals = bytearray(), list[int](), Totals()

    def add(self, encoded: Encoded) -> Iterator[Rows]:
        from mdsmix.images.encoder import frames

        turns = encoded.columns["turns"]
        for number, images in enumerate(encoded.images):
            sizes = orjson.dumps([[image.height, image.width] for image in images])
            said = turns[number].tobytes()
            length = 8 + sum(4 + image.size for image in images)
            row = 12 + length + len(sizes) + len(said)
            if self._sizes and len(self._body) + row + 4 * (len(self._sizes) + 2) > SHARD_BYTES:
                yield self._rows()
            self._body += np.array([length, len(sizes), len(said)], "<u4").tobytes()
            for piece in frames(images):
                self._body += piece
            self._body += sizes
            self._body += said
            self._sizes.append(row)
        stored = [image for images in encoded.images for image in images]
        self._totals += replace(
            totals_of(encoded, len(encoded.images)),
            images=len(stored),
            image_bytes=sum(image.size for image in stored),
            image_tokens=sum(image.tokens for image in stored),
        )

    def finish(self) -> Assembled:
        return Assembled(self._rows(), self._totals)

    def _rows(self) -> Rows:
        rows = Rows(np.frombuffer(self._body, np.uint8), np.array(self._sizes, np.int64))
        self._body, self._sizes = bytearray(), []
        return rows
