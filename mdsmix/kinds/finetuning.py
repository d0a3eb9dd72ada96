"""What pairs and conversations share: samples of prompts and responses, trained by the run's target policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from mdsmix.encode.columns import Columns
from mdsmix.encode.targets import Lengths, Targets, Turns, label
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds.base import Kind
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.tokens import Tokens

WINDOW_BYTES = 16 << 20
"""Half a second to two seconds of work. 100 MB of chats are 6 units: two workers take 2.6 s for them, where 96 MiB (2 units, one of 5 MB)
take 4.6 s and 32 MiB 3.0 s. A unit's fresh start costs 1 to 3 % of CPU: 4.9 to 5.3 s of user time at 16 MiB, 4.7 to 5.0 at 96."""


class Finetuning(Kind):
    word = "finetuning"
    keys: ClassVar[tuple[str, ...]] = ("too_long", "pack")
    called = "finetuning"
    window_bytes = WINDOW_BYTES

    def settings(
        self, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer
    ) -> Mapping[str, Any]:
        return {"too_long": stream.too_long, "pack": stream.pack}

    def contradictions(self, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        yield from super().contradictions(recipe, stream)
        if recipe.loader == "text":
            yield (
                "is finetuning data, which the text loader cannot read; set train_loader.name: finetuning, "
                "which reads pretraining streams too, or name: mdsmix, which reads both kinds as they are where mdsmix is "
                "installed beside LLM-Foundry, or take the stream out."
            )
        if stream.too_long != "cut" and not recipe.decoder_only_format:
            yield (
                f"too_long: {stream.too_long} stands beside decoder_only_format: false, where the loader cuts context and target "
                "apart: set too_long: cut."
            )

    def losses(self, tokens: Tokens, encoding: Encoding, eos: int | None) -> Lengths:
        return label(targets_of(encoding), _turns(tokens), eos, self.never(encoding)).losses()

    def cut(self, tokens: Tokens, encoding: Encoding) -> Lengths:
        return label(targets_of(encoding), _turns(tokens), None).cut()

    def never(self, encoding: Encoding) -> int | None:
        """A token that no policy trains."""
        return None


def _turns(tokens: Tokens) -> Turns:
    lengths = np.stack([tokens.prompts, tokens.responses], axis=1).ravel()
    return Turns(Ragged.from_lengths(tokens.ids.values, lengths), np.diff(tokens.turns))


def columns_of(encoding: Encoding, whole: Columns) -> Columns:
    """How a stream's samples are laid out; `whole`: where neither pack nor compact asks for less."""
    if encoding.pack:
        return "packed"
    return "pair" if encoding.compact else whole


def targets_of(encoding: Encoding) -> Targets:
    """The policies that a stream was converted under."""
    return Targets(
        target_prompts=encoding.target_prompts,
        target_responses=encoding.target_responses,
        decoder_only_format=encoding.decoder_only_format,
        max_seq_len=encoding.max_seq_len,
        too_long=encoding.too_long,
    )
