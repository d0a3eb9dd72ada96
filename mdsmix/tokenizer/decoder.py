"""Turns token ids back into text, for commands that show rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from mdsmix.frozen import frozen
from mdsmix.recipe import TokenizerSpec
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from mdsmix.tokenizer.snapshot import CARD, find_snapshot, load_card
from mdsmix.tokenizer.transformers_five import TOKENIZER_JSON


@frozen
class Decoder:
    """Turns ids into text, and knows which ids are control tokens. The text alone does not show
    which tokens are control tokens, since ordinary tokens may give the same characters.
    """

    model: Any
    "A `tokenizers.Tokenizer`."
    control: frozenset[int]
    "The ids of the tokenizer's special tokens."

    def text(self, ids: Sequence[int], before: int | None = None) -> str:
        """Return the text of ids.

        Args:
            ids: the ids to decode.
            before: the id in front of these ids in the row; None at the row's start. It is needed
                since many decoders drop a space at the beginning of a text.
        """
        if before is not None:
            text_before = self._decode([before])
            text = self._decode([before, *ids])
            if text.startswith(text_before):
                return text[len(text_before) :]
        return self._decode(list(ids))

    def _decode(self, ids: list[int]) -> str:
        """Return the text of ids; an id outside the vocabulary is shown as `[id -100]`."""
        texts = list[str]()
        for is_known, run in groupby(ids, self._is_known):
            if is_known:
                texts.append(str(self.model.decode([*run], skip_special_tokens=False)))
            else:
                texts += [f"[id {number}]" for number in run]
        return "".join(texts)

    def _is_known(self, number: int) -> bool:
        """Return whether an id is in the vocabulary. For other ids `tokenizers` gives no text, or
        raises OverflowError if the id has more than 32 bits.
        """
        return 0 <= number < 1 << 32 and self.model.id_to_token(number) is not None


def find_decoder(name: str | None, hash: str | None) -> Decoder | None:
    """Return the decoder of a tokenizer. Return None if no name is given and the cache does not
    have the tokenizer.

    Args:
        name: the tokenizer's folder, file or hub name; None: find it in the cache by its hash.
        hash: the hash of the tokenizer, which is used if `name` is None.
    """
    if name:
        return open_decoder(open_tokenizer(TokenizerSpec(name=name)))
    folder = find_snapshot(hash, f"tokenizers/*/{CARD}")
    if folder is None:
        return None
    return open_decoder(load_card(Tokenizer, folder, name="", path=str(folder / TOKENIZER_JSON)))


def open_decoder(tokenizer: Tokenizer) -> Decoder:
    """Return the decoder of a tokenizer, read from the tokenizer.json of its snapshot."""
    return Decoder(_read_model(tokenizer.path), frozenset(tokenizer.special_ids))


@lru_cache(maxsize=2)
def _read_model(path: str) -> Any:
    """Read a tokenizer.json. It is read only once for many streams, since a large file takes half a
    second, and since the content of a path in the cache never changes.
    """
    from tokenizers import Tokenizer as Model

    return Model.from_file(path)
