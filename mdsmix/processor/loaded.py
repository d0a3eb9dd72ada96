"""A processor of transformers: the tokens and pixels that it makes of images, and whether a
loader's rows equal the processor's own.

A stored row has one token for each image. A loader replaces that token by the tokens that the
processor makes of this image alone. A processor that looks at the text around an image, or at the
row's other images, gives other tokens for the whole text. A LoadedProcessor imports transformers
and torch, so only loaders and separate processes open one.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import xxhash

from mdsmix.messages import flatten_error
from mdsmix.tokenizer.transformers_five import make_readable, open_readable_folder

PROBES = ((56, 56), (100, 333), (700, 250))
"""Heights and widths at which the counts of a processor's own function are compared with the tokens
that it makes of a blank image.
"""
NARROW = 28
"Pixels. An image less high or wide than this is odd (`is_odd`)."
LONG = 16
"An image more than this many times as wide as high, or as high as wide, is odd too."
USUAL = (60, 80)
"Height and width of the second image in a batch with an odd one."
OWN = (
    "patch_size",
    "image_seq_len",
    "image_seq_length",
    "num_additional_image_tokens",
    "vision_feature_select_strategy",
)
"Attributes of a processor, beside its image processor's settings, that shape tokens or pixels."
COSMETIC = re.compile(
    r"_?processor_class|.*_processor_type|auto_map|device|return_tensors|disable_grouping|.*data_format|default_to_square|"
    r"m(in|ax)_pixels|_.*"
)
"""Settings that shape no image, left out of the digest: versions of transformers save different
ones. Qwen's limits are in `size` too.
"""

SAVED = (".json", ".jinja", ".txt")
"""Suffixes of the files that are kept of those that transformers saves. A SentencePiece model is
left out, since tokenizer.json says the same, and so is code.
"""


Arrays = dict[str, Any]
"""Arrays or tensors by key: `input_ids` and others with a value per token, or `pixel_values` and
others of a batch.
"""


class LoadedProcessor:
    """A processor of transformers. ValueError where it has no tokenizer, no image processor or no
    image token that it expands.
    """

    def __init__(self, name: str) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoProcessor

        with open_readable_folder(name) as folder:
            self.processor = AutoProcessor.from_pretrained(folder.name)
        self.tokenizer: Any = getattr(self.processor, "tokenizer", None)
        if self.tokenizer is None or not hasattr(self.processor, "image_processor"):
            raise ValueError(
                f"{type(self.processor).__name__} has no tokenizer or no image processor"
            )
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.mark = self.tokenizer.eos_token or self.tokenizer.pad_token
        "A separator between images: a token that no processor prints inside an image."
        if self.mark is None:
            raise ValueError("its tokenizer has neither an EOS nor a padding token")
        self._added = np.array([*self.tokenizer.get_added_vocab().values()], np.int64)
        self.token = self._token()
        self.token_id = int(self.tokenizer.convert_tokens_to_ids(self.token))

    def _token(self) -> str:
        """The token that stands for an image in a text: the processor's `boi_token` where it
        expands that, else its `image_token`.
        """
        for key in ("boi_token", "image_token"):
            text: Any = getattr(self.processor, key, None)
            self.token = getattr(text, "content", text)  # older versions have an AddedToken
            with suppress(Exception):
                if isinstance(self.token, str) and self.learned(PROBES[0]):
                    return self.token
        raise ValueError("it expands neither a boi_token nor an image_token that it names")

    @cached_property
    def around(self) -> tuple[str, str]:
        """The plain text that the processor prints before and after an image, such as Gemma 3's
        blank lines. They are tokenized together with the text beside them.
        """
        ((piece,),), _ = self._pieces([[make_blank_image(PROBES[0])]])
        ids = piece["input_ids"]
        kept = self._without_text(ids)
        return self.text_of(ids[: kept.start]), self.text_of(ids[kept.stop :])

    def text_of(self, ids: Any) -> str:
        """The text of token ids, special tokens included."""
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _without_text(self, ids: Any) -> slice:
        """The range from the first added token to the last, so without plain text before and after;
        all ids where none is added.
        """
        found = np.flatnonzero(np.isin(ids, self._added))
        return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, len(ids))

    @cached_property
    def has_function(self) -> bool:
        """Whether the processor's counting function agrees with its tokens at all PROBES."""
        try:
            return self._told(PROBES) == [self.learned(size) for size in PROBES]
        except Exception:
            return False

    def answer(self, question: Mapping[str, Any]) -> Any:
        """The counts for a question with `sizes` (heights and widths); `first_difference` for a
        question with `rows`; else the `card`.
        """
        if "sizes" in question:
            return [self.count(size) for size in question["sizes"]]
        return first_difference(self, question["rows"]) if "rows" in question else self.card()

    def card(self) -> dict[str, Any]:
        """The fields of `mdsmix.processor.card.Processor`, with the files as name -> text."""
        with TemporaryDirectory() as folder:
            self.processor.save_pretrained(folder)
            make_readable(Path(folder))
            files = read_saved_texts(folder)
        return {
            "hash": self.digest,
            "class_name": type(self.processor).__name__,
            "image_token": self.token,
            "around": self.around,
            "files": files,
        }

    def count(self, size: Sequence[int]) -> int | str:
        """Return the tokens of an image of this height and width. If the processor refuses the
        image, by itself or in a batch with another one, return a sentence on that.
        """
        name = type(self.processor).__name__
        try:
            if self.has_function and not is_odd(size):
                return self._told([size])[0]
            tokens = self.learned(size)
        except Exception as error:
            return f"{name} refuses it: {flatten_error(error) or type(error).__name__}"
        why = self._fault_in_batch(size, tokens) if is_odd(size) else ""
        return f"{name} refuses it in a batch with another image: {why}" if why else tokens

    def _fault_in_batch(self, size: Sequence[int], tokens: int) -> str:
        """Return the fault of a batch that has a usual image too, before or after this one; empty
        if the image has the same tokens there as alone.
        """
        for place in range(2):
            images = [[make_blank_image(USUAL)]]
            images.insert(place, [make_blank_image(size)])
            try:
                rows, _ = self.see(images)
            except Exception as error:
                return flatten_error(error) or type(error).__name__
            found = len(rows[place][0]["input_ids"])
            if found != tokens:
                return f"it makes {found} tokens of it there and {tokens} of it alone"
        return ""

    def _told(self, sizes: Sequence[Sequence[int]]) -> list[int]:
        found = self.processor._get_num_multimodal_tokens(image_sizes=[list(s) for s in sizes])
        return [int(n) for n in found["num_image_tokens"]]

    def learned(self, size: Sequence[int]) -> int:
        return len(self.see([[make_blank_image(size)]])[0][0][0]["input_ids"])

    def see(self, images: Sequence[Sequence[Any]]) -> tuple[list[list[Arrays]], Arrays]:
        """Puts rows of one image or more through the processor.

        Returns: for each row and image, the arrays by key (`input_ids` and others with a value per
        token) without the text `around` it; and the batch's other entries by key, such as
        `pixel_values`, as the model takes them.
        """
        rows, pixels = self._pieces(images)
        for piece in chain(*rows):
            kept = self._without_text(piece["input_ids"])
            piece |= {key: values[kept] for key, values in piece.items()}
        return rows, pixels

    def _pieces(self, images: Sequence[Sequence[Any]]) -> Any:
        """The same as `see`, with the text around each image kept."""
        texts = [self.mark + (self.token + self.mark) * len(of) for of in images]
        rows, pixels = split_by_row(self.whole(texts, images))
        pieces = list[Any]()
        mark = self.tokenizer.convert_tokens_to_ids(self.mark)
        for row, of in zip(rows, images, strict=True):
            marks = np.flatnonzero(row["input_ids"] == mark)
            if len(marks) != len(of) + 1:
                raise ValueError(f"it made {len(marks) - 1} places of {len(of)} images")
            places = [slice(start + 1, end) for start, end in pairwise(marks)]
            pieces.append([{key: row[key][place] for key in row} for place in places])
        return pieces, pixels

    def whole(self, texts: Sequence[str], images: Sequence[Sequence[Any]]) -> Any:
        """The batch that transformers makes of whole texts and their images."""
        return self.processor(
            text=list(texts),
            images=[list(of) for of in images] if any(images) else None,
            padding=True,
            add_special_tokens=False,
            return_tensors="pt",
        )

    @cached_property
    def digest(self) -> str:
        """xxh128 of the processor's class and settings. Processors of one digest give the same
        counts and pixels.
        """
        said = self.processor.image_processor.to_dict()
        pixels = {k: v for k, v in said.items() if v is not None and not COSMETIC.fullmatch(k)}
        own = {k: getattr(self.processor, k) for k in OWN if hasattr(self.processor, k)}
        shaping = [type(self.processor).__name__, own, pixels]
        text = json.dumps(shaping, sort_keys=True, default=str)
        return str(xxhash.xxh128_hexdigest(text.encode()))


