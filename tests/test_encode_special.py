"""A text that holds a special token is found, and nothing else is."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mdsmix.encode.backends import Reference, encode_texts, special_search
from mdsmix.ragged import Ragged
from mdsmix.record import Conversation, is_encodable
from tests.corpus import CHATML
from tests.encoders import chats
from tests.styles import letters

LLAMA_3 = ["<|begin_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(250))]
T5 = ["</s>", "<unk>", "<pad>", *(f"<extra_id_{i}>" for i in range(100))]


def test_every_token_is_found_wherever_it_stands_and_nothing_else() -> None:
    for tokens in (LLAMA_3, T5, ["<s>", "</s>"], ["a"]):
        specials = special_search(tokens)
        assert all(specials(f"{a}{token}{b}") for token in tokens for a in ("", "x<") for b in "|>")
    specials = special_search(LLAMA_3 + T5)
    assert not any(map(specials, ["", "<|", "<|im_start|>", "<em>", "<extra_id_x>", "</span>"]))
    assert not special_search([])("<s>")
    assert not special_search([""])("<s>")
    lone = [is_encodable(text) for text in ("", "é\U0010ffff", "a\ud800")]
    assert lone == [True, True, False], "a lone surrogate has no bytes"


def test_a_chat_that_holds_a_special_token_or_a_placeholder_is_found_by_any_first_character(
    tmp_path: Path,
) -> None:
    tokenizer = letters(tmp_path, special_tokens=["[X]", "~~"])
    encoder = chats(tokenizer, CHATML, {}, special_tokens_in_text="reject")
    texts = ["a", "a[X]", "~", "b~~", "[x]", "<image>", "x<s>"]
    made = encoder.encode(
        [Conversation([{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]) for text in texts]
    )  # fmt: skip
    assert made.rejected == dict.fromkeys((1, 3), "special_token_in_text")
    assert made.placeholders == {"<image>": 1}


def _with_control_tokens_in_its_vocabulary(folder: Path, kind: str) -> Any:
    """A tokenizer whose model knows </s> as a piece of text too, as T5's does."""
    from tokenizers import Tokenizer as Model
    from tokenizers import models, pre_tokenizers

    words = ["</s>", "<unk>", "a", "<", "/", "s", ">"]
    snapshot = letters(
        folder,
        special_tokens=["</s>", "<unk>", "<x>"],
        special_ids=[0, 1, 7],
        template_variables={"unk_token": "<unk>"},
    )
    models_of = {
        "Unigram": lambda: models.Unigram([(w, 0.0 if w == "</s>" else -1.0) for w in words], 1),
        "WordLevel": lambda: models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"),
    }
    made = Model(models_of[kind]())
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(snapshot.special_tokens)
    made.save(snapshot.path)
    return snapshot


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel"])
def test_what_even_ordinary_text_makes_a_control_token_is_refused_where_it_is_to_be_text(
    tmp_path: Path, kind: str
) -> None:
    tokenizer = _with_control_tokens_in_its_vocabulary(tmp_path, kind)
    texts = ["a a", "a </s> a", "a é a", "a <x> é", "a <unk> a"]
    for rule, refused in (("escape", [1]), ("allow", []), ("reject", [1, 3])):
        rows, marked, stopped = encode_texts(Reference(tokenizer), texts, rule, tokenizer)
        assert (marked, stopped) == ([1, 3], refused)
        assert rows[2].tolist() == [2, 1, 2], "an unknown character is no special token"
        assert rows[4].tolist() == [2, 1, 2], "nor is the name of one"
        assert (7 in rows[3]) == (rule != "escape")


class Codes:
    """The ids of a text are the codes of its characters; as ordinary text an upper-case one is lower case."""

    label = "codes"

    def begin(self, stream: str) -> None: ...

    def encode(self, texts: Sequence[str], match_special: bool) -> Ragged:
        read = str if match_special else str.lower
        return Ragged.of([[ord(character) for character in read(text)] for text in texts], "u4")


@given(
    st.lists(st.text("aABbCcDZz", max_size=4), max_size=6),
    st.sets(st.sampled_from("ABCDZ"), max_size=4),
    st.sampled_from(["escape", "allow", "reject"]),
)
@example(["AB"], {"B"}, "reject")  # the largest id of the batch is the least special one
@example(["DZ"], {"D"}, "reject")
@settings(max_examples=50, deadline=None)
def test_a_record_holds_a_special_token_where_one_of_its_ids_is_special(
    tmp_path: Path, texts: list[str], special: set[str], rule: str
) -> None:
    """Wherever the special ids stand in the vocabulary, and whatever ids stand beside them in a batch."""
    tokens = sorted(special)
    tokenizer = replace(
        letters(tmp_path), special_tokens=tokens, special_ids=[ord(token) for token in tokens]
    )
    rows, marked, refused = encode_texts(Codes(), texts, rule, tokenizer)
    expected = [row for row, text in enumerate(texts) if special & set(text)]
    assert marked == expected
    assert refused == (expected if rule == "reject" else [])
    read = [t.lower() if rule == "escape" and special & set(t) else t for t in texts]
    assert [rows[row].tolist() for row in range(len(texts))] == [list(map(ord, t)) for t in read]
