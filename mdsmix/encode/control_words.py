"""Finds control words that are split between two texts of a row. A control word is the string of a
control token, such as `</think>`.

Prompt and response are tokenized separately. If a prompt ends in `<` and the response begins with
`/think>`, the row does not contain the token `</think>`: the model is trained on other tokens than
it sees at inference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from mdsmix.record import RecordRefused

EXCERPT = 60
"Characters of each text in a bad record's detail."
OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
"""Pattern of an unfinished control word at the end of a text, such as `<`: both `<think>` and
`</think>` begin like this. A control word is one token, so it must not be split.
"""


class ControlWords:
    """The control words of a tokenizer: the strings of its added tokens, such as `</think>`. Finds
    control words that are split between two texts. Made by `open_control_words`.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        """Keep the control words among the tokens: tokens of two or more characters that are not
        only white space.

        Args:
            tokens: the added tokens of the tokenizer.
        """
        words = {token for token in tokens if len(token) > 1 and token.strip()}
        beginnings = {word[:end] for word in words for end in range(1, len(word))}
        self._words = tuple(sorted(words))
        self._beginnings = frozenset(beginnings)
        self._last_letters = frozenset(beginning[-1] for beginning in beginnings)
        self._first_letters = frozenset(word[0] for word in words)
        self._longest = max(map(len, words), default=0)

    def start_of_split(self, before: str, after: str) -> int:
        """Find a control word that begins in the text `before` and continues in the text `after`,
        and return the offset in `before` at which it begins. If no word is split, return the length
        of `before`.

        For the texts `a <` and `/think>` the word is `</think>`, and the offset is 2.
        """
        end = len(before)
        first = max(0, end - self._longest + 1)  # no split word can begin before this offset
        # Most boundaries end here: no control word has a beginning with this last letter.
        if before[-1:] not in self._last_letters or self._first_letters.isdisjoint(before[first:]):
            return end
        for start in range(first, end):
            beginning = before[start:]
            if beginning[0] in self._first_letters and beginning in self._beginnings:
                # A word is split only if it continues beyond the boundary.
                text = beginning + after[: self._longest]
                if any(
                    len(word) > len(beginning) and text.startswith(word) for word in self._words
                ):
                    return start
        return end

    def may_begin_in(self, text: str) -> bool:
        """Check whether a control word may begin in this text and continue in the next one: the
        text ends in a letter of a control word, other than the word's last one.
        """
        return text[-1:] in self._last_letters

    def are_split(self, texts: Sequence[str]) -> bool:
        """Check whether a control word is split between two consecutive texts of a row.

        Args:
            texts: the texts of the row: prompt, response, prompt, response ...
        """
        return any(self._is_split(before, after) for before, after in pairwise(texts))

    def refuse_split(self, texts: Sequence[str]) -> None:
        """Raise RecordRefused (split_token) if a control word is split between two consecutive
        texts of a row.

        Args:
            texts: the texts of the row: prompt, response, prompt, response ...
        """
        for before, after in pairwise(texts):
            if self._is_split(before, after):
                raise RecordRefused("split_token", before=before[-EXCERPT:], behind=after[:EXCERPT])

    def _is_split(self, before: str, after: str) -> bool:
        """Check whether a control word begins in the text `before` and continues in `after`.

        Most boundaries take 0.2 us: only the last letter of the text before them is looked at.
        """
        return self.may_begin_in(before) and self.start_of_split(before, after) < len(before)


@lru_cache(maxsize=16)
def open_control_words(tokens: tuple[str, ...]) -> ControlWords:
    """Return the ControlWords of a tokenizer with these added tokens. Control words are the strings
    of added tokens, such as `</think>`.
    """
    return ControlWords(tokens)


def cut_open_word(start: str, texts: Sequence[str], words: ControlWords) -> str:
    """Remove an unfinished control word from the end of `start`, such as the `<` of `<think>`.

    A word is unfinished if it continues in one of the texts, or if `start` ends in an open tag.

    Args:
        start: the common beginning of the texts.
        texts: texts that begin with `start`.
        words: the control words.
    """
    start = OPEN_TAG.sub("", start)
    splits = [words.start_of_split(start, text[len(start) :]) for text in texts]
    return start[: min(splits)]
