"""A processor of transformers, asked which tokens an image becomes. Imports transformers and torch: a process of its own, and loaders.

As `python -m mdsmix.encode.processor_process take` it reads a name and prints a card; with `count` it reads lines of sizes and answers
each with a line of counts, or of why there is none.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import xxhash

from mdsmix.encode.counting import serve

PROBES = ((56, 56), (100, 333), (700, 250))
"Heights and widths at which a processor's function is compared with what it makes of an image."
NARROW = 28
"""Height or width below which a function is not believed: of an image 1 or 3 high transformers takes the height for the channels, and
Idefics3 makes nothing of one of 799 x 4."""
SAVED = (".json", ".jinja", ".txt", ".model")
COSMETIC = re.compile(
    r"_?processor_class|.*_processor_type|auto_map|device|return_tensors|disable_grouping|.*data_format|default_to_square|"
    r"m(in|ax)_pixels|_.*"
)
"Settings that shape no image, of which versions of transformers save some and not others; Qwen's limits stand in `size` as well."


class LoadedProcessor:
    """A processor, and what it makes of images."""

    def __init__(self, name: str) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(name)
        self.tokenizer: Any = getattr(self.processor, "tokenizer", None)
        if self.tokenizer is None or not hasattr(self.processor, "image_processor"):
            raise ValueError(
                f"{type(self.processor).__name__} has no tokenizer or no image processor"
            )
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if (mark := self.tokenizer.eos_token or self.tokenizer.pad_token) is None:
            raise ValueError("its tokenizer has neither an EOS nor a padding token")
        self.mark: str = mark
        "A token between images, which no processor puts inside of one."
        self.mark_id = int(self.tokenizer.convert_tokens_to_ids(mark))

    @cached_property
    def token(self) -> str:
        """What stands for an image in a text: `boi_token` where one begins an image, else `image_token`."""
        errors = []
        for key in ("boi_token", "image_token"):
            text = getattr(self.processor, key, None)
            text = getattr(text, "content", text)  # of an AddedToken, as older versions have it
            if isinstance(text, str):
                try:
                    self._once(text, (64, 64))
                    return text
                except Exception as error:
                    errors.append(f"{text}: {error}")
        raise ValueError(
            f"it expands no token that it names ({'; '.join(errors) or 'it names none'})"
        )

    @cached_property
    def token_id(self) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(self.token))

    @cached_property
    def has_function(self) -> bool:
        """Whether its own function tells what it then does."""
        try:
            return self._told(PROBES) == [self.learned(size) for size in PROBES]
        except Exception:
            return False

    def counts(self, sizes: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of an image of each height and width."""
        return self._told(sizes) if self.has_function else [self.learned(s) for s in sizes]

    def counts_or_why(self, sizes: Sequence[Sequence[int]]) -> list[int | str]:
        """The same, with why there is none of a size that it refuses: Qwen2.5-VL one of 200 times as wide as high."""
        try:
            if all(min(size) >= NARROW for size in sizes):
                return list(self.counts(sizes))
            return self._each(sizes) if len(sizes) > 1 else [self._proved(sizes[0])]
        except Exception as error:
            if len(sizes) > 1:
                return self._each(sizes)
            return [" ".join(f"{type(self.processor).__name__} refuses it: {error}".split())]

    def _each(self, sizes: Sequence[Sequence[int]]) -> list[int | str]:
        return [self.counts_or_why([size])[0] for size in sizes]

    def _proved(self, size: Sequence[int]) -> int:
        """Tokens of a narrow image, which is put through it, whatever its function says."""
        (told,), made = self.counts([size]), self.learned(size)
        if told != made:
            raise ValueError(
                f"it makes {made} tokens of {size[1]} x {size[0]} pixels, and its function says {told}"
            )
        return made

    def _told(self, sizes: Sequence[Sequence[int]]) -> list[int]:
        found = self.processor._get_num_multimodal_tokens(image_sizes=[list(s) for s in sizes])
        return [int(n) for n in found["num_image_tokens"]]

    def learned(self, size: Sequence[int]) -> int:
        return self._once(self.token, size)

    def _once(self, token: str, size: Sequence[int]) -> int:
        from PIL import Image

        (row,), _ = self.see([[Image.new("RGB", (size[1], size[0]))]], token)
        return len(row[0]["input_ids"])

    def see(
        self, images: Sequence[Sequence[Any]], token: str | None = None
    ) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
        """Rows of one image or more, through the processor.

        Returns: for each row and image the ids that stand for it, with what else the processor says of each token; what it makes of
        the pixels, as the model takes it.
        """
        mark, token = self.mark, token or self.token
        texts = [mark + (token + mark) * len(of) for of in images]
        found = self.processor(
            text=texts,
            images=[list(of) for of in images],
            padding=True,
            add_special_tokens=False,
            return_tensors="pt",
        )
        ids = found["input_ids"]
        said = [k for k, v in found.items() if getattr(v, "shape", None) == ids.shape]
        mask = found["attention_mask"].bool().numpy()
        # Tokenizers of no model in particular give token_type_ids of zeros, which models that see do not take.
        of_tokens = {k: found[k].numpy() for k in said if k != "attention_mask" and found[k].any()}
        rows = [
            self._cut({k: v[n][mask[n]] for k, v in of_tokens.items()}, len(of))
            for n, of in enumerate(images)
        ]
        pixels = {k: v for k, v in found.items() if k not in said}
        return rows, pixels

    def _cut(self, row: dict[str, Any], count: int) -> list[dict[str, Any]]:
        marks = np.flatnonzero(row["input_ids"] == self.mark_id)
        if len(marks) != count + 1:
            raise ValueError(f"it made {len(marks) - 1} places of {count} images")
        return [{k: v[start + 1 : end] for k, v in row.items()} for start, end in pairwise(marks)]

    @cached_property
    def digest(self) -> str:
        """xxh128 of its class and settings: two processors of one digest make the same counts and pixels."""
        pixels = _plain(self.processor.image_processor)
        shaping = [type(self.processor).__name__, self._own(), pixels]
        text = json.dumps(shaping, sort_keys=True, default=str)
        return str(xxhash.xxh128_hexdigest(text.encode()))

    def card(self) -> dict[str, Any]:
        """What `mdsmix.encode.processor.Processor` says of it, and its files."""
        files = {}
        with TemporaryDirectory() as place:
            self.processor.save_pretrained(place)
            for file in Path(place).rglob("*"):
                if file.suffix in SAVED:
                    files[str(file.relative_to(place))] = file.read_text()
        return {
            "hash": self.digest,
            "class_name": type(self.processor).__name__,
            "image_token": self.token,
            "counts_by": "function" if self.has_function else "learned",
            "files": files,
        }

    def _own(self) -> dict[str, Any]:
        """Numbers and words of the processor itself, such as patch_size."""
        keys = (
            "patch_size",
            "image_seq_len",
            "image_seq_length",
            "num_additional_image_tokens",
            "vision_feature_select_strategy",
        )
        return {k: getattr(self.processor, k) for k in keys if hasattr(self.processor, k)}


def _plain(image_processor: Any) -> dict[str, Any]:
    found = image_processor.to_dict()
    return {k: v for k, v in found.items() if v is not None and not COSMETIC.fullmatch(k)}


def main() -> None:
    try:
        with redirect_stdout(sys.stderr):
            given = json.loads(sys.stdin.readline())
            name, *beside = given if isinstance(given, list) else [given]
            seeing = LoadedProcessor(name)
            answer = {} if beside else seeing.card()
    except Exception as error:
        answer, beside = {"error": f"{type(error).__name__}: {error}"}, []
    if beside:
        serve(seeing, *beside)
    else:
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
