"""Opens a processor of transformers, makes tokens and pixels of images with it, and tests whether a
loader's rows equal the rows that the processor makes itself.

A stored row has one token for each image. A loader replaces this token by the tokens that the
processor makes of the image alone. That is wrong if the processor's tokens depend on the text
around an image, or on the row's other images. `first_difference` finds such a processor.

A LoadedProcessor imports transformers and torch, so only loaders and separate processes open one.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from mdsmix.errors import Unusable
from mdsmix.lazy_numpy import np
from mdsmix.messages import flatten_error
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


Arrays = dict[str, Any]
"""Key -> array or tensor. Some keys, such as `input_ids`, have a value per token. Others, such as
`pixel_values`, belong to a whole batch.
"""


class StoredRow(NamedTuple):
    """A row of a converted stream, with its images, on which a processor is tested."""

    name: str
    "For messages, such as `one image`."
    ids: list[int]
    "The token ids of the row, with one token for each image."
    images: Sequence[Any]
    "The images of the row: bytes of files, or images of Pillow."


class ProcessedImages(NamedTuple):
    """The tokens and pixels that a processor makes of a batch of images."""

    rows: list[list[Arrays]]
    """For each row and each of its images: the arrays with a value per token, such as
    `input_ids`.
    """
    batch_entries: Arrays
    "The other entries of the batch, such as `pixel_values`, as the model takes them."


class RowsOfBatch(NamedTuple):
    """A processor's batch, split into rows."""

    rows: list[Arrays]
    "For each row the arrays with a value per token, without padding."
    batch_entries: Arrays
    "The entries of the batch that have no value per token, such as `pixel_values`."


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

    def answer(self, question: Mapping[str, Any]) -> Any:
        """Answer a question that another process has sent.

        Args:
            question: its keys decide what is answered:
                `sizes` (pairs of height and width): the token count of each size, by `count`;
                `rows` (a list of StoredRow): the result of `first_difference`;
                neither: the result of `card`.
        """
        if "sizes" in question:
            return [self.count(size) for size in question["sizes"]]
        if "rows" in question:
            return first_difference(self, question["rows"])
        return self.card()

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


def first_difference(processor: LoadedProcessor, rows: Sequence[StoredRow]) -> str | None:
    """Compare two ways of making a batch: a loader replaces the image tokens of stored rows, and
    transformers makes rows of the whole texts. Return a sentence on the first difference; None if
    all rows are equal.

    Each row is compared alone, then all rows with images in one batch. A row with an odd image that
    the processor refuses is left out, since `convert` puts such a record into the quarantine.
    """
    decoded = [row._replace(images=[turn_upright(image) for image in row.images]) for row in rows]
    refuses = partial(_is_refused, processor)
    usable = [row for row in decoded if not any(map(refuses, row.images))]
    with_images = [row for row in usable if row.images]
    batches = [[row] for row in usable]
    if with_images:
        batches.append(with_images)
    class_name = type(processor.processor).__name__
    for batch in batches:
        name = batch[0].name if len(batch) == 1 else "several rows in one batch"
        try:
            problem = next(_find_differences(processor, batch), None)  # only the first
        except Exception as error:
            problem = f"makes input_ids by a rule of its own ({flatten_error(error)[:300]})"
        if problem:
            return f"for {name}, {class_name} {problem}"
    return None


def _is_refused(processor: LoadedProcessor, image: Any) -> bool:
    """Return whether an image is odd and the processor refuses it. Then `count` returns a reason,
    not a number.
    """
    size = image.height, image.width
    return is_odd(size) and isinstance(processor.count(size), str)


def _find_differences(processor: LoadedProcessor, rows: Sequence[StoredRow]) -> Iterator[str]:
    """Yield the differences between the batch that the processor makes of whole texts and the batch
    that a loader makes of stored rows. Each difference is the end of a sentence that begins with
    the processor's name: `makes other pixel_values ...`.
    """
    texts = [processor.decode(row.ids) for row in rows]
    images = [row.images for row in rows]
    # Let the processor make a batch of the whole texts. A stored text contains the text around an
    # image, which the processor prints itself.
    before, after = processor.around
    stored_token = f"{before}{processor.token}{after}"
    whole_texts = [text.replace(stored_token, processor.token) for text in texts]
    whole = split_by_row(processor.process_texts(whole_texts, images))
    # Let it make the tokens and pixels of the images alone, as a loader does.
    pieces: list[list[Arrays]] = [[] for _ in texts]
    pixels: Arrays = {}
    if any(images):
        pieces, pixels = processor.process_images(images)
    # Compare the counts of tokens, each row, and the pixels.
    for row_images, row_pieces in zip(images, pieces, strict=True):
        yield from _find_wrong_counts(processor, row_images, row_pieces)
    for text, row_pieces, whole_row in zip(texts, pieces, whole.rows, strict=True):
        loader_row = _make_loader_row(processor, text, row_pieces)
        # A key that only one of the two rows has must be 0 at every token.
        zeros = 0 * whole_row["input_ids"]
        for key in {**whole_row, **loader_row}:
            if not are_equal(whole_row.get(key, zeros), loader_row.get(key, zeros)):
                yield OTHER_VALUES.format(key=key)
    for key, values in whole.batch_entries.items():
        if not are_equal(values, pixels.get(key)):
            yield OTHER_VALUES.format(key=key)


