"""Records become rows or one reason code each; worked by hand on one token per character, <s> is 0
and </s> is 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.encode.encoded import Encoded, add_special_tokens, lay_out_targets, split_rows
from mdsmix.kinds.finetuning import Pairs
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.ragged import Ragged
from mdsmix.record import FILTERED, Conversation, Document, Pair
from mdsmix.tokenizer.card import Tokenizer
from tests.styles import BOS, END, EOS, START, chats, ids, in_turn, lists, opened

SPECIAL = "special_token_in_text"
BEFORE, AFTER = {"prefix_ids": [BOS]}, {"suffix_ids": [EOS]}
ROWS = st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=9)
AROUND = st.lists(st.integers(0, 9), max_size=2)


def rows(encoded: Encoded) -> list[tuple[list[int], list[int]]]:
    both = (lists(encoded.columns[name]) for name in ("input_ids", "labels"))
    return [*zip(*both, strict=True)]


def turns(encoded: Encoded) -> list[list[tuple[list[int], list[int]]]]:
    decoded = (orjson.loads(blob.tobytes()) for blob in encoded.columns["turns"])
    return [[(turn["input_ids"], turn["labels"]) for turn in row] for row in decoded]


def pairs(tokenizer: Tokenizer, *texts: Any, changes: Any = None, **settings: Any) -> Encoded:
    encoder = opened(Pairs, tokenizer, changes, **settings)
    return encoder.encode([Pair(*each) for each in texts])


def dialogue(*texts: str) -> Conversation:
    return Conversation(in_turn(*texts))


def test_what_the_tokenizer_adds_is_kept_but_for_the_second_bos(lettered: Tokenizer) -> None:
    """EOS stays behind both, and so does a first token that is no BOS, or BOS where the tokenizer
    names none.
    """
    hi, yes = ids("hi"), ids("yes")
    for changes, expected in (
        *((BEFORE, ([BOS, *hi], yes)), (AFTER, ([*hi, EOS], [*yes, EOS]))),
        (BEFORE | AFTER, ([BOS, *hi, EOS], [*yes, EOS])),
        ({"prefix_ids": [START, BOS]}, ([START, BOS, *hi], [START, BOS, *yes])),
        (BEFORE | {"bos_id": None}, ([BOS, *hi], [BOS, *yes])),
        ({"prefix_ids": [BOS, BOS]}, ([BOS, BOS, *hi], [BOS, *yes])),
    ):
        assert rows(pairs(lettered, ("hi", "yes"), changes=changes)) == [expected], changes
    texts = [("<s>hi", "<s>yes"), ("<s>hi", "yes"), ("hi", "<s>yes"), ("<s>", "<s>")]
    found = pairs(lettered, *texts, special_tokens_in_text="allow")
    assert rows(found) == [([BOS, *hi], yes), ([BOS, *hi], yes), (hi, [BOS, *yes])]
    assert dict(found.rejected) == {3: "empty_response"}
    # After tokenization: the prompt is BOS, the response was BOS and is nothing.
    found = pairs(lettered, ("", "yes"), ("hi", ""), changes=BEFORE)
    assert (rows(found), dict(found.rejected)) == ([([BOS], yes)], {1: "empty_response"})
    assert rows(pairs(lettered, ("", ""), changes=AFTER)) == [([EOS], [EOS])]


def test_what_trains_nothing_has_its_reason_at_its_place(lettered: Tokenizer) -> None:
    out = [("", "b"), ("a", ""), ("a" * 100, "b")]
    found = pairs(lettered, "ab", *out, "cd")
    assert rows(found) == [(ids("a"), ids("b")), (ids("c"), ids("d"))]
    filtered = ["empty_prompt", "empty_response", "no_loss_tokens"]
    assert dict(found.rejected) == dict(enumerate(filtered, 1))
    assert {*filtered} <= FILTERED.keys()
    joined = "messages | map(attribute='content') | join"
    fails, counts = "raise_exception('no')", "messages | length"
    at_x = [f"{{{{ {x} if messages[0].content == 'x' else {joined} }}}}" for x in (fails, counts)]
    for template, record, why in (
        (None, dialogue("a" * 100, "b"), "no_loss_tokens"),
        (at_x[0], dialogue("x", "b"), "template_error"),
        (at_x[1], dialogue("x", "b"), "not_prefix_stable"),
    ):
        encoder = chats(lettered, template, target_prompts="all" if template else "none")
        found = encoder.encode([dialogue("a", "b"), record, dialogue("c", "d")])
        assert (dict(found.rejected), found.positions.tolist()) == ({1: why}, [0, 2])


def test_special_tokens_in_a_text_are_text_a_token_or_a_reason(lettered: Tokenizer) -> None:
    for rule, expected in (
        ("escape", [(ids("<|im_start|>x"), ids("y")), (ids("a"), ids("b</s>"))]),
        ("allow", [([START, *ids("x")], ids("y")), (ids("a"), [*ids("b"), EOS])]),
        ("reject", []),
    ):
        texts = [("<|im_start|>x", "y"), ("a", "b</s>")]
        found = pairs(lettered, "ab", *texts, special_tokens_in_text=rule)
        assert rows(found) == [(ids("a"), ids("b")), *expected]
        assert dict(found.rejected) == ({} if expected else {1: SPECIAL, 2: SPECIAL})
        assert found.totals.specials == 2
    talks = [dialogue("a", "b"), dialogue("a", "b<|im_end|>"), dialogue("<s>", "b")]
    for rule in ("escape", "reject"):
        found = chats(lettered, special_tokens_in_text=rule).encode(talks)
        assert dict(found.rejected) == {1: SPECIAL, 2: SPECIAL}
        assert (len(found.lengths), found.totals.specials) == (1, 2)
    allowed = chats(lettered, special_tokens_in_text="allow").encode(talks)
    assert turns(allowed)[1][0][1] == [98, END, END, 10]
    assert (len(allowed.lengths), allowed.totals.specials) == (3, 2)
    # By any first character; a placeholder is none.
    encoder = chats(replace(lettered, special_tokens=["~~"]), special_tokens_in_text="reject")
    found = encoder.encode([dialogue("~", "b~~"), dialogue("<image>", "b")])
    assert (dict(found.rejected), found.placeholders) == ({0: SPECIAL}, {"<image>": 1})


def test_a_prompt_beyond_max_seq_len_counts_as_the_loader_cuts_it(lettered: Tokenizer) -> None:
    """To 4 tokens before `length>=6` looks at it, so nothing would be trained; an encoder takes one
    of any length.
    """
    length = {"max_seq_len": 4, "target_prompts": "length>=6"}
    found = pairs(lettered, ("abcdefg", "x"), **length)
    assert dict(found.rejected) == {0: "no_loss_tokens"}
    within = pairs(lettered, ("abcdefg", "xy"), **length | {"target_prompts": "length>=4"})
    assert rows(within) == [(ids("abcd"), ids("x"))]
    texts = [("abcdefg", "vwxyz"), ("", "x")]
    found = pairs(lettered, *texts, max_seq_len=4, decoder_only_format=False)
    assert rows(found) == [([*ids("abc"), EOS], ids("vwxy"))]
    assert dict(found.rejected) == {1: "empty_prompt"}


def test_a_batch_is_what_its_records_are_alone_and_may_be_empty(lettered: Tokenizer) -> None:
    some = [Pair("a" * (i % 7), "b" * (i % 5)) for i in range(40)]
    encoder = opened(Pairs, lettered, BEFORE, max_seq_len=8)
    assert rows(encoder.encode(some)) == [row for p in some for row in rows(encoder.encode([p]))]
    records = [dialogue(*("x" * (i % 4 + j) for j in range(2 + 2 * (i % 3)))) for i in range(40)]
    talker = chats(lettered, max_seq_len=50)
    whole, alone = talker.encode(records), [talker.encode([record]) for record in records]
    assert turns(whole) == [row for found in alone for row in turns(found)]
    assert whole.totals.loss_tokens == sum(found.totals.loss_tokens for found in alone)
    assert 0 < len(whole.lengths) < 40
    for each in (encoder, talker, chats(lettered, columns="pair"), documents(lettered)):
        found = each.encode([])
        assert found.columns.keys() == each.encoding.columns.keys()
        assert all(len(column) == 0 for column in found.columns.values())
        totals = found.totals
        assert (totals.tokens, totals.loss_tokens, totals.largest_id) == (0, 0, -1)


def documents(tokenizer: Tokenizer, changes: Any = None, **settings: Any) -> Any:
    usual = {"max_seq_len": 4, "layout": "document", "loader": "text", "add_bos": False}
    return opened(Pretraining, tokenizer, changes, **usual | {"add_eos": True} | settings)


def said(encoder: Any, *texts: str) -> tuple[list[list[int]], Encoded]:
    encoded = encoder.encode([*map(Document, texts)])
    return lists(encoded.columns["tokens"]), encoded


def test_a_document_is_split_never_cut_off_and_has_its_reason(lettered: Tokenizer) -> None:
    """But for a rest of one token, which is lost and counted. The special tokens count too. One
    token alone has no loss, and is filtered from samples but not from joined rows.
    """
    rows, found = said(documents(lettered), "abcd", "abcdefgh")
    assert rows == [ids("abcd"), ids("abcd"), ids("efgh")]
    totals = found.totals
    assert (totals.tokens, totals.loss_tokens, totals.lost_tokens) == (12, 9, 2)
    reasons = ["empty", "min_tokens", "max_tokens", "max_tokens"]
    assert {"one_token", *reasons} <= FILTERED.keys()
    for layout in ("document", "concat"):
        encoder = documents(lettered, layout=layout, min_tokens=3, max_tokens=4)
        rows, found = said(encoder, "", "a", "ab", "abc", "abcd", "abcdefgh")
        assert rows == [[*ids("ab"), EOS], [*ids("abc"), EOS]]
        assert [found.rejected[at] for at in (0, 1, 4, 5)] == reasons
        rows, found = said(documents(lettered, layout=layout, add_eos=False), "a")
        alone = ([], {0: "one_token"}) if layout == "document" else ([ids("a")], {})
        assert (rows, dict(found.rejected)) == alone


def test_bos_and_eos_are_added_where_the_tokenizer_adds_none(lettered: Tokenizer) -> None:
    for prefix, suffix, wanted, head, tail in (
        *(([], [], False, [], []), ([], [], True, [BOS], [EOS]), ([BOS], [], False, [BOS], [])),
        *(([BOS], [], True, [BOS], [EOS]), ([BOS], [EOS], True, [BOS], [EOS])),
        *(([], [EOS], True, [BOS], [EOS]), ([START], [START], True, [BOS, START], [START, EOS])),
        ([BOS, START], [START, EOS], True, [BOS, START], [START, EOS]),
    ):
        around = {"prefix_ids": prefix, "suffix_ids": suffix}
        added = {"add_bos": wanted, "add_eos": wanted, "max_seq_len": 99}
        for layout in ("document", "concat"):
            rows, _ = said(documents(lettered, around, layout=layout, **added), "abc")
            assert rows == [[*head, *ids("abc"), *tail]], (prefix, suffix, wanted)


@settings(max_examples=60, deadline=None)
@given(ROWS, AROUND, AROUND, st.integers(2, 5))
def test_rows_are_framed_and_split_as_lists_are(
    given: list[list[int]], head: list[int], tail: list[int], longest: int
) -> None:
    """A rest of one token is dropped."""
    framed = add_special_tokens(Ragged.from_rows(given, np.uint32), head, tail, "uint16")
    assert lists(framed) == [[*head, *row, *tail] for row in given]
    assert framed.values.dtype == np.uint16
    given = [row for row in given if len(row) > 1]
    parts, sources = split_rows(Ragged.from_rows(given, np.uint16), longest)
    slices = [(n, row[i : i + longest]) for n, row in enumerate(given) for i in range(0, len(row), longest)]  # fmt: skip
    kept = [(n, part) for n, part in slices if len(part) > 1]
    assert [*zip(sources.tolist(), lists(parts), strict=True)] == kept
    columns = lay_out_targets(parts)
    firsts, rests = lists(columns["input_ids"]), lists(columns["labels"])
    assert [first + rest for first, rest in zip(firsts, rests, strict=True)] == lists(parts)
