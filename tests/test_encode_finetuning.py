"""Records become Foundry's samples, or one reason code each; worked by hand on one token per character."""

from __future__ import annotations

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

Outcome = tuple[int, str, bool]


@pytest.fixture
def faq(tmp_path: Path) -> Any:
    def make(special: str = "escape", policy: Any = {}, **snapshot: Any) -> Reading:  # noqa: B006
        settings = {"special_tokens_in_text": special, **policy}
        encoder = opened(Pairs, letters(tmp_path, **snapshot), **settings)
        return Reading(SHAPES["prompt_response"], {"prompt": "q", "response": "a"}, encoder)

    return make


@pytest.fixture
def chat(tmp_path: Path) -> Any:
    def make(
        special: str = "escape",
        policy: Any = {},  # noqa: B006
        template: str | None = None,
        columns: Any = "turns",
    ) -> Reading:
        settings = {"special_tokens_in_text": special, "columns": columns, **policy}
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


def outcomes(encoded: Encoded) -> list[Outcome]:
    return sorted((at, why, why in FILTERED) for at, why in encoded.rejected.items())


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def pair(prompt: Any, response: Any) -> dict[str, Any]:
    return {"q": prompt, "a": response}


def dialogue(*contents: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(contents)
    return {"m": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


def test_a_prompt_and_a_response_are_two_columns(faq: Any) -> None:
    found = faq().encode([pair("hi", "yes"), {"q": "a", "a": "b", "more": 1}])
    assert rows(found) == [(ids("hi"), ids("yes")), (ids("a"), ids("b"))]
    assert found.columns["labels"].values.dtype == "uint16"
    assert (found.totals.tokens, found.totals.loss_tokens, found.totals.specials) == (7, 4 + 2, 0)
    assert (found.lengths.tolist(), found.totals.largest_id) == ([5, 2], ord("y"))


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        # BOS stands before both, so it leaves the response; EOS stays behind both.
        ({"prefix_ids": [BOS]}, ([BOS, *ids("hi")], ids("yes"))),
        ({"suffix_ids": [EOS]}, ([*ids("hi"), EOS], [*ids("yes"), EOS])),
        ({"prefix_ids": [BOS], "suffix_ids": [EOS]}, ([BOS, *ids("hi"), EOS], [*ids("yes"), EOS])),
        # A first token that is no BOS stays, as does BOS where the tokenizer names none.
        ({"prefix_ids": [START, BOS]}, ([START, BOS, *ids("hi")], [START, BOS, *ids("yes")])),
        ({"prefix_ids": [BOS], "bos_id": None}, ([BOS, *ids("hi")], [BOS, *ids("yes")])),
        ({"prefix_ids": [BOS, BOS]}, ([BOS, BOS, *ids("hi")], [BOS, *ids("yes")])),
    ],
)
def test_what_the_tokenizer_adds_is_kept_but_for_the_second_bos(
    faq: Any, snapshot: dict[str, Any], expected: tuple[list[int], list[int]]
) -> None:
    assert rows(faq(**snapshot).encode([pair("hi", "yes")])) == [expected]


def test_a_bos_in_both_texts_leaves_the_response_too(faq: Any) -> None:
    records = [
        pair("<s>hi", "<s>yes"),
        pair("<s>hi", "yes"),
        pair("hi", "<s>yes"),
        pair("<s>", "<s>"),
    ]
    found = faq("allow").encode(records)
    assert rows(found) == [
        ([BOS, *ids("hi")], ids("yes")),
        ([BOS, *ids("hi")], ids("yes")),
        (ids("hi"), [BOS, *ids("yes")]),
    ]
    assert outcomes(found) == [(3, "empty_response", True)]


def test_an_added_bos_makes_an_empty_prompt_but_no_empty_response(faq: Any) -> None:
    """After tokenization: the prompt is BOS, the response was BOS and is nothing."""
    found = faq(prefix_ids=[BOS]).encode([pair("", "yes"), pair("hi", "")])
    assert rows(found) == [([BOS], ids("yes"))]
    assert outcomes(found) == [(1, "empty_response", True)]
    kept = faq(suffix_ids=[EOS]).encode([pair("", "")])
    assert rows(kept) == [([EOS], [EOS])]


