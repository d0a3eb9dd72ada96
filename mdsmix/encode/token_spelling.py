"""Finds the characters of each token of a text, from the bytes of the tokens.

Most tokenizers only cut a text: the bytes of its tokens, joined, are the bytes of the text. Then
the place of each token follows from their lengths. The bytes of each text are compared, so nothing
is assumed of a tokenizer. Hugging Face `tokenizers` gives the same places at 1 MB/s, and is asked
only for texts whose tokens do not spell them, such as those to which Llama 2's tokenizer adds a
space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from mdsmix.encode.scan_form import MARK
from mdsmix.encode.word_form import BYTE_NUMBERS
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.ragged import Ragged

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"A token for one byte, as SentencePiece writes it."


class TokenSpans(NamedTuple):
    """The characters of each token of one or more texts, one text after the other."""

    starts: NDArray[np.int64]
    """int64 [tokens]: the position in its text at which each token begins. The tokens of one
    character, such as the four bytes of an emoji, all have the position of that character.
    """
    ends: NDArray[np.int64]
    """int64 [tokens]: the position after the last character of each token. Equal to the start for a
    token without a character, such as a space that the tokenizer puts before a text.
    """


class TokenSpelling:
    """The bytes that each token of a tokenizer spells."""

    def __init__(self, tokenizer_json: str) -> None:
        """Read the vocabulary and the added tokens of a tokenizer.json, at this path."""
        content = Path(tokenizer_json).read_bytes()
        tree = orjson.loads(content)
        is_byte_level = b'"ByteLevel"' in content
        vocabulary = tree["model"].get("vocab", {})
        if not isinstance(vocabulary, dict):  # Unigram: a list of [token, score]
            vocabulary = {entry[0]: id for id, entry in enumerate(vocabulary)}
        spellings = {
            id: _spell_bytes(token) if is_byte_level else _spell_pieces(token)
            for token, id in vocabulary.items()
        }
        for token in tree.get("added_tokens", []):
            spellings[token["id"]] = token["content"].encode()
        self._unknown = max(spellings, default=-1) + 1
        "The first id after those of all tokens. Ids from here on spell nothing."
        self._bytes = np.full(self._unknown + 1, b"", object)
        "object [ids]: the bytes that the token of each id spells; empty if the id has no token."
        for id, spelling in spellings.items():
            self._bytes[id] = spelling
        self._lengths = np.fromiter(map(len, self._bytes), np.int64, len(self._bytes))

    def find_spans(self, texts: Sequence[str], ids: Ragged) -> TokenSpans | None:
        """Return the characters of each token of texts; None if the tokens of a text do not spell
        it.

        Args:
            texts: the texts.
            ids: the ids of each text.
        """
        known_ids = np.minimum(ids.values, self._unknown)
        lengths = self._lengths[known_ids]
        encoded = [text.encode() for text in texts]
        joined = b"".join(encoded)
        text_lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ends = np.cumsum(lengths)
        # A text ends where its last token does, and no token is empty.
        ends_of_texts = np.concatenate([[0], ends])[ids.offsets[1:]]
        is_spelled = np.array_equal(ends_of_texts, np.cumsum(text_lengths)) and (lengths > 0).all()
        # An array of objects is looked up in a quarter of the time of a dict.
        if not is_spelled or b"".join(self._bytes[known_ids].tolist()) != joined:
            return None
        # The number of the character that each byte belongs to, over all texts. Bytes of the form
        # 10xxxxxx continue a character.
        all_bytes = np.frombuffer(joined, np.uint8)
        characters = np.cumsum((all_bytes & 0xC0) != 0x80) - 1
        starts_of_texts = np.cumsum([0, *map(len, texts)])[:-1]
        shift = np.repeat(starts_of_texts, ids.lengths)
        starts = characters[ends - lengths] - shift
        return TokenSpans(starts, characters[ends - 1] + 1 - shift)


def _spell_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary: it has a character for each byte."""
    return bytes(BYTE_NUMBERS[character] for character in token if character in BYTE_NUMBERS)


def _spell_pieces(token: str) -> bytes:
    """Return the bytes of a token of any other vocabulary, as SentencePiece writes it."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(MARK, " ").encode()
