"""A text that holds a special token is found, and nothing else is."""

from __future__ import annotations

import pytest

from mdsmix.encode.special import SpecialStrings, is_encodable

LLAMA_3 = ["<|begin_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(250))]
T5 = ["</s>", "<unk>", "<pad>", *(f"<extra_id_{i}>" for i in range(100))]


@pytest.mark.parametrize("tokens", [LLAMA_3, T5, ["<s>", "</s>"], ["a"]])
def test_every_token_is_found_wherever_it_stands(tokens: list[str]) -> None:
    specials = SpecialStrings.of(tokens)
    assert all(
        specials.within(f"{a}{token}{b}") for token in tokens for a in ("", "x<") for b in "|>"
    )


def test_what_only_begins_like_a_token_is_text() -> None:
    specials = SpecialStrings.of(LLAMA_3 + T5)
    assert not any(
        map(specials.within, ["", "<|", "<|im_start|>", "<em>", "<extra_id_x>", "</span>"])
    )


def test_one_search_covers_tokens_that_begin_alike() -> None:
    assert [start for start, _ in SpecialStrings.of(LLAMA_3).groups] == ["<|"]


def test_a_tokenizer_without_special_tokens_marks_nothing() -> None:
    assert not SpecialStrings.of([]).within("<s>")
    assert not SpecialStrings.of([""]).within("<s>")


@pytest.mark.parametrize(("text", "ok"), [("", True), ("é\U0010ffff", True), ("a\ud800", False)])
def test_a_lone_surrogate_has_no_bytes(text: str, ok: bool) -> None:
    assert is_encodable(text) is ok