OTHER_VALUES = "makes other {key} from the whole text than the loader makes from the stored row"
"The end of a sentence that begins with the processor's name."


def _find_wrong_counts(
    processor: LoadedProcessor, images: Sequence[Any], pieces: Sequence[Arrays]
) -> Iterator[str]:
    """Compare the number of tokens that the processor makes of each image with its count for the
    image's size. Yield the end of a sentence for each difference.

    Args:
        processor: the processor.
        images: the images of one row.
        pieces: for each image, the arrays that the processor makes of it.
    """
    for image, image_arrays in zip(images, pieces, strict=True):
        number = len(image_arrays["input_ids"])
        counted = processor.count((image.height, image.width))
        if number != counted:
            yield (
                f"makes {number} tokens of an image of {image.width} x {image.height} pixels, but "
                f"its count for this size is {counted}"
            )


def split_by_row(batch: Any) -> RowsOfBatch:
    """Split a processor's batch into rows.

    Arrays that contain only zeros are left out: generic tokenizers return such token_type_ids,
    which vision models do not accept.
    """
    mask = batch["attention_mask"].bool()
    # A tensor with the shape of the mask has a value per token.
    by_token = {
        key: values for key, values in batch.items() if getattr(values, "shape", None) == mask.shape
    }
    keys = [key for key, values in by_token.items() if key != "attention_mask" and values.any()]
    rows = [
        {key: by_token[key][number][row_mask].numpy() for key in keys}
        for number, row_mask in enumerate(mask)
    ]
    return RowsOfBatch(rows, {key: values for key, values in batch.items() if key not in by_token})


def _make_loader_row(processor: LoadedProcessor, text: str, pieces: Sequence[Arrays]) -> Arrays:
    """Return the row that a loader makes of a text: the ids of the text, with each image token
    replaced by the tokens of its image, and the arrays that the images have besides ids, such as
    token_type_ids.

    Raises ValueError if the text does not have one image token for each image.

    Args:
        processor: its tokenizer is used.
        text: the text of a stored row, with one image token for each image.
        pieces: for each image, its tokens and other arrays, as `process_images` returns them.
    """
    ids = np.array(processor.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
    spots = np.flatnonzero(ids == processor.token_id)
    if len(spots) != len(pieces):
        raise ValueError(
            f"the text has {len(spots)} tokens {processor.token} for {len(pieces)} images"
        )
    return fill_row(ids, spots, pieces)


def fill_row(ids: Any, spots: Any, pieces: Sequence[Arrays]) -> Arrays:
    """Replace the image tokens of a row by the tokens of its images. Return key -> int64 array,
    with a value per token of the new row.

    Args:
        ids: int64, the row's token ids.
        spots: the positions of the image tokens in `ids`.
        pieces: the arrays of each image, by key. Keys other than `input_ids` have the value 0 at
            the row's own tokens.
    """
    if not pieces:
        return {"input_ids": replace_tokens(ids, spots, [])}
    filled = Arrays()
    for key in pieces[0]:
        values = ids if key == "input_ids" else np.zeros_like(ids)
        filled[key] = replace_tokens(values, spots, [piece[key] for piece in pieces])
    return filled


def turn_upright(content: Any) -> Any:
    """Return a decoded image in RGB, turned upright as its EXIF asks.

    Args:
        content: the file's bytes, or Pillow's image.
    """
    from PIL import Image, ImageOps

    image = Image.open(io.BytesIO(content)) if isinstance(content, bytes) else content
    return ImageOps.exif_transpose(image).convert("RGB")


def replace_tokens(values: Any, spots: Any, pieces: Sequence[Any]) -> Any:
    """Return `values` as int64, with the value at each of `spots` replaced by one of the pieces.

    Args:
        values: the ids of one row, or other values per token.
        spots: ascending positions in `values`.
        pieces: for each position, the values that replace the value there; any number of them.
    """
    # Split the values before each spot. Each stretch after the first begins with the value that is
    # replaced.
    first, *later_stretches = np.split(values, spots)
    arrays = [first]
    for piece, stretch in zip(pieces, later_stretches, strict=True):
        arrays += [np.asarray(piece, np.int64), stretch[1:]]
    return np.concatenate(arrays)


def are_equal(first: Any, second: Any) -> bool:
    """Return whether two tensors or arrays have the same shapes and values. Lists are equal if they
    have equally many items and these are equal.
    """
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(are_equal, first, second))
    # Llama 4's pixels are bfloat16, which NumPy does not have.
    arrays = [
        values.double() if hasattr(values, "double") else values for values in (first, second)
    ]
    return np.array_equal(arrays[0], arrays[1])
