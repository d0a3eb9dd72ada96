"""What becomes of conversations longer than max_seq_len, with the EOS that the loader appends to them."""

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.encode.encoded import Encoded
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.kinds.finetuning import Pairs
from mdsmix.record import FILTERED, Conversation, Pair
from tests import encoders
from tests.styles import letters

LONGEST = 10
Sizes = list[tuple[int, int]]
"Of each turn, the letters of its question and its answer."
SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return letters(tmp_path_factory.mktemp("letters"))


def encoded(tokenizer: Tokenizer, said: list[Sizes], end: str = "", **policy: Any) -> Encoded:
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{{{{ '{end}' if m.role == 'assistant' }}}}{{% endfor %}}"
    settings = {
        "max_seq_len": LONGEST,
        "target_responses": "all",
        "special_tokens_in_text": "allow",
    }
    chat = encoders.chats(tokenizer, template, {}, **settings | policy)
    return chat.encode([Conversation(messages(sizes)) for sizes in said])


def messages(sizes: Sizes) -> list[dict[str, Any]]:
    said = [(role, letter * size) for turn in sizes for role, letter, size in zip(("user", "assistant"), "qa", turn, strict=True)]  # fmt: skip
    return [{"role": role, "content": text} for role, text in said]


def whole(sizes: Sizes, added: int) -> Sizes:
    """The turns that end within a row; `added`: the EOS that the loader appends."""
    return [turn for i, turn in enumerate(sizes) if sum(map(sum, sizes[: i + 1])) + added <= LONGEST]  # fmt: skip


def losses(sizes: Sizes, responses: str, added: int) -> int:
    """Trained tokens of a row: by letters, with the EOS that the collator appends, without the first."""
    trained = [responses == "all" or i == len(sizes) - 1 for i in range(len(sizes))]
    row = "".join("-" * q + ("a" if is_trained else "-") * a for (q, a), is_trained in zip(sizes, trained, strict=True))  # fmt: skip
    return (row + "a" * added)[1:LONGEST].count("a")


def usable(sizes: Sizes, responses: str) -> bool:
    if responses == "all":
        return sizes[0][0] < LONGEST
    return sum(map(sum, sizes)) - sizes[-1][1] < LONGEST


@settings(max_examples=30, deadline=None)
@given(st.lists(SIZES, max_size=5), st.sampled_from(["cut", "filter", "first_turns"]), st.sampled_from(["last", "all"]), st.booleans())  # fmt: skip
def test_each_way_keeps_what_it_says(
    tokenizer: Tokenizer, said: list[Sizes], rule: str, responses: str, ends: bool
) -> None:
    """`ends`: the template ends each answer in EOS; else the loader appends one to a row, which `filter` and `first_turns` keep."""
    end = "</s>" if ends else ""
    found = encoded(tokenizer, said, end, too_long=rule, target_responses=responses)
    said, added = [[(q, a + ends) for q, a in sizes] for sizes in said], 1 - ends
    rows = {
        "cut": [sizes for sizes in said if usable(sizes, responses)],
        "filter": [sizes for sizes in said if whole(sizes, added) == sizes],
        "first_turns": [whole(sizes, added) for sizes in said if whole(sizes, added)],
    }[rule]
    column = found.columns["turns"]
    stored = [[(len(t["input_ids"]), len(t["labels"])) for t in json.loads(column[i].tobytes())] for i in range(len(column))]  # fmt: skip
    assert stored == rows
    assert found.totals.loss_tokens == sum(losses(sizes, responses, added) for sizes in rows)
    reasons = set(found.rejected.values())
    assert reasons <= {"no_loss_tokens" if rule == "cut" else "too_long"}
    assert reasons <= FILTERED.keys()
    lost = [sizes[len(kept) :] for sizes in said if (kept := whole(sizes, added))]
    assert found.totals.lost_tokens == (sum(sum(map(sum, sizes)) for sizes in lost) if rule == "first_turns" else 0)  # fmt: skip


def test_a_row_that_is_full_without_the_eos_of_the_loader_is_too_long(tokenizer: Tokenizer) -> None:
    for rule, (size, written) in product(("filter", "first_turns"), ((8, 1), (9, 0))):
        assert len(encoded(tokenizer, [[(1, size)]], too_long=rule).lengths) == written
    for rule, written in (("cut", 2), ("filter", 1)):
        encoder = encoders.opened(Pairs, tokenizer, max_seq_len=LONGEST, too_long=rule)
        assert len(encoder.encode([Pair("a", "b" * n) for n in (1, 99)]).lengths) == written
