"""Whether a text holds the string of a special token, found before any tokenizer sees it.

Nearly no text does, so the test is made for the answer no: special tokens are grouped by their
first two characters, and a text is searched once per group for what the group's tokens begin with
(the 256 special tokens of Llama 3 are the one search for "<|"). It answers yes for any occurrence,
also where a tokenizer with `single_word` tokens would not match; it does not see a token that comes
into being only through the tokenizer's normalizer (upper case made lower case, say).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecialStrings:
    """The special tokens of a tokenizer, ready to be searched for."""

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


def is_encodable(text: str) -> bool:
    """False for a text with a lone surrogate: it has no UTF-8 form, and no tokenizer takes it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