def test_every_bad_record_has_its_reason_and_the_good_ones_stay(faq: Any) -> None:
    records = [
        "text",
        pair("a", "b"),
        {"q": "a"},
        pair(None, "b"),
        pair("a", 3),
        pair("a\ud800", "b"),
        pair("", "b"),
        pair("a", ""),
        pair("a" * 100, "b"),
        pair("c", "d"),
        None,
    ]
    found = faq().encode(records)
    assert rows(found) == [(ids("a"), ids("b")), (ids("c"), ids("d"))]
    assert outcomes(found) == [
        (0, "not_an_object", False),
        (2, "missing_field", False),
        (3, "field_not_text", False),
        (4, "field_not_text", False),
        (5, "lone_surrogate", False),
        (6, "empty_prompt", True),
        (7, "empty_response", True),
        (8, "no_loss_tokens", True),
        (10, "not_an_object", False),
    ]


def test_special_tokens_in_a_text_are_text_a_token_or_a_reason(faq: Any) -> None:
    records = [pair("a", "b"), pair("<|im_start|>x", "y"), pair("a", "b</s>"), pair("c", "d")]
    escaped = faq("escape").encode(records)
    assert rows(escaped)[1:3] == [(ids("<|im_start|>x"), ids("y")), (ids("a"), ids("b</s>"))]
    allowed = faq("allow").encode(records)
    assert rows(allowed)[1:3] == [([START, *ids("x")], ids("y")), (ids("a"), [*ids("b"), EOS])]
    rejected = faq("reject").encode(records)
    assert rows(rejected) == [(ids("a"), ids("b")), (ids("c"), ids("d"))]
    reason = "special_token_in_text"
    assert outcomes(rejected) == [(1, reason, False), (2, reason, False)]
    assert {found.totals.specials for found in (escaped, allowed, rejected)} == {2}


def test_a_prompt_beyond_max_seq_len_counts_as_the_loader_cuts_it(faq: Any) -> None:
    """Its column is cut to 4 tokens before `length>=6` looks at it, so nothing would be trained."""
    policy = {"max_seq_len": 4, "target_prompts": "length>=6"}
    assert outcomes(faq(policy=policy).encode([pair("abcdefg", "x")])) == [
        (0, "no_loss_tokens", True)
    ]
    within = faq(policy={**policy, "target_prompts": "length>=4"}).encode([pair("abcdefg", "xy")])
    assert rows(within) == [(ids("abcd"), ids("x"))]


def test_an_encoder_decoder_takes_a_prompt_of_any_length(faq: Any) -> None:
    policy = {"max_seq_len": 4, "decoder_only_format": False}
    found = faq(policy=policy).encode([pair("abcdefg", "vwxyz"), pair("", "x")])
    assert rows(found) == [([*ids("abc"), EOS], ids("vwxy"))]
    assert outcomes(found) == [(1, "empty_prompt", True)]


def test_a_conversation_is_a_row_of_turns(chat: Any) -> None:
    found = chat().encode([dialogue("a", "b", "c", "d")])
    assert turns(found) == [
        [
            ([START, *ids("user\na"), END, *ids("\n"), START, *ids("assistant\n")], [98, END, 10]),
            ([START, *ids("user\nc"), END, *ids("\n"), START, *ids("assistant\n")], [100, END, 10]),
        ]
    ]
    prompt = 9 + 11
    assert (found.totals.tokens, found.lengths.tolist()) == (2 * (prompt + 3), [2 * (prompt + 3)])
    # The last answer and the EOS that the collator adds to it.
    assert (found.totals.loss_tokens, found.totals.largest_id) == (3 + 1, ord("u"))


def test_the_policies_count_over_turns(chat: Any) -> None:
    record = dialogue("a", "b", "c", "d")
    assert chat(policy={"target_responses": "all"}).encode([record]).totals.loss_tokens == 7
    assert chat(policy={"target_prompts": "all"}).encode([record]).totals.loss_tokens == 19 + 20 + 4
    assert chat(policy={"max_seq_len": 44}).encode([record]).totals.loss_tokens == 1
    assert outcomes(chat(policy={"max_seq_len": 43}).encode([record])) == [
        (0, "no_loss_tokens", True)
    ]