def read_saved_texts(folder: str) -> dict[str, str]:
    """Name -> text of the files that transformers saved in a folder."""
    saved = (file for file in Path(folder).rglob("*") if file.suffix in SAVED)
    return {str(file.relative_to(folder)): file.read_text() for file in saved}


def is_odd(size: Sequence[int]) -> bool:
    """Return whether an image of this height and width is put through the processor, alone and in a
    batch with another image. The processor's counting function is not asked then.

    transformers may take a height of 1 or 3 pixels for the channels, and applies that to all images
    of the batch. Idefics3 makes nothing of an image of 799 x 4.
    """
    return min(size) < NARROW or max(size) > LONG * min(size)


def make_blank_image(size: Sequence[int]) -> Any:
    """A black image of this height and width."""
    from PIL import Image

    return Image.new("RGB", (size[1], size[0]))


def first_difference(processor: LoadedProcessor, rows: Sequence[Sequence[Any]]) -> str | None:
    """Return a sentence on the first difference between stored rows, as a loader expands them, and
    the batch that transformers makes of their whole texts; None if all are equal.

    Each row is compared by itself, then all rows with images in one batch. A row with an odd image
    that the processor refuses is left out: conversion sets such a record aside.

    Args:
        rows: a name, token ids with one for each image, and the images.
    """
    opened = [(name, ids, [turn_upright(image) for image in images]) for name, ids, images in rows]
    opened = [row for row in opened if not any(_is_refused(processor, image) for image in row[2])]
    for some in filter(None, [*([row] for row in opened), [row for row in opened if row[2]]]):
        try:
            key = next(_differences(processor, some), None)
        except Exception as error:
            key = f"input_ids by a rule of its own ({flatten_error(error)[:300]})"
        if key:
            name = some[0][0] if len(some) == 1 else "several rows in one batch"
            return (
                f"of {name} {type(processor.processor).__name__} makes {key} where it is given the whole text, and the loader would make "
                "something else of the stored row"
            )
    return None


