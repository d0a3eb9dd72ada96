"""Prompts and responses, rendered by no template."""

from __future__ import annotations

from mdsmix.encode.backends import Backend
from mdsmix.encode.base import Encoder
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds.base import packed_columns
from mdsmix.kinds.finetuning import Finetuning, columns_of, targets_of
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Pair
from mdsmix.shards.manifest import Encoding


class Pairs(Finetuning):
    name = "pairs"
    reads = Pair

    def columns(self, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, str]:
        if stream.pack:
            return packed_columns(f"ndarray:{tokenizer.dtype}", has_targets=True)
        return dict.fromkeys(("input_ids", "labels"), f"ndarray:{tokenizer.dtype}")

    def open_encoder(self, encoding: Encoding, tokenizer: Tokenizer, backend: Backend) -> Encoder:
        from mdsmix.encode.prompt_response import PromptResponse

        return PromptResponse(
            tokenizer=tokenizer,
            backend=backend,
            targets=targets_of(encoding),
            special_tokens_in_text=encoding.special_tokens_in_text,
            columns=columns_of(encoding, "pair"),
        )
