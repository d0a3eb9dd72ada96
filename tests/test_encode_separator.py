"""Texts that are joined by a special token get the ids that each has alone.

The oracle is Hugging Face `tokenizers`, which encodes each text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mdsmix.encode.backends import Fastokens, Reference, make_hard_strings
from mdsmix.encode.separator import (
    GROUP_CHARACTERS,
    LONG_CHARACTERS,
    MOST_SEPARATORS,
    Separator,
    TextJoiner,
    find_separators,
)
from mdsmix.ragged import Ragged
from mdsmix.recipe import TokenizerSpec
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from tests.styles import to_lists

PIECES = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|", "<|im_end|>", "<|", "<", "|>", ">", "_end|>"),
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "\x00", "\u3000", "\u200b", "e\u0301", "字", "👩‍👩‍👧"),
    *("a", "the", " the", "don't", "'s", "12", "...", " )", "Grüße", "x = 1\n    y"),
]
TEXTS = st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), max_size=8)


class CountingModel:
    """A model of fastokens that counts the texts of each call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls = list[int]()

    def encode_batch_flat(self, texts: Sequence[str], **settings: bool) -> Any:
        self.calls.append(len(texts))
        return self.model.encode_batch_flat(texts, **settings)


class CountingBackend(Fastokens):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._separators = find_separators(self._model)
        self._model = CountingModel(self._model)

    def restart(self) -> CountingBackend:
        """Forget which separators texts contained, and the calls."""
        self._joiner = TextJoiner(self._separators)
        self.calls.clear()
        return self

    @property
    def calls(self) -> list[int]:
        return self._model.calls


class AddedTokens:
    """A model that only has added tokens."""

    SETTINGS: ClassVar[dict[str, bool]] = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }

    def __init__(self, *tokens: dict[str, Any]) -> None:
        self.tokens = [{**self.SETTINGS, "id": id, **token} for id, token in enumerate(tokens)]

    def added_tokens(self) -> list[dict[str, Any]]:
        return self.tokens


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return open_tokenizer(TokenizerSpec(name=str(tokenizer_folder)))


@pytest.fixture(scope="module")
def reference(tokenizer: Tokenizer) -> Reference:
    return Reference(tokenizer)


@pytest.fixture(scope="module")
def opened(tokenizer: Tokenizer) -> CountingBackend:
    return CountingBackend(tokenizer)


@pytest.fixture
def backend(opened: CountingBackend) -> CountingBackend:
    return opened.restart()


@given(TEXTS)
@example(["", "", ""])
@example(["a <|im_end", "|> b", "<|im_end|>", " c "])
def test_texts_have_the_ids_that_each_has_alone(
    opened: CountingBackend, reference: Reference, texts: list[str]
) -> None:
    alone = reference.encode(texts, match_special=True)
    rows = opened.restart().encode(texts, match_special=True)
    assert rows.values.dtype == np.uint32
    assert to_lists(rows) == to_lists(alone)


def test_short_texts_are_joined_by_a_token_that_they_do_not_contain(
    backend: CountingBackend, tokenizer: Tokenizer
) -> None:
    """A fixed set with all that texts begin and end with, so that no case is left to chance."""
    special = tokenizer.special_tokens
    texts = [text[:99] for text in make_hard_strings(tokenizer)]
    texts += [f"{piece} text {piece}" for piece in PIECES]
    texts = [text for text in texts if not any(token in text for token in special)]
    true = to_lists(Reference(tokenizer).encode(texts, match_special=True))
    assert len({row[0] for row in true if row}) > 20
    assert len(special) == MOST_SEPARATORS
    for token in reversed(special):
        # All are encoded again, and the texts after them get the separator before.
        for added, calls in (("a", [1]), (f"a{token}", [1, len(texts) + 1])):
            backend.calls.clear()
            rows = backend.encode([*texts, added], match_special=True)
            assert backend.calls == calls
            assert to_lists(rows)[: len(true)] == true
    backend.calls.clear()
    backend.encode(texts, match_special=True)
    assert backend.calls == [len(texts)]


def test_ordinary_texts_are_not_joined(backend: CountingBackend) -> None:
    """If special tokens are not matched, a separator is text like any other."""
    backend.encode(["a", "b"], match_special=False)
    assert backend.calls == [2]


def test_groups_of_texts_have_a_bounded_length(backend: CountingBackend) -> None:
    """A rare character makes all characters of a group wide, so the groups are small."""
    texts = [f"text {number}, " * 5 for number in range(2_000)]
    rows = backend.encode(texts, match_special=True)
    assert len(rows) == len(texts)
    groups = sum(map(len, texts)) / GROUP_CHARACTERS
    assert len(backend.calls) == 1
    assert groups - 1 <= backend.calls[0] <= groups + 1


@pytest.mark.parametrize("texts", [["a"], ["a" * 3 * LONG_CHARACTERS, "b"]])
def test_long_texts_and_single_ones_are_not_joined(
    backend: CountingBackend, texts: list[str]
) -> None:
    backend.encode(texts, match_special=True)
    assert backend.calls == [len(texts)]


def test_ids_that_do_not_fit_the_texts_are_not_used() -> None:
    """As those of a backend that does not match the separator once."""
    separator = Separator("<s>", 7)
    for ids, rows in (
        ([1, 7, 2, 7], [[1], [2]]),
        ([7, 7], [[], []]),
        ([1, 7, 2], None),
        ([1, 7, 2, 7, 7], None),
        ([], None),
    ):
        answer = Ragged.from_rows([ids], np.uint32)
        found = TextJoiner([separator]).encode(["a", "b"], lambda _, answer=answer: answer)
        assert (found and to_lists(found)) == rows


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([{"content": "<s>"}, {"content": "</s>"}], "</s>"),
        ([{"content": "<s>"}, {"content": "</s>", "special": False}], "<s>"),
        ([{"content": "<s>"}, {"content": "</s>", "lstrip": True}], "<s>"),
        ([{"content": "<s>"}, {"content": "</s>", "rstrip": True}], "<s>"),
        ([{"content": "<s>"}, {"content": "</s>", "normalized": True}], "<s>"),
        ([{"content": "<s>"}, {"content": "</s>", "single_word": True}], None),
        # `x<` and a separator after it would be matched as `x<`, and as text.
        ([{"content": "<s>"}, {"content": "x<", "special": False}], None),
        ([{"content": "[s]"}, {"content": "x<", "special": False}], "[s]"),
        # A text that begins with `x` would make it another token.
        ([{"content": "<s>"}, {"content": "<s>x"}, {"content": "[s]"}], "[s]"),
        ([{"content": "<s>"}, {"content": "<s>x"}], None),
        # After a text `a` it would be matched in `aaba` one character too early.
        ([{"content": "aba"}], None),
        ([{"content": "<s>"}, {"content": "<｜字｜>"}], "<s>"),
        ([], None),
    ],
)
def test_a_separator_divides_any_two_texts(tokens: list[dict[str, Any]], found: str | None) -> None:
    separators = find_separators(AddedTokens(*tokens))
    assert [tokens[separator.id]["content"] for separator in separators] == [
        separator.text for separator in separators
    ]
    assert (separators[-1].text if separators else None) == found


def test_the_last_separators_are_tried() -> None:
    """Most vocabularies end in reserved tokens."""
    names = [f"<r{number}>" for number in range(MOST_SEPARATORS + 2)]
    separators = find_separators(AddedTokens(*({"content": name} for name in names)))
    assert [separator.text for separator in separators] == names[2:]
