"""Which tokens train, and what is stored of a sample, beside the collator's rule written out token by token."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.encode.encoded import as_documents, as_pairs
from mdsmix.encode.labels import USABLE, Labels, Targets, Turns
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.ragged import Ragged
from mdsmix.recipe.rules import target_contradictions
from tests.styles import EOS, letters

IMAGE, WORD = 9, 40
Talk = list[tuple[list[int], list[int]]]
"Prompts and responses."
POLICIES = [(p, r) for p in ("none", "all", "length>=3") for r in ("last", "all")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return letters(tmp_path_factory.mktemp("letters"))


def turns_of(talks: list[Talk]) -> Turns:
    sides = [side for talk in talks for turn in talk for side in turn]
    return Turns(Ragged.of(sides, np.int64), np.array([len(talk) for talk in talks], np.int64))


def test_an_encoder_decoder_cuts_context_and_target_apart() -> None:
    apart = Targets(max_seq_len=5, decoder_only_format=False)
    for sizes, verdict, losses, cut in (
        ([(9, 3)], USABLE, 4, 4),
        ([(9, 0)], "empty_response", 1, 4),
        ([(2, 9), (9, 9)], USABLE, 5, 15 + 4),
        ([(5, 5)], USABLE, 5, 0),
    ):
        talk = [([WORD] * prompt, [WORD] * response) for prompt, response in sizes]
        labels = Labels(apart, turns_of([talk]), EOS)
        assert [*labels.verdicts()] == [verdict]
        assert ([*labels.losses()], [*labels.cut()]) == ([losses], [cut])


def test_settings_that_foundry_would_refuse_are_refused() -> None:
    for policies, words in (
        (("some", "last", True), "target_prompts is 'some'"),
        (("length>=0", "last", True), "length>=N"),
        (("length>=x", "last", True), "length>=N"),
        (("ALL", "last", True), "target_prompts is 'ALL'"),
        (("none", "none", True), "must be last or all"),
        (("none", "all", False), "decoder_only_format: false"),
    ):
        assert words in "".join(target_contradictions(*policies))
    assert [*target_contradictions("length>=3", "all", True)] == []


def by_token(talk: Talk, targets: Targets, eos: int | None) -> tuple[list[int], list[bool]]:
    """Ids of one conversation, and whether each is trained, as LLM-Foundry's collator stitches them; images never are."""
    ids, trained = list[int](), list[bool]()
    for number, (prompt, response) in enumerate(talk):
        is_last = number == len(talk) - 1
        ids += prompt + response
        least = int(targets.target_prompts.partition(">=")[2] or 0)
        is_prompt = targets.target_prompts != "none" and len(prompt) >= least
        trained += [is_prompt] * len(prompt)
        trained += [is_last or targets.target_responses == "all"] * len(response)
    if eos is not None and talk[-1][1][-1:] != [eos]:
        ids, trained = [*ids, eos], [*trained, True]
    return ids, [flag and token != IMAGE for token, flag in zip(ids, trained, strict=True)]


side = st.lists(st.sampled_from([EOS, IMAGE, 40, 41]), max_size=6)
talks = st.lists(st.lists(st.tuples(side, side), min_size=1, max_size=3), max_size=5)


@settings(max_examples=60, deadline=None)
@given(talks, st.sampled_from(POLICIES), st.integers(2, 20), st.booleans())
def test_documents_are_what_the_collator_makes_of_each_sample(
    tokenizer: Tokenizer, found: list[Talk], policies: tuple[str, str], length: int, has_eos: bool
) -> None:
    prompts, responses = policies
    targets = Targets(max_seq_len=length, target_prompts=prompts, target_responses=responses)
    known = tokenizer if has_eos else replace(tokenizer, eos_id=None)
    whole = Labels(targets, turns_of(found), known.eos_id, IMAGE)
    keep = list[Talk]()
    for talk, verdict in zip(found, whole.verdicts(), strict=True):
        _, trained = by_token(talk, targets, None)
        expected = "" if any(trained[:length]) else "no_loss_tokens"
        expected = expected if all(response for _, response in talk) else "empty_response"
        assert verdict == (expected if all(prompt for prompt, _ in talk) else "empty_prompt")
        keep += [talk] * (verdict == USABLE)

    labels = Labels(targets, turns_of(keep), known.eos_id, IMAGE)
    stitched = [by_token(talk, targets, known.eos_id) for talk in keep]
    rows = [(ids[:length], [0, *map(int, trained[1:length])]) for ids, trained in stitched]
    encoded = as_documents(labels, known, range(len(keep)))
    ids, mask = encoded.columns["input_ids"], encoded.columns["loss_mask"]
    assert [(ids[i].tolist(), mask[i].tolist()) for i in range(len(ids))] == rows
    assert ids.values.dtype == np.dtype(known.dtype)
    assert encoded.lengths.tolist() == [len(row) for row, _ in rows]
    assert encoded.totals.tokens == sum(len(row) for row, _ in rows)
    assert labels.losses().tolist() == [sum(flags) for _, flags in rows]
    assert encoded.totals.loss_tokens == labels.losses().sum()
    beyond = [sum(len(p) + len(r) for p, r in talk) - length for talk in keep]
    assert labels.cut().tolist() == [max(0, n) for n in beyond]
    assert encoded.totals.lost_tokens == labels.cut().sum()


PAIRS: list[tuple[int, dict[str, Any], list[Any], list[Any], tuple[int, int]]] = [
    # max_seq_len, policy, pairs, what is stored of them, tokens that give a loss and that are lost.
    # 8 trains, the EOS that the collator adds to it is cut off; 9 and its own EOS train.
    (3, {}, [([5, 6], [8]), ([7], [9, EOS])], [([5, 6], [8]), ([7], [9, EOS])], (1 + 2, 0)),
    (4, {}, [([5, 6], [7, 8, 9, EOS])], [([5, 6], [7, 8])], (2, 2)),
    (3, {"target_prompts": "all"}, [([5, 6, 7, 8], [9, EOS])], [([5, 6, 7], [9])], (2, 2)),
    (3, {"decoder_only_format": False}, [([5, 6, 7, 8], [9])], [([5, 6, EOS], [9])], (2, 1)),
    (3, {"decoder_only_format": False}, [([5, 6], [9, 8, 7, 6])], [([5, 6], [9, 8, 7])], (3, 1)),
    (3, {}, [], [], (0, 0)),
]


def test_pairs_are_cut_where_the_row_ends(tokenizer: Tokenizer) -> None:
    """But for one token of a target, which the collator reads; an encoder's context that is cut ends in EOS."""
    for longest, given_policy, pairs, expected, sums in PAIRS:
        targets = Targets(max_seq_len=longest, **given_policy)
        labels = Labels(targets, turns_of([[pair] for pair in pairs]), tokenizer.eos_id)
        found = as_pairs(labels, tokenizer, range(len(pairs)))
        one, other = found.columns["input_ids"], found.columns["labels"]
        assert [(one[i].tolist(), other[i].tolist()) for i in range(len(one))] == expected
        assert (found.totals.loss_tokens, found.totals.lost_tokens) == sums, pairs
        assert found.lengths.tolist() == [len(context + target) for context, target in expected]
        largest = max((max(context + target) for context, target in expected), default=-1)
        assert found.totals.largest_id == largest
