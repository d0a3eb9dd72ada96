"""Special tokens inside the texts of records: `<|im_start|>` typed by someone must not become a control token.

Nearly no text holds one, so texts are encoded as if that did not matter, and the ids tell: where no special id comes
out, none was in the text, and both ways of encoding agree. Two reductions over the ids cost 1 % of a conversion;
searching the texts cost 11 %. Only rows with a special id are encoded again as ordinary text, and compared: `<unk>`
is a special id too. Conversations are searched instead, since their template brings special tokens of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mdsmix.encode.backends import Backend
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.ragged import Ragged


@dataclass(frozen=True, slots=True)
class SpecialStrings:
    """The special tokens of a tokenizer, ready to be searched for.

    Tokens are grouped by their first two characters, and a text is searched once per group for what the group's tokens
    begin with (the 256 special tokens of Llama 3 are the one search for "<|"). A search answers yes for any
    occurrence, also where a tokenizer with `single_word` tokens would not match; it does not see a token that comes
    into being only through the tokenizer's normalizer (upper case made lower case, say).
    """

    groups: tuple[tuple[str, tuple[str, ...]], ...]
    "What the tokens of a group begin with, and the tokens."

    @staticmethod
    def of(tokens: Iterable[str]) -> SpecialStrings:
        """Groups the token strings; an empty string is no token."""
        by_start: dict[str, list[str]] = {}
        for token in sorted({token for token in tokens if token}):
            by_start.setdefault(token[:2], []).append(token)
        return SpecialStrings(
            tuple((_common_start(group), tuple(group)) for group in by_start.values())
        )

    def within(self, text: str) -> bool:
        """True where `text` holds at least one special token."""
        for start, tokens in self.groups:
            if start in text and any(token in text for token in tokens):
                return True
        return False


def _common_start(texts: list[str]) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071  (of any strings, not of paths)


def encode_texts(
    backend: Backend, texts: Sequence[str], rule: str, tokenizer: Tokenizer
) -> tuple[Ragged, list[int], list[int]]:
    """The ids of the texts, which rows hold a special token, and which of these `rule` (special_tokens_in_text) refuses.

    Those hold one that encode otherwise as ordinary text, or hold its control token even then. Under `escape` they are
    ordinary text and the latter are refused; under `allow` and `reject` they hold the special ids.
    """
    rows = backend.encode(texts, match_special=True)
    suspects = _rows_with(rows, tokenizer.special_ids)
    if not suspects:
        return rows, [], []
    plain = backend.encode([texts[row] for row in suspects], match_special=False)
    stuck = [suspects[i] for i in _stuck(plain, [texts[row] for row in suspects], tokenizer)]
    others = (r for i, r in enumerate(suspects) if not np.array_equal(plain[i], rows[r]))
    marked = sorted({*stuck, *others})
    refused = {"escape": stuck, "allow": [], "reject": marked}[rule]
    if rule != "escape" or not marked:
        return rows, marked, refused
    order = np.arange(len(texts))
    order[suspects] = len(texts) + np.arange(len(suspects))
    return Ragged.concat([rows, plain]).take(order), marked, refused


def _stuck(plain: Ragged, texts: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The rows that hold a control token although their texts were encoded as ordinary ones: the vocabularies of Unigram
    and WordLevel models hold its string like any word. The unknown token is none: any text may hold it."""
    names = dict(zip(tokenizer.special_ids, tokenizer.special_tokens, strict=True))
    unknown = tokenizer.template_variables.get("unk_token")
    names = {i: name for i, name in names.items() if name != unknown}
    return [
        row
        for row in _rows_with(plain, sorted(names))
        if any(names[i] in texts[row] for i in names.keys() & set(plain[row].tolist()))
    ]


def _rows_with(rows: Ragged, ids: Sequence[int]) -> list[int]:
    """The rows that hold one of the ids."""
    values = rows.values
    if not ids or not len(values) or values.max() < min(ids) or values.min() > max(ids):
        return []
    hits = np.flatnonzero((values >= min(ids)) & (values <= max(ids)))
    hits = hits[np.isin(values[hits], ids)]
    return [int(row) for row in np.unique(np.searchsorted(rows.offsets, hits, "right") - 1)]
