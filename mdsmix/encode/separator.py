"""Joins short texts by a special token, so that fastokens encodes many of them as one text.

A special token divides a text before a tokenizer does anything else with it: what is before and
after the token gets the ids that it has as a text of its own. So the ids of joined texts are those
of each text, and the separator's id after each text. fastokens takes 0.4 us less for a part of a
text than for a text of its own. That is a fifth of its time for documents of 60 characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mdsmix.lazy_numpy import np
from mdsmix.ragged import Ragged

GROUP_CHARACTERS = 1 << 14
"""About how many characters are joined. Longer strings are not encoded faster, and one rare
character makes all characters of its string take two or four bytes.
"""
LONG_CHARACTERS = 1 << 10
"Texts that have more characters on average are not joined, since they would gain less than 2 %."
MOST_SEPARATORS = 4
"How many special tokens are tried one after the other, if texts contain them."


class Separator(NamedTuple):
    """A special token that is put after each text."""

    text: str
    id: int


class TextJoiner:
    """Encodes texts that are joined by a separator."""

    def __init__(self, separators: Sequence[Separator]) -> None:
        """Keep the separators. The last one is used until a text contains it, then the one before.

        Args:
            separators: as `find_separators` returns them.
        """
        self._separators = [*separators]

    def encode(
        self, texts: Sequence[str], encode_each: Callable[[Sequence[str]], Ragged]
    ) -> Ragged | None:
        """Return the ids of the texts, one row each. Return None if they must be encoded one by
        one: they are too long, or a text contains the separator.

        Args:
            texts: the texts.
            encode_each: returns the ids of each text of a list, with special tokens matched.
        """
        characters = sum(map(len, texts))
        if not self._separators or len(texts) < 2 or characters > LONG_CHARACTERS * len(texts):
            return None
        # Join groups of texts.
        separator = self._separators[-1]
        count = 1 + GROUP_CHARACTERS * len(texts) // (characters + 1)
        groups = [texts[start : start + count] for start in range(0, len(texts), count)]
        ids = encode_each([separator.text.join([*group, ""]) for group in groups]).values
        # Each text ends at a separator, which is left out of its row.
        is_separator = ids == separator.id
        ends = np.flatnonzero(is_separator)
        if len(ends) != len(texts):
            # The next texts probably contain it too, such as the turns that a template has printed.
            self._separators.pop()
            return None
        return Ragged.from_lengths(ids[~is_separator], np.diff(ends, prepend=-1) - 1)


def find_separators(model: Any) -> list[Separator]:
    """Return up to MOST_SEPARATORS special tokens that are matched after each text, whatever the
    text is, and take no character of it. The last tokens are taken: they are often reserved, and
    in few texts.

    Args:
        model: a model that fastokens has opened.
    """
    tokens = model.added_tokens()
    # Such a token looks at the characters around it, which a separator would change.
    if any(token["single_word"] for token in tokens):
        return []
    contents = [token["content"] for token in tokens]
    inner_characters = {*"".join(content[1:] for content in contents)}
    separators = list[Separator]()
    for token in reversed(tokens):
        content = token["content"]
        if not token["special"] or token["normalized"] or token["lstrip"] or token["rstrip"]:
            continue
        # Another token would be matched in its place if it began earlier and ended inside it, or
        # if it began at the same character and were longer.
        if not content.isascii() or content[0] in inner_characters:
            continue
        nested = [text for text in contents if text.startswith(content) or content.startswith(text)]
        if nested == [content]:
            separators.insert(0, Separator(content, token["id"]))
            if len(separators) == MOST_SEPARATORS:
                break
    return separators