def _is_refused(processor: LoadedProcessor, image: Any) -> bool:
    size = image.height, image.width
    return is_odd(size) and isinstance(processor.count(size), str)


def _differences(processor: LoadedProcessor, rows: Sequence[Any]) -> Iterator[str]:
    """Keys whose values differ between the batch of whole texts and the batch of stored rows."""
    texts, images = [processor.text_of(ids) for _, ids, _ in rows], [of for *_, of in rows]
    stored = processor.token.join(processor.around)
    whole = processor.whole([text.replace(stored, processor.token) for text in texts], images)
    made, pixels = processor.see(images) if any(images) else ([[] for _ in texts], {})
    tokens = [len(piece["input_ids"]) for pieces in made for piece in pieces]
    if tokens != [processor.count((image.height, image.width)) for of in images for image in of]:
        yield "another number of tokens of an image than it tells"
    theirs, whole_pixels = split_by_row(whole)
    for text, pieces, row in zip(texts, made, theirs, strict=True):
        ours, nothing = _row(processor, text, pieces), 0 * row["input_ids"]
        each = {**row, **ours}
        yield from (k for k in each if not are_equal(row.get(k, nothing), ours.get(k, nothing)))
    yield from (key for key in whole_pixels if not are_equal(whole_pixels[key], pixels.get(key)))


def split_by_row(batch: Any) -> tuple[list[Arrays], Arrays]:
    """A processor's batch as rows: for each row its arrays with a value per token, without padding;
    and the batch's other entries.

    Arrays of zeros alone are left out: generic tokenizers give such token_type_ids, which vision
    models do not take.
    """
    mask = batch["attention_mask"].bool()
    said = {k: v for k, v in batch.items() if getattr(v, "shape", None) == mask.shape}
    kept = [k for k, values in said.items() if k != "attention_mask" and values.any()]
    rows = [{k: said[k][n][of].numpy() for k in kept} for n, of in enumerate(mask)]
    return rows, {k: v for k, v in batch.items() if k not in said}


def _row(processor: Any, text: str, pieces: Sequence[Arrays]) -> Arrays:
    """A loader's row: the text's ids with the pieces in place of the image tokens, and the other
    keys of the pieces.
    """
    ids = np.array(processor.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
    spots = np.flatnonzero(ids == processor.token_id)
    if len(spots) != len(pieces):
        raise ValueError(f"{len(spots)} tokens {processor.token} stand for {len(pieces)} images")
    return fill_row(ids, spots, pieces)


def fill_row(ids: Any, spots: Any, pieces: Sequence[Arrays]) -> Arrays:
    """int64 arrays by key: a row's ids with the pieces in place of the image tokens at `spots`; of
    the pieces' other keys 0 beside them.
    """
    return {
        key: replace_tokens(ids * (key == "input_ids"), spots, [piece[key] for piece in pieces])
        for key in (pieces[0] if pieces else ["input_ids"])
    }


def turn_upright(content: Any) -> Any:
    """An image decoded, turned upright as its EXIF asks, in RGB. `content`: the file's bytes, or
    Pillow's image.
    """
    from PIL import Image, ImageOps

    image = Image.open(io.BytesIO(content)) if isinstance(content, bytes) else content
    return ImageOps.exif_transpose(image).convert("RGB")


def replace_tokens(values: Any, spots: Any, pieces: Sequence[Any]) -> Any:
    """int64: `values`, where a piece replaces the value at each of `spots`."""
    first, *others = np.split(values, spots)
    parts = [first]
    for piece, other in zip(pieces, others, strict=True):
        parts += [np.asarray(piece, np.int64), other[1:]]
    return np.concatenate(parts)


def are_equal(one: Any, other: Any) -> bool:
    """Whether two tensors, or two lists of tensors, have the same shapes and values."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    # Llama 4's pixels are bfloat16, which NumPy does not have.
    return np.array_equal(*(v.double() if hasattr(v, "double") else v for v in (one, other)))
