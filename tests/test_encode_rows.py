"""Each record becomes rows or a reason code; worked out by hand with one token per character, where
<s> is 0 and </s> is 1.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mdsmix.encode.encoded import (
    Encoded,
    add_special_tokens,
    lay_out_targets,
    lay_out_turns,
    split_rows,
)
from mdsmix.encode.labels import Labels, Targets, Turns
from mdsmix.kinds.finetuning import Pairs
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.ragged import Ragged
from mdsmix.record import FILTERED, Conversation, Document, Pair
from mdsmix.tokenizer.card import Tokenizer
from tests.styles import (
    BOS,
    END,
    EOS,
    START,
    make_dialogue,
    open_chats,
    open_kind,
    to_ids,
    to_lists,
)

SPECIAL = "special_token_in_text"
BEFORE, AFTER = {"prefix_ids": [BOS]}, {"suffix_ids": [EOS]}
ROWS = st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=9)
AROUND = st.lists(st.integers(0, 9), max_size=2)
SIDE = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3)
SAMPLES = st.lists(st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=3), max_size=4)


def read_pairs(encoded: Encoded) -> list[tuple[list[int], list[int]]]:
    both = (to_lists(encoded.columns[name]) for name in ("input_ids", "labels"))
    return [*zip(*both, strict=True)]


def read_turns(encoded: Encoded) -> list[list[tuple[list[int], list[int]]]]:
    decoded = (orjson.loads(blob.tobytes()) for blob in encoded.columns["turns"])
    return [[(turn["input_ids"], turn["labels"]) for turn in row] for row in decoded]


def encode_pairs(
    tokenizer: Tokenizer, *texts: Any, changes: Any = None, **settings: Any
) -> Encoded:
    encoder = open_kind(Pairs, tokenizer, changes, **settings)
    return encoder.encode([Pair(*pair) for pair in texts])


def make_chat(*texts: str) -> Conversation:
    return Conversation(make_dialogue(*texts))


def test_added_tokens_are_kept_except_the_second_bos(lettered: Tokenizer) -> None:
    """EOS is kept after both. So is a first token that is not BOS, and BOS if the tokenizer names
    none.
    """
    hi, yes = to_ids("hi"), to_ids("yes")
    for changes, expected in (
        *((BEFORE, ([BOS, *hi], yes)), (AFTER, ([*hi, EOS], [*yes, EOS]))),
        (BEFORE | AFTER, ([BOS, *hi, EOS], [*yes, EOS])),
        ({"prefix_ids": [START, BOS]}, ([START, BOS, *hi], [START, BOS, *yes])),
        (BEFORE | {"bos_id": None}, ([BOS, *hi], [BOS, *yes])),
        ({"prefix_ids": [BOS, BOS]}, ([BOS, BOS, *hi], [BOS, *yes])),
    ):
        assert read_pairs(encode_pairs(lettered, ("hi", "yes"), changes=changes)) == [expected], (
            changes
        )
    texts = [("<s>hi", "<s>yes"), ("<s>hi", "yes"), ("hi", "<s>yes"), ("<s>", "<s>")]
    encoded = encode_pairs(lettered, *texts, special_tokens_in_text="allow")
    assert read_pairs(encoded) == [([BOS, *hi], yes), ([BOS, *hi], yes), (hi, [BOS, *yes])]
    assert dict(encoded.rejected) == {3: "empty_response"}
    # After tokenization: the prompt is BOS, the response was BOS and is nothing.
    encoded = encode_pairs(lettered, ("", "yes"), ("hi", ""), changes=BEFORE)
    assert (read_pairs(encoded), dict(encoded.rejected)) == ([([BOS], yes)], {1: "empty_response"})
    assert read_pairs(encode_pairs(lettered, ("", ""), changes=AFTER)) == [([EOS], [EOS])]


def test_records_without_a_trained_token_have_a_reason_at_their_position(
    lettered: Tokenizer,
) -> None:
    untrained = [("", "b"), ("a", ""), ("a" * 100, "b")]
    encoded = encode_pairs(lettered, "ab", *untrained, "cd")
    assert read_pairs(encoded) == [(to_ids("a"), to_ids("b")), (to_ids("c"), to_ids("d"))]
    filtered = ["empty_prompt", "empty_response", "no_loss_tokens"]
    assert dict(encoded.rejected) == dict(enumerate(filtered, 1))
    assert {*filtered} <= FILTERED.keys()
    joined = "messages | map(attribute='content') | join"
    fails, counts = "raise_exception('no')", "messages | length"
    at_x = [f"{{{{ {x} if messages[0].content == 'x' else {joined} }}}}" for x in (fails, counts)]
    for template, record, why in (
        (None, make_chat("a" * 100, "b"), "no_loss_tokens"),
        (at_x[0], make_chat("x", "b"), "template_error"),
        (at_x[1], make_chat("x", "b"), "not_prefix_stable"),
    ):
        encoder = open_chats(lettered, template, target_prompts="all" if template else "none")
        encoded = encoder.encode([make_chat("a", "b"), record, make_chat("c", "d")])
        assert (dict(encoded.rejected), encoded.positions.tolist()) == ({1: why}, [0, 2])


def test_special_tokens_in_a_text_are_text_a_token_or_a_reason(lettered: Tokenizer) -> None:
    for rule, expected in (
        ("escape", [(to_ids("<|im_start|>x"), to_ids("y")), (to_ids("a"), to_ids("b</s>"))]),
        ("allow", [([START, *to_ids("x")], to_ids("y")), (to_ids("a"), [*to_ids("b"), EOS])]),
        ("reject", []),
    ):
        texts = [("<|im_start|>x", "y"), ("a", "b</s>")]
        encoded = encode_pairs(lettered, "ab", *texts, special_tokens_in_text=rule)
        assert read_pairs(encoded) == [(to_ids("a"), to_ids("b")), *expected]
        assert dict(encoded.rejected) == ({} if expected else {1: SPECIAL, 2: SPECIAL})
        assert encoded.totals.specials == 2
    talks = [make_chat("a", "b"), make_chat("a", "b<|im_end|>"), make_chat("<s>", "b")]
    for rule in ("escape", "reject"):
        encoded = open_chats(lettered, special_tokens_in_text=rule).encode(talks)
        assert dict(encoded.rejected) == {1: SPECIAL, 2: SPECIAL}
        assert (len(encoded.lengths), encoded.totals.specials) == (1, 2)
    allowed = open_chats(lettered, special_tokens_in_text="allow").encode(talks)
    assert read_turns(allowed)[1][0][1] == [98, END, END, 10]
    assert (len(allowed.lengths), allowed.totals.specials) == (3, 2)
    # By any first character; a placeholder is none.
    encoder = open_chats(replace(lettered, special_tokens=["~~"]), special_tokens_in_text="reject")
    encoded = encoder.encode([make_chat("~", "b~~"), make_chat("<image>", "b")])
    assert (dict(encoded.rejected), encoded.placeholders) == ({0: SPECIAL}, {"<image>": 1})


def test_a_prompt_beyond_max_seq_len_is_measured_as_the_loader_cuts_it(lettered: Tokenizer) -> None:
    """It is cut to 4 tokens before `length>=6` measures it, so nothing would be trained. An encoder
    takes a context of any length.
    """
    length = {"max_seq_len": 4, "target_prompts": "length>=6"}
    encoded = encode_pairs(lettered, ("abcdefg", "x"), **length)
    assert dict(encoded.rejected) == {0: "no_loss_tokens"}
    within = encode_pairs(lettered, ("abcdefg", "xy"), **length | {"target_prompts": "length>=4"})
    assert read_pairs(within) == [(to_ids("abcd"), to_ids("x"))]
    texts = [("abcdefg", "vwxyz"), ("", "x")]
    encoded = encode_pairs(lettered, *texts, max_seq_len=4, decoder_only_format=False)
    assert read_pairs(encoded) == [([*to_ids("abc"), EOS], to_ids("vwxy"))]
    assert dict(encoded.rejected) == {1: "empty_prompt"}


def test_a_batch_gives_the_rows_of_its_records_and_may_be_empty(lettered: Tokenizer) -> None:
    records_of_pairs = [Pair("a" * (i % 7), "b" * (i % 5)) for i in range(40)]
    encoder = open_kind(Pairs, lettered, BEFORE, max_seq_len=8)
    assert read_pairs(encoder.encode(records_of_pairs)) == [
        row for p in records_of_pairs for row in read_pairs(encoder.encode([p]))
    ]
    records = [make_chat(*("x" * (i % 4 + j) for j in range(2 + 2 * (i % 3)))) for i in range(40)]
    talker = open_chats(lettered, max_seq_len=50)
    whole, alone = talker.encode(records), [talker.encode([record]) for record in records]
    assert read_turns(whole) == [row for encoded in alone for row in read_turns(encoded)]
    assert whole.totals.loss_tokens == sum(encoded.totals.loss_tokens for encoded in alone)
    assert 0 < len(whole.lengths) < 40
    for kind in (encoder, talker, open_chats(lettered, columns="pair"), open_documents(lettered)):
        encoded = kind.encode([])
        assert encoded.columns.keys() == kind.encoding.columns.keys()
        assert all(len(column) == 0 for column in encoded.columns.values())
        totals = encoded.totals
        assert (totals.tokens, totals.loss_tokens, totals.largest_id) == (0, 0, -1)


def open_documents(tokenizer: Tokenizer, changes: Any = None, **settings: Any) -> Any:
    usual = {"max_seq_len": 4, "layout": "document", "loader": "text", "add_bos": False}
    return open_kind(Pretraining, tokenizer, changes, **usual | {"add_eos": True} | settings)


def encode_documents(encoder: Any, *texts: str) -> tuple[list[list[int]], Encoded]:
    encoded = encoder.encode([*map(Document, texts)])
    return to_lists(encoded.columns["tokens"]), encoded


def test_a_document_is_split_and_not_cut_or_has_a_reason(lettered: Tokenizer) -> None:
    """Only a remainder of one token is lost, and counted. Special tokens count too. A document of
    one token has no loss: it is filtered from samples, but not from joined rows.
    """
    rows, encoded = encode_documents(open_documents(lettered), "abcd", "abcdefgh")
    assert rows == [to_ids("abcd"), to_ids("abcd"), to_ids("efgh")]
    totals = encoded.totals
    assert (totals.tokens, totals.loss_tokens, totals.lost_tokens) == (12, 9, 2)
    reasons = ["empty", "min_tokens", "max_tokens", "max_tokens"]
    assert {"one_token", *reasons} <= FILTERED.keys()
    for layout in ("document", "concat"):
        encoder = open_documents(lettered, layout=layout, min_tokens=3, max_tokens=4)
        rows, encoded = encode_documents(encoder, "", "a", "ab", "abc", "abcd", "abcdefgh")
        assert rows == [[*to_ids("ab"), EOS], [*to_ids("abc"), EOS]]
        assert [encoded.rejected[position] for position in (0, 1, 4, 5)] == reasons
        rows, encoded = encode_documents(
            open_documents(lettered, layout=layout, add_eos=False), "a"
        )
        alone = ([], {0: "one_token"}) if layout == "document" else ([to_ids("a")], {})
        assert (rows, dict(encoded.rejected)) == alone


def test_bos_and_eos_are_added_if_the_tokenizer_adds_none(lettered: Tokenizer) -> None:
    for prefix, suffix, adds, head, tail in (
        *(([], [], False, [], []), ([], [], True, [BOS], [EOS]), ([BOS], [], False, [BOS], [])),
        *(([BOS], [], True, [BOS], [EOS]), ([BOS], [EOS], True, [BOS], [EOS])),
        *(([], [EOS], True, [BOS], [EOS]), ([START], [START], True, [BOS, START], [START, EOS])),
        ([BOS, START], [START, EOS], True, [BOS, START], [START, EOS]),
    ):
        around = {"prefix_ids": prefix, "suffix_ids": suffix}
        added = {"add_bos": adds, "add_eos": adds, "max_seq_len": 99}
        for layout in ("document", "concat"):
            rows, _ = encode_documents(
                open_documents(lettered, around, layout=layout, **added), "abc"
            )
            assert rows == [[*head, *to_ids("abc"), *tail]], (prefix, suffix, adds)


@settings(max_examples=60, deadline=None)
@given(SAMPLES)
@example([[([0], [10**9]), ([100], [10**6, 1])], [([1], [1])]])
@example([])
def test_turns_are_stored_as_compact_json(
    lettered: Tokenizer, samples: list[list[tuple[list[int], list[int]]]]
) -> None:
    sides = [side for sample in samples for turn in sample for side in turn]
    turns = Turns(Ragged.from_rows(sides, np.uint32), np.array([*map(len, samples)], np.int64))
    labels = Labels(Targets(max_seq_len=99), turns, EOS)
    stored = lay_out_turns(labels, lettered, range(len(samples))).columns["turns"]
    assert stored.values.dtype == np.uint8
    trees = [
        [{"input_ids": prompt, "labels": response} for prompt, response in sample]
        for sample in samples
    ]
    expected = [json.dumps(tree, separators=(",", ":")).encode() for tree in trees]
    assert [row.tobytes() for row in stored] == expected


@settings(max_examples=60, deadline=None)
@given(ROWS, AROUND, AROUND, st.integers(2, 5))
def test_rows_are_framed_and_split_like_lists(
    drawn: list[list[int]], head: list[int], tail: list[int], longest: int
) -> None:
    """A remainder of one token is dropped."""
    framed = add_special_tokens(Ragged.from_rows(drawn, np.uint32), head, tail, "uint16")
    assert to_lists(framed) == [[*head, *row, *tail] for row in drawn]
    assert framed.values.dtype == np.uint16
    drawn = [row for row in drawn if len(row) > 1]
    parts, sources = split_rows(Ragged.from_rows(drawn, np.uint16), longest)
    slices = [
        (n, row[i : i + longest])
        for n, row in enumerate(drawn)
        for i in range(0, len(row), longest)
    ]
    expected = [(n, piece) for n, piece in slices if len(piece) > 1]
    assert [*zip(sources.tolist(), to_lists(parts), strict=True)] == expected
    columns = lay_out_targets(parts)
    firsts, rests = to_lists(columns["input_ids"]), to_lists(columns["labels"])
    assert [first + last for first, last in zip(firsts, rests, strict=True)] == to_lists(parts)
