"""Token ids -> text, for those who show what a stream holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mdsmix.encode.pretrained import Tokenizer, cache_folder, open_tokenizer
from mdsmix.recipe import TokenizerSpec


@dataclass(frozen=True, slots=True)
class Decoder:
    """Ids -> text, and which ids are control tokens: text may spell the same characters in ordinary tokens."""

    model: Any
    control: frozenset[int]
    "The ids of the tokenizer's special tokens."

    def text(self, ids: Sequence[int], before: int | None = None) -> str:
        """The text of the ids. `before`: the id in front of them, since many decoders drop the space that a text begins with."""
        if before is not None:
            head, whole = self._decode([before]), self._decode([before, *ids])
            if whole.startswith(head):
                return whole[len(head) :]
        return self._decode(list(ids))

    def _decode(self, ids: list[int]) -> str:
        return str(self.model.decode(ids, skip_special_tokens=False))


def find_decoder(name: str | None, hash: str | None) -> Decoder | None:
    """By the tokenizer named, or by the snapshot of that hash; None where this machine has neither."""
    if name:
        return decoder_of(open_tokenizer(TokenizerSpec(name=name)))
    for card in (cache_folder() / "tokenizers").glob("*/card.json"):
        said = json.loads(card.read_bytes())
        if said["hash"] == hash:
            return _decoder(str(card.with_name("tokenizer.json")), frozenset(said["special_ids"]))
    return None


def decoder_of(tokenizer: Tokenizer) -> Decoder:
    """Of a tokenizer that was opened."""
    return _decoder(tokenizer.path, frozenset(tokenizer.special_ids))


@lru_cache(maxsize=2)
def _decoder(path: str, control: frozenset[int]) -> Decoder:
    """Read once for many streams: a large tokenizer takes half a second. The file is of the cache, named by what is in it."""
    from tokenizers import Tokenizer as Model

    return Decoder(Model.from_file(path), control)
