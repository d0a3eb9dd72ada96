"""Records become Foundry's samples, or one reason code each; worked by hand on one token per character."""

from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import pytest

from mdsmix.encode.encoded import Encoded
from mdsmix.kinds.finetuning import Pairs
from mdsmix.kinds.read_records import Reading
from mdsmix.record import FILTERED
from mdsmix.shapes import SHAPES
from tests.encoders import chats, opened
from tests.styles import BOS, END, EOS, LLAMA_3, START, letters

SPECIAL = "special_token_in_text"


@pytest.fixture
def faq(tmp_path: Path) -> Any:
    def make(snapshot: Any = {}, **settings: Any) -> Reading:  # noqa: B006
        encoder = opened(Pairs, letters(tmp_path, **snapshot), **settings)
        return Reading(SHAPES["prompt_response"], {"prompt": "q", "response": "a"}, encoder)

    return make


@pytest.fixture
def chat(tmp_path: Path) -> Any:
    def make(template: str | None = None, **settings: Any) -> Reading:
        encoder = chats(letters(tmp_path), template, {"bos_token": "<s>"}, **settings)
        return Reading(SHAPES["messages"], {"messages": "m"}, encoder)

    return make


def rows(encoded: Encoded) -> list[tuple[list[int], list[int]]]:
    ids, labels = encoded.columns["input_ids"], encoded.columns["labels"]
    return [(ids[i].tolist(), labels[i].tolist()) for i in range(len(ids))]


def turns(encoded: Encoded) -> list[list[tuple[list[int], list[int]]]]:
    blobs = encoded.columns["turns"]
    decoded = [orjson.loads(blobs[i].tobytes()) for i in range(len(blobs))]
    return [[(turn["input_ids"], turn["labels"]) for turn in row] for row in decoded]


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def pair(prompt: Any, response: Any) -> dict[str, Any]:
    return {"q": prompt, "a": response}


