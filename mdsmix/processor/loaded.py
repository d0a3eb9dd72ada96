"""Opens a processor of transformers, and makes tokens and pixels of images with it.

A LoadedProcessor imports transformers and torch, so only loaders and separate processes open one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from mdsmix.errors import Unusable
from mdsmix.lazy_numpy import np
from mdsmix.messages import flatten_error
from mdsmix.processor.image_rows import Arrays, split_by_row
from mdsmix.tokenizer.transformers_five import make_readable, open_readable_folder

PROBE_SIZES = ((56, 56), (100, 333), (700, 250))
"""Heights and widths of blank images. For each size, the count of the processor's own counting
function is compared with the number of tokens that the processor makes of the image.
"""
NARROW_PIXELS = 28
"An image with a side of fewer pixels is odd (`is_odd`)."
LONG_RATIO = 16
"An image is odd too if its longer side is more than 16 times its shorter side."
USUAL_SIZE = (60, 80)
"Height and width of the image that is put into a batch with an odd image."
OWN_SETTINGS = (
    "patch_size",
    "image_seq_len",
    "image_seq_length",
    "num_additional_image_tokens",
    "vision_feature_select_strategy",
)
"""Attributes of a processor that affect tokens or pixels, in addition to the settings of its image
processor.
"""
COSMETIC = re.compile(
    r"_?processor_class|.*_processor_type|auto_map|device|return_tensors|disable_grouping"
    r"|.*data_format|default_to_square|m(in|ax)_pixels|_.*"
)
"""Settings that do not affect images. The digest leaves them out, since versions of transformers
save different settings of this sort. Qwen's limits (min_pixels, max_pixels) are also in `size`, so
they are left out too.
"""
SAVED_SUFFIXES = (".json", ".jinja", ".txt")
"""Suffixes of the files that are kept when transformers saves a tokenizer or processor. Code is not
kept. A SentencePiece model is not kept either, since tokenizer.json has the same content.
"""


class ProcessedImages(NamedTuple):
    """The tokens and pixels that a processor makes of a batch of images."""

    rows: list[list[Arrays]]
    """For each row and each of its images: the arrays with a value per token, such as
    `input_ids`.
    """
    batch_entries: Arrays
    "The other entries of the batch, such as `pixel_values`, as the model takes them."


class LoadedProcessor:
    """A processor that transformers has opened, with its tokenizer and its image token.

    Attributes: `processor` and `tokenizer` are objects of transformers; `token` and `token_id` are
    the token in a text that the processor replaces by the tokens of an image.
    """

    def __init__(self, name: str) -> None:
        """Open the processor.

        Raises Unusable if it has no tokenizer, no image processor, or no image token that it
        replaces by tokens of an image.

        Args:
            name: the processor's folder or hub name.
        """
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoProcessor

        with open_readable_folder(name) as folder:
            self.processor = AutoProcessor.from_pretrained(folder.name)
        self.tokenizer: Any = getattr(self.processor, "tokenizer", None)
        if self.tokenizer is None or not hasattr(self.processor, "image_processor"):
            raise Unusable(
                f"its class {type(self.processor).__name__} has no tokenizer or no image "
                "processor; name the processor of a model that reads text and images"
            )
        # Batches need a padding token and a separator; EOS and padding may replace each other.
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.separator = self.tokenizer.eos_token or self.tokenizer.pad_token
        "A token that no processor prints inside an image. It separates the images of a row."
        if self.separator is None:
            raise Unusable(
                "its tokenizer has neither an EOS nor a padding token; set eos_token in the "
                "tokenizer_config.json of its folder"
            )
        self._added = np.array([*self.tokenizer.get_added_vocab().values()], np.int64)
        self.token = self._find_token()
        self.token_id = int(self.tokenizer.convert_tokens_to_ids(self.token))

    def _find_token(self) -> str:
        """Return the token for an image in a text. This is the processor's `boi_token` or, if the
        processor does not replace that token by tokens of an image, its `image_token`.

        Raises Unusable if the processor replaces neither.
        """
        # `count_by_trying` reads self.token, so each candidate is set before it is tried.
        for key in ("boi_token", "image_token"):
            token: Any = getattr(self.processor, key, None)
            self.token = getattr(token, "content", token)  # older versions have an AddedToken
            with suppress(Exception):
                if isinstance(self.token, str) and self.count_by_trying(PROBE_SIZES[0]):
                    return self.token
        raise Unusable(
            "it replaces neither a boi_token nor an image_token by the tokens of an image; name "
            "the processor of another model (docs/images.md lists those that can be used)"
        )

    @cached_property
    def around(self) -> tuple[str, str]:
        """(before, after): the ordinary text that the processor adds before and after an image's
        own tokens, such as blank lines by Gemma 3. It is tokenized together with the text next to
        it.
        """
        rows, _ = self._process_with_text([[make_blank_image(PROBE_SIZES[0])]])
        [[image_arrays]] = rows  # the only image of the only row
        ids = image_arrays["input_ids"]
        inside = self._find_added_tokens(ids)
        return self.decode(ids[: inside.start]), self.decode(ids[inside.stop :])

    def decode(self, ids: Any) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _find_added_tokens(self, ids: Any) -> slice:
        """Return the range of `ids` from the first to the last added token of the tokenizer, such
        as an image token. Ordinary text before and after this range is left out. If `ids` contains
        no added token, return the whole range.
        """
        positions = np.flatnonzero(np.isin(ids, self._added))
        if not len(positions):
            return slice(0, len(ids))
        return slice(int(positions[0]), int(positions[-1]) + 1)

    @cached_property
    def has_function(self) -> bool:
        """Whether the processor has a counting function that gives the right number of tokens for
        all PROBE_SIZES. Such a function computes the number from the size of an image alone.
        """
        try:
            counted = self._count_by_function(PROBE_SIZES)
            return counted == [self.count_by_trying(size) for size in PROBE_SIZES]
        except Exception:
            return False

    def card(self) -> dict[str, Any]:
        """Return the fields of `processor.card.Processor` without name and path; `files` is
        {name: text}.
        """
        from tempfile import TemporaryDirectory

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
        """Return the number of tokens of an image of this size.

        If the processor refuses the image, alone or in a batch with another image, return the
        reason as a sentence. Qwen2.5-VL refuses an image 200 times as wide as high.

        Args:
            size: height and width in pixels.
        """
        name = type(self.processor).__name__
        try:
            if self.has_function and not is_odd(size):
                return self._count_by_function([size])[0]
            tokens = self.count_by_trying(size)
        except Exception as error:
            return f"{name} refuses it: {_describe_error(error)}"
        if is_odd(size):
            fault = self._find_batch_fault(size, tokens)
            if fault:
                return f"{name} refuses it in a batch with another image: {fault}"
        return tokens

    def _find_batch_fault(self, size: Sequence[int], tokens: int) -> str:
        """Test an image in a batch with a usual image, first before that image and then after it.
        Return what is wrong, for a message. Return "" if the image gets as many tokens in both
        batches as alone.

        Args:
            size: height and width of the image.
            tokens: the number of tokens that the processor makes of the image alone.
        """
        for position in range(2):  # the place of the image among the two rows of the batch
            images = [[make_blank_image(USUAL_SIZE)]]
            images.insert(position, [make_blank_image(size)])
            try:
                rows, _ = self.process_images(images)
            except Exception as error:
                return _describe_error(error)
            tokens_in_batch = len(rows[position][0]["input_ids"])
            if tokens_in_batch != tokens:
                return f"it makes {tokens_in_batch} tokens of it there and {tokens} of it alone"
        return ""

    def _count_by_function(self, sizes: Sequence[Sequence[int]]) -> list[int]:
        """Return the number of tokens of an image of each size, by the processor's own counting
        function, which needs no image.

        Args:
            sizes: pairs of height and width.
        """
        image_sizes = [list(size) for size in sizes]
        answer = self.processor._get_num_multimodal_tokens(image_sizes=image_sizes)
        return [int(count) for count in answer["num_image_tokens"]]

    def count_by_trying(self, size: Sequence[int]) -> int:
        """Return the number of tokens that the processor makes of a blank image of this size.

        Args:
            size: height and width in pixels.
        """
        rows, _ = self.process_images([[make_blank_image(size)]])
        [[image_arrays]] = rows  # the only image of the only row
        return len(image_arrays["input_ids"])

    def process_images(self, images: Sequence[Sequence[Any]]) -> ProcessedImages:
        """Make the tokens and pixels of images, as one batch. The text `around` an image is left
        out.

        Args:
            images: the images of each row, at least one per row.
        """
        processed = self._process_with_text(images)
        for row in processed.rows:
            for image_arrays in row:
                inside = self._find_added_tokens(image_arrays["input_ids"])
                image_arrays |= {key: values[inside] for key, values in image_arrays.items()}
        return processed

    def _process_with_text(self, images: Sequence[Sequence[Any]]) -> ProcessedImages:
        """Do the same as `process_images`, but keep the text around each image.

        Raises ValueError if the processor does not make tokens for each image.
        """
        # Each image is put between two separators. The tokens are split again at the separators.
        texts = [
            self.separator + (self.token + self.separator) * len(row_images)
            for row_images in images
        ]
        rows, batch_entries = split_by_row(self.process_texts(texts, images))
        separator_id = self.tokenizer.convert_tokens_to_ids(self.separator)
        pieces = list[list[Arrays]]()
        for row, row_images in zip(rows, images, strict=True):
            separators = np.flatnonzero(row["input_ids"] == separator_id)
            if len(separators) != len(row_images) + 1:
                raise ValueError(
                    f"it made tokens for {len(separators) - 1} images, but the row has "
                    f"{len(row_images)} images"
                )
            pieces_of_row = list[Arrays]()
            for start, end in pairwise(separators):
                pieces_of_row.append({key: values[start + 1 : end] for key, values in row.items()})
            pieces.append(pieces_of_row)
        return ProcessedImages(pieces, batch_entries)

    def process_texts(self, texts: Sequence[str], images: Sequence[Sequence[Any]]) -> Any:
        """Return the batch that transformers makes of whole texts and their images: a mapping of
        names such as `input_ids` to tensors.

        Args:
            texts: one text per row, with one image token for each image.
            images: the images of each row.
        """
        images_of_rows = None  # a batch without images has no such argument
        if any(images):
            images_of_rows = [list(row_images) for row_images in images]
        return self.processor(
            text=list(texts),
            images=images_of_rows,
            padding=True,
            add_special_tokens=False,
            return_tensors="pt",
        )

    @cached_property
    def digest(self) -> str:
        """xxh128 of the processor's class and settings. Processors with the same digest make the
        same number of tokens and the same pixels of every image.
        """
        pixel_settings = {
            key: value
            for key, value in self.processor.image_processor.to_dict().items()
            if value is not None and not COSMETIC.fullmatch(key)
        }
        own_settings = {
            key: getattr(self.processor, key)
            for key in OWN_SETTINGS
            if hasattr(self.processor, key)
        }
        hashed = [type(self.processor).__name__, own_settings, pixel_settings]
        text = json.dumps(hashed, sort_keys=True, default=str)
        return str(xxhash.xxh128_hexdigest(text.encode()))


def read_saved_texts(folder: str) -> dict[str, str]:
    """Return {name: text} of the files that transformers saved in a folder; only files with
    SAVED_SUFFIXES.
    """
    files = (file for file in Path(folder).rglob("*") if file.suffix in SAVED_SUFFIXES)
    return {str(file.relative_to(folder)): file.read_text() for file in files}


def _describe_error(error: Exception) -> str:
    """Return an error's message on one line, or the name of its class if it has no message."""
    message = flatten_error(error)
    return message if message else type(error).__name__


def is_odd(size: Sequence[int]) -> bool:
    """Return whether an image is so narrow or long that its tokens must be counted by trying.

    The processor's counting function is not reliable for such an image. So `LoadedProcessor.count`
    has the processor make tokens of the image, first alone and then in batches with another image.
    Two examples of what goes wrong: transformers may mistake a height of 1 or 3 pixels for the
    color channels, and then does so for all images of the batch; Idefics3 makes no tokens of an
    image of 799 x 4.

    Args:
        size: height and width in pixels.
    """
    return min(size) < NARROW_PIXELS or max(size) > LONG_RATIO * min(size)


def make_blank_image(size: Sequence[int]) -> Any:
    """Return a black image. `size` is its height and width in pixels."""
    from PIL import Image

    return Image.new("RGB", (size[1], size[0]))