def test_turns_are_stored_whole(chat: Any) -> None:
    found = chat(policy={"max_seq_len": 24}).encode([dialogue("a", "b" * 30)])
    assert turns(found)[0][0][1] == [*[98] * 30, END, 10]
    assert (found.totals.loss_tokens, found.totals.lost_tokens) == (4, 0)


def test_a_template_brings_its_own_special_tokens_and_the_tokenizer_adds_none(chat: Any) -> None:
    encoder = chat(template=LLAMA_3)
    (row,) = turns(encoder.encode([dialogue("a", "b")]))
    assert row[0][0][:2] == [BOS, START]
    assert row[0][0].count(BOS) == 1


def test_compact_holds_all_before_the_last_answer_and_that_answer(chat: Any) -> None:
    records = [dialogue("a", "b", "c", "d"), dialogue(), dialogue("e", "f")]
    wide, compact = chat().encode(records), chat(columns="pair").encode(records)
    flat = [(list(chain(*chain(*row[:-1]), row[-1][0])), row[-1][1]) for row in turns(wide)]
    assert rows(compact) == flat
    assert compact.columns["labels"].values.dtype == "uint16"
    assert (compact.totals, compact.rejected) == (wide.totals, wide.rejected)


def test_a_special_token_inside_a_message_sets_it_aside_unless_allowed(chat: Any) -> None:
    records = [dialogue("a", "b"), dialogue("a", "b<|im_end|>"), dialogue("<s>", "b")]
    for special in ("escape", "reject"):
        found = chat(special).encode(records)
        reason = "special_token_in_text"
        assert outcomes(found) == [(1, reason, False), (2, reason, False)]
        assert (len(found.lengths), found.totals.specials) == (1, 2)
    allowed = chat("allow").encode(records)
    assert turns(allowed)[1][0][1] == [98, END, END, 10]
    assert (len(allowed.lengths), allowed.totals.specials) == (3, 2)


@pytest.mark.parametrize("records", [[], [None], [{"m": []}, 3]])
def test_a_batch_without_a_good_record_is_empty(faq: Any, chat: Any, records: list[Any]) -> None:
    for found in (
        faq().encode(records),
        chat().encode(records),
        chat(columns="pair").encode(records),
    ):
        assert all(len(column) == 0 for column in found.columns.values())
        assert (found.totals.tokens, found.totals.loss_tokens, found.totals.largest_id) == (
            0,
            0,
            -1,
        )
        assert len(found.rejected) == len(records)


def test_a_batch_is_what_its_records_are_alone(faq: Any, chat: Any) -> None:
    pairs = [pair("a" * (i % 7), "b" * (i % 5)) for i in range(40)]
    encoder = faq(policy={"max_seq_len": 8}, prefix_ids=[BOS])
    assert rows(encoder.encode(pairs)) == [row for p in pairs for row in rows(encoder.encode([p]))]
    records = [dialogue(*("x" * (i % 4 + j) for j in range(2 + 2 * (i % 3)))) for i in range(40)]
    talker = chat(policy={"max_seq_len": 50})
    whole = talker.encode(records)
    alone = [talker.encode([record]) for record in records]
    assert turns(whole) == [row for found in alone for row in turns(found)]
    assert whole.totals.loss_tokens == sum(found.totals.loss_tokens for found in alone)
    assert 0 < len(whole.lengths) < 40


@pytest.mark.parametrize(
    ("template", "bad", "expected"),
    [
        (None, dialogue("a"), ("too_few_messages", False)),
        (None, dialogue("a" * 100, "b"), ("no_loss_tokens", True)),
        ("{{ raise_exception('no') if messages[0].content == 'x' else messages | map(attribute='content') | join }}", dialogue("x", "b"), ("template_error", False)),
        ("{{ messages | length if messages[0].content == 'x' else messages | map(attribute='content') | join }}", dialogue("x", "b"), ("not_prefix_stable", False)),
    ],
)  # fmt: skip
def test_a_bad_conversation_has_its_reason_and_the_good_ones_stay(
    chat: Any, template: str | None, bad: Any, expected: tuple[str, bool]
) -> None:
    found = chat(template=template, policy={"target_prompts": "all"} if template else {}).encode(
        [dialogue("a", "b"), bad, dialogue("c", "d")]
    )
    assert outcomes(found) == [(1, *expected)]
    assert found.positions.tolist() == [0, 2]