def dialogue(*contents: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(contents)
    return {"m": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


def test_what_the_tokenizer_adds_is_kept_but_for_the_second_bos(faq: Any) -> None:
    """EOS stays behind both, and so does a first token that is no BOS, or BOS where the tokenizer names none."""
    hi, yes = ids("hi"), ids("yes")
    for snapshot, expected in (
        ({"prefix_ids": [BOS]}, ([BOS, *hi], yes)),
        ({"suffix_ids": [EOS]}, ([*hi, EOS], [*yes, EOS])),
        ({"prefix_ids": [BOS], "suffix_ids": [EOS]}, ([BOS, *hi, EOS], [*yes, EOS])),
        ({"prefix_ids": [START, BOS]}, ([START, BOS, *hi], [START, BOS, *yes])),
        ({"prefix_ids": [BOS], "bos_id": None}, ([BOS, *hi], [BOS, *yes])),
        ({"prefix_ids": [BOS, BOS]}, ([BOS, BOS, *hi], [BOS, *yes])),
    ):
        assert rows(faq(snapshot).encode([pair("hi", "yes")])) == [expected], snapshot
    texts = [("<s>hi", "<s>yes"), ("<s>hi", "yes"), ("hi", "<s>yes"), ("<s>", "<s>")]
    found = faq(special_tokens_in_text="allow").encode([pair(*each) for each in texts])
    assert rows(found) == [([BOS, *hi], yes), ([BOS, *hi], yes), (hi, [BOS, *yes])]
    assert dict(found.rejected) == {3: "empty_response"}
    # After tokenization: the prompt is BOS, the response was BOS and is nothing.
    found = faq({"prefix_ids": [BOS]}).encode([pair("", "yes"), pair("hi", "")])
    assert (rows(found), dict(found.rejected)) == ([([BOS], yes)], {1: "empty_response"})
    assert rows(faq({"suffix_ids": [EOS]}).encode([pair("", "")])) == [([EOS], [EOS])]


def test_every_bad_record_has_its_reason_and_the_good_ones_stay(faq: Any, chat: Any) -> None:
    bad: list[tuple[Any, str]] = [
        ("text", "not_an_object"),
        ({"q": "a"}, "missing_field"),
        (pair(None, "b"), "field_not_text"),
        (pair("a", 3), "field_not_text"),
        (pair("a\ud800", "b"), "lone_surrogate"),
        (pair("", "b"), "empty_prompt"),
        (pair("a", ""), "empty_response"),
        (pair("a" * 100, "b"), "no_loss_tokens"),
        (None, "not_an_object"),
    ]
    records = [pair("a", "b"), *(record for record, _ in bad), pair("c", "d")]
    found = faq().encode(records)
    assert rows(found) == [(ids("a"), ids("b")), (ids("c"), ids("d"))]
    assert [found.rejected[at] for at in range(1, len(bad) + 1)] == [why for _, why in bad]
    filtered = {"empty_prompt", "empty_response", "no_loss_tokens"}
    assert {*found.rejected.values()} & FILTERED.keys() == filtered

    joined = "messages | map(attribute='content') | join"
    fails, counts = "raise_exception('no')", "messages | length"
    at_x = [f"{{{{ {x} if messages[0].content == 'x' else {joined} }}}}" for x in (fails, counts)]
    for template, record, why in (
        (None, dialogue("a"), "too_few_messages"),
        (None, dialogue("a" * 100, "b"), "no_loss_tokens"),
        (at_x[0], dialogue("x", "b"), "template_error"),
        (at_x[1], dialogue("x", "b"), "not_prefix_stable"),
    ):
        encoder = chat(template, target_prompts="all" if template else "none")
        found = encoder.encode([dialogue("a", "b"), record, dialogue("c", "d")])
        assert (dict(found.rejected), found.positions.tolist()) == ({1: why}, [0, 2])


def test_special_tokens_in_a_text_are_text_a_token_or_a_reason(faq: Any, chat: Any) -> None:
    records = [pair("a", "b"), pair("<|im_start|>x", "y"), pair("a", "b</s>")]
    for rule, expected in (
        ("escape", [(ids("<|im_start|>x"), ids("y")), (ids("a"), ids("b</s>"))]),
        ("allow", [([START, *ids("x")], ids("y")), (ids("a"), [*ids("b"), EOS])]),
        ("reject", []),
    ):
        found = faq(special_tokens_in_text=rule).encode(records)
        assert rows(found) == [(ids("a"), ids("b")), *expected]
        assert dict(found.rejected) == ({} if expected else {1: SPECIAL, 2: SPECIAL})
        assert found.totals.specials == 2
    talks = [dialogue("a", "b"), dialogue("a", "b<|im_end|>"), dialogue("<s>", "b")]
    for rule in ("escape", "reject"):
        found = chat(special_tokens_in_text=rule).encode(talks)
        assert dict(found.rejected) == {1: SPECIAL, 2: SPECIAL}
        assert (len(found.lengths), found.totals.specials) == (1, 2)
    allowed = chat(special_tokens_in_text="allow").encode(talks)
    assert turns(allowed)[1][0][1] == [98, END, END, 10]
    assert (len(allowed.lengths), allowed.totals.specials) == (3, 2)


def test_a_prompt_beyond_max_seq_len_counts_as_the_loader_cuts_it(faq: Any) -> None:
    """To 4 tokens before `length>=6` looks at it, so nothing would be trained; an encoder takes one of any length."""
    found = faq(max_seq_len=4, target_prompts="length>=6").encode([pair("abcdefg", "x")])
    assert dict(found.rejected) == {0: "no_loss_tokens"}
    within = faq(max_seq_len=4, target_prompts="length>=4").encode([pair("abcdefg", "xy")])
    assert rows(within) == [(ids("abcd"), ids("x"))]
    apart = faq(max_seq_len=4, decoder_only_format=False)
    found = apart.encode([pair("abcdefg", "vwxyz"), pair("", "x")])
    assert rows(found) == [([*ids("abc"), EOS], ids("vwxy"))]
    assert dict(found.rejected) == {1: "empty_prompt"}


def test_a_conversation_is_a_row_of_turns_stored_whole(chat: Any) -> None:
    found = chat().encode([dialogue("a", "b", "c", "d")])
    asked = [START, *ids("user\na"), END, *ids("\n"), START, *ids("assistant\n")]
    again = [START, *ids("user\nc"), END, *ids("\n"), START, *ids("assistant\n")]
    assert turns(found) == [[(asked, [98, END, 10]), (again, [100, END, 10])]]
    prompt = 9 + 11
    assert (found.totals.tokens, found.lengths.tolist()) == (2 * (prompt + 3), [2 * (prompt + 3)])
    # The last answer and the EOS that the collator adds to it.
    assert (found.totals.loss_tokens, found.totals.largest_id) == (3 + 1, ord("u"))
    # A template brings its own special tokens, and the tokenizer adds none.
    (row,) = turns(chat(LLAMA_3).encode([dialogue("a", "b")]))
    assert (row[0][0][:2], row[0][0].count(BOS)) == ([BOS, START], 1)


def test_compact_holds_all_before_the_last_answer_and_that_answer(chat: Any) -> None:
    records = [dialogue("a", "b", "c", "d"), dialogue(), dialogue("e", "f")]
    wide, compact = chat().encode(records), chat(columns="pair").encode(records)
    flat = [(list(chain(*chain(*row[:-1]), row[-1][0])), row[-1][1]) for row in turns(wide)]
    assert rows(compact) == flat
    assert compact.columns["labels"].values.dtype == "uint16"
    assert (compact.totals, compact.rejected) == (wide.totals, wide.rejected)


def test_a_batch_is_what_its_records_are_alone_and_may_be_empty(faq: Any, chat: Any) -> None:
    pairs = [pair("a" * (i % 7), "b" * (i % 5)) for i in range(40)]
    encoder = faq({"prefix_ids": [BOS]}, max_seq_len=8)
    assert rows(encoder.encode(pairs)) == [row for p in pairs for row in rows(encoder.encode([p]))]
    records = [dialogue(*("x" * (i % 4 + j) for j in range(2 + 2 * (i % 3)))) for i in range(40)]
    talker = chat(max_seq_len=50)
    whole, alone = talker.encode(records), [talker.encode([record]) for record in records]
    assert turns(whole) == [row for found in alone for row in turns(found)]
    assert whole.totals.loss_tokens == sum(found.totals.loss_tokens for found in alone)
    assert 0 < len(whole.lengths) < 40
    for some in ([], [None], [{"m": []}, 3]):
        for found in (each.encode(some) for each in (faq(), chat(), chat(columns="pair"))):
            assert all(len(column) == 0 for column in found.columns.values())
            totals = found.totals
            assert (totals.tokens, totals.loss_tokens, totals.largest_id) == (0, 0, -1)
            assert len(found.rejected) == len(some)
