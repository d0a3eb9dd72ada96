"""The control tokens of a tokenizer, as words of a text: a boundary between two texts of a row must
not lie inside one.

Prompt and response are tokenized apart. A prompt that ends in `<`, before a response that begins
with `/think>`, has no token `</think>`: the model is trained on two words that it never meets at
inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from mdsmix.record import RecordRefused

EXCERPT = 60
"Characters of each text in a bad record's detail."


class ControlWords:
    """Tells whether a control word lies across the boundary of two texts. Opened once for each list
    of tokens.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        """Keep the words among the tokens. Runs of white space, which some tokenizers list, are no
        words.
        """
        self._words = tuple(sorted({token for token in tokens if len(token) > 1 and token.strip()}))
        begins = {word[:end] for word in self._words for end in range(1, len(word))}
        self._begins = frozenset(begins)
        self._ends_of_begins = frozenset(begin[-1] for begin in begins)
        self._firsts = frozenset(word[0] for word in self._words)
        self._longest = max(map(len, self._words), default=0)

    def start_of_split(self, left: str, right: str) -> int:
        """Return the place in `left` of the first word that `right` goes on with; the length of
        `left` without one.
        """
        end = len(left)
        first = max(0, end - self._longest + 1)
        if left[-1:] not in self._ends_of_begins or self._firsts.isdisjoint(left[first:]):
            return end
        for place in range(first, end):
            begin = left[place:]
            if begin[0] in self._firsts and begin in self._begins:
                around = begin + right[: self._longest]
                if any(len(word) > len(begin) and around.startswith(word) for word in self._words):
                    return place
        return end

    def refuse_split(self, texts: Sequence[str]) -> None:
        """Raise RecordRefused (split_token) if a control word lies across a boundary of the texts
        of a row.

        A boundary costs 0.2 us where the text before it ends in no letter of a control word.
        """
        before = ""
        for text in texts:
            if before[-1:] in self._ends_of_begins and self.start_of_split(before, text) < len(
                before
            ):
                raise RecordRefused("split_token", before=before[-EXCERPT:], behind=text[:EXCERPT])
            before = text


@lru_cache(maxsize=16)
def open_control_words(tokens: tuple[str, ...]) -> ControlWords:
    """Return the control words of a tokenizer with these added tokens."""
    return ControlWords(tokens)
