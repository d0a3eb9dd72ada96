"""What becomes of conversations longer than max_seq_len, and what each value of too_long is said to keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.encode.backends import open_backend
from mdsmix.encode.base import Encoded
from mdsmix.encode.chat import open_template
from mdsmix.encode.conversations import Chat
from mdsmix.encode.special import SpecialStrings
from mdsmix.encode.targets import Targets
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.record import Conversation
from tests.converting import chats, manifest_of, mdsmix, pairs, write_jsonl, write_recipe
from tests.styles import letters

LONGEST = 10
Sizes = list[tuple[int, int]]
"Of each turn, the letters of its question and its answer."
SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return letters(tmp_path_factory.mktemp("letters"))


def encoded(tokenizer: Tokenizer, said: list[Sizes], **policy: Any) -> Encoded:
    chat = Chat(
        tokenizer=tokenizer,
        backend=open_backend(tokenizer, "reference"),
        template=open_template("{% for m in messages %}{{ m.content }}{% endfor %}", {}),
        targets=Targets(**{"max_seq_len": LONGEST, "target_responses": "all"} | policy),
        is_compact=False,
        special_tokens_in_text="allow",
        specials=SpecialStrings.of(()),
    )
    return chat.encode([Conversation(messages(sizes)) for sizes in said])


def messages(sizes: Sizes) -> list[dict[str, Any]]:
    said = [(role, letter * size) for turn in sizes for role, letter, size in zip(("user", "assistant"), "qa", turn, strict=True)]  # fmt: skip
    return [{"role": role, "content": text} for role, text in said]


def whole(sizes: Sizes) -> Sizes:
    """The turns that end within a row."""
    return [turn for i, turn in enumerate(sizes) if sum(map(sum, sizes[: i + 1])) <= LONGEST]


def losses(sizes: Sizes, responses: str) -> int:
    """Trained tokens of a row: by letters, with the EOS that the collator appends, without the first."""
    trained = [responses == "all" or i == len(sizes) - 1 for i in range(len(sizes))]
    row = "".join("-" * q + ("a" if is_trained else "-") * a for (q, a), is_trained in zip(sizes, trained, strict=True))  # fmt: skip
    return (row + "a")[1:LONGEST].count("a")


def usable(sizes: Sizes, responses: str) -> bool:
    if responses == "all":
        return sizes[0][0] < LONGEST
    return sum(map(sum, sizes)) - sizes[-1][1] < LONGEST


@settings(max_examples=40, deadline=None)
@given(st.lists(SIZES, max_size=5), st.sampled_from(["cut", "filter", "first_turns"]), st.sampled_from(["last", "all"]))  # fmt: skip
def test_each_way_keeps_what_it_says(
    tokenizer: Tokenizer, said: list[Sizes], rule: str, responses: str
) -> None:
    found = encoded(tokenizer, said, too_long=rule, target_responses=responses)
    fits = [sum(map(sum, sizes)) <= LONGEST for sizes in said]
    long = [sizes for sizes, is_whole in zip(said, fits, strict=True) if not is_whole]
    rows = {
        "cut": [sizes for sizes in said if usable(sizes, responses)],
        "filter": [sizes for sizes, is_whole in zip(said, fits, strict=True) if is_whole],
        "first_turns": [whole(sizes) for sizes in said if whole(sizes)],
    }[rule]
    column = found.columns["turns"]
    stored = [[(len(t["input_ids"]), len(t["labels"])) for t in json.loads(column[i].tobytes())] for i in range(len(column))]  # fmt: skip
    assert stored == rows
    assert found.loss_tokens == sum(losses(sizes, responses) for sizes in rows)
    reasons = {r.reason for r in found.rejected}
    assert reasons <= {"no_loss_tokens" if rule == "cut" else "too_long"}
    assert all(r.filtered for r in found.rejected)
    lost = [sizes[len(whole(sizes)) :] for sizes in said if whole(sizes)]
    assert found.lost_tokens == (sum(sum(map(sum, sizes)) for sizes in lost) if rule == "first_turns" else 0)  # fmt: skip
    if not long:
        assert found.too_long == {}
        return
    cut = [sizes for sizes in long if usable(sizes, responses)]
    first = [whole(sizes) for sizes in long if whole(sizes)]
    assert found.too_long == {
        "conversations": len(long),
        "cut": len(cut),
        "cut_tokens": sum(losses(sizes, responses) for sizes in cut),
        "first_turns": len(first),
        "first_turns_tokens": sum(losses(sizes, responses) for sizes in first),
    }


def test_the_summary_says_what_each_way_keeps(tmp_path: Path, tokenizer_folder: Path) -> None:
    said = [messages([(1, 1)] * n) for n in (1, 1, 9)]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": m} for m in said])
    kept = {}
    for rule in ("cut", "filter", "first_turns"):
        streams = {"chat": chats(path, too_long=rule)}
        recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64, target_responses="all")  # fmt: skip
        out = mdsmix("convert", recipe, "--reencode").out
        manifest = manifest_of(tmp_path / "out/chat/train")
        kept[rule] = manifest.records.written, manifest.totals.loss_tokens
        assert "1 conversation longer than max_seq_len: too_long: cut keeps 1 with " in out
        assert manifest.totals.cut_rows == (rule == "cut")
    told = manifest.records.too_long
    assert [n for n, _ in kept.values()] == [3, 2, 3]
    assert kept["cut"][1] - kept["filter"][1] == told["cut_tokens"]
    assert kept["first_turns"][1] - kept["filter"][1] == told["first_turns_tokens"]


def test_a_pair_that_is_too_long_is_left_out_where_that_is_asked_for(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    path = write_jsonl(tmp_path / "faq.jsonl", [{"prompt": "a", "response": "b " * n} for n in (1, 99)])  # fmt: skip
    for rule, written in (("cut", 2), ("filter", 1)):
        recipe = write_recipe(tmp_path, tokenizer_folder, streams={"faq": pairs(path, too_long=rule)})  # fmt: skip
        assert mdsmix("convert", recipe, "--reencode").code == 0
        assert manifest_of(tmp_path / "out/faq/train").records.written == written


def test_an_encoder_decoder_has_no_row_to_be_too_long(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    path = write_jsonl(tmp_path / "faq.jsonl", [{"prompt": "a", "response": "b"}])
    recipe = write_recipe(tmp_path, tokenizer_folder, decoder_only_format=False, streams={"faq": pairs(path, too_long="filter")})  # fmt: skip
    answer = mdsmix("convert", recipe)
    assert answer.code == 2
    assert "too_long: filter stands beside decoder_only_format: false" in answer.err
