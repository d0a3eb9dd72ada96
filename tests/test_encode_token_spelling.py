"""The characters of tokens, found from their bytes, are those that the reference finds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mdsmix.encode.backends import Reference, Unequal, open_backend
from mdsmix.encode.token_spelling import TokenSpans, TokenSpelling
from mdsmix.ragged import Ragged
from mdsmix.recipe import TokenizerSpec
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from tests.styles import train_style

SCRIPTS = "ab ,.\n\t1éß字\u0301\u200d👩\U0001f468"
STYLES = ["plain", "adds_bos", "metaspace"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("spelling")
    return {
        style: open_tokenizer(TokenizerSpec(name=str(train_style(folder / style, style))))
        for style in STYLES
    }


def draw_texts() -> list[str]:
    draw = random.Random(3)
    texts = ["", " ", "<|im_start|>user\nHi<|im_end|>", "</s><s>", " a  b\n\n"]
    for _ in range(200):
        texts.append("".join(draw.choices(SCRIPTS, k=draw.randint(1, 40))))
    return texts


def to_pairs(spans: TokenSpans) -> list[tuple[int, int]]:
    return [*zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)]


@pytest.mark.parametrize("style", STYLES)
def test_spans_are_those_of_the_reference(opened: dict[str, Tokenizer], style: str) -> None:
    """Of byte-level tokenizers every text is spelled by its tokens. Metaspace adds a space before a
    text, so the reference is asked.
    """
    tokenizer = opened[style]
    reference = Reference(tokenizer)
    backend = open_backend(tokenizer)
    texts = draw_texts()
    ids = backend.encode(texts, match_special=True)
    expected = list[tuple[int, int]]()
    spelled = 0
    spelling = TokenSpelling(tokenizer.path)
    for number, text in enumerate(texts):
        by_reference = to_pairs(reference._locate_by_encoding(text, ids[number]))
        expected += by_reference
        spans = spelling.find_spans([text], ids.slice(number, number + 1))
        if spans:
            assert to_pairs(spans) == by_reference, text
            spelled += bool(by_reference)
    assert to_pairs(backend.locate(texts, ids)) == expected
    assert (spelled > 150) == (style != "metaspace")


def test_tokens_that_spell_another_text_are_noticed(opened: dict[str, Tokenizer]) -> None:
    """Also if only one byte differs, or a token belongs to the text before."""
    reference = Reference(opened["plain"])
    spelling = TokenSpelling(opened["plain"].path)
    ids = reference.encode(["abc", "abd"], match_special=True)
    assert spelling.find_spans(["abc", "abd"], ids)
    assert spelling.find_spans(["abc", "abx"], ids) is None
    moved = Ragged(ids.values, np.array([0, ids.offsets[1] - 1, len(ids.values)]))
    assert spelling.find_spans(["abc", "abd"], moved) is None
    unknown = Ragged.from_rows([[999_999, *ids[0]], ids[1]], np.uint32)
    assert spelling.find_spans(["abc", "abd"], unknown) is None
    with pytest.raises(Unequal):
        reference.locate(["abc", "abx"], ids)


def test_a_backend_names_itself_if_its_ids_are_wrong(opened: dict[str, Tokenizer]) -> None:
    backend: Any = open_backend(opened["plain"])
    assert backend.label != backend.reference.label
    with pytest.raises(Unequal) as error:
        backend.locate(["hello"], Ragged.from_rows([[5, 6]], np.uint32))
    assert error.value.label == backend.label
