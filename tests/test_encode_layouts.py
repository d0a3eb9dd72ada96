"""Columns of samples: documents beside the collator's rule written out token by token; of pairs, what is cut could not train."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.encode.encoded import as_documents, as_pairs
from mdsmix.encode.labels import USABLE, Labels, Targets, Turns
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.ragged import Ragged
from tests.styles import EOS, letters

Talk = list[tuple[list[int], list[int]]]
POLICIES = [
    ("none", "last"),
    ("none", "all"),
    ("all", "last"),
    ("all", "all"),
    ("length>=3", "all"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return letters(tmp_path_factory.mktemp("letters"))


def by_token(talk: Talk, targets: Targets, eos: int | None) -> tuple[list[int], list[int]]:
    """Ids and loss mask of one conversation, as LLM-Foundry's collator stitches and cuts it."""
    ids, mask = list[int](), list[int]()
    for number, (prompt, response) in enumerate(talk):
        is_last = number == len(talk) - 1
        if is_last and eos is not None and response[-1] != eos:
            response = [*response, eos]
        ids += prompt + response
        mask += [int(targets.trains_prompt(len(prompt)))] * len(prompt)
        mask += [int(targets.trains_response(is_last))] * len(response)
    mask[0] = 0
    return ids[: targets.max_seq_len], mask[: targets.max_seq_len]


token = st.sampled_from([EOS, 40, 41, 42])
part = st.lists(token, min_size=1, max_size=6)
talks = st.lists(st.lists(st.tuples(part, part), min_size=1, max_size=3), max_size=5)


@settings(max_examples=60, deadline=None)
@given(talks, st.sampled_from(POLICIES), st.integers(2, 30), st.booleans())
def test_documents_are_what_the_collator_makes_of_each_sample(
    tokenizer: Tokenizer, found: list[Talk], policy: tuple[str, str], length: int, has_eos: bool
) -> None:
    targets = Targets(max_seq_len=length, target_prompts=policy[0], target_responses=policy[1])
    known = tokenizer if has_eos else replace(tokenizer, eos_id=None)
    segments = Ragged.of([side for talk in found for turn in talk for side in turn], np.int64)
    counts = np.array([len(talk) for talk in found], np.int64)
    whole = Labels(targets, Turns(segments, counts), known.eos_id)
    keep = whole.verdicts() == USABLE
    labels = Labels(targets, whole.turns.take(keep), known.eos_id)
    expected = [by_token(t, targets, known.eos_id) for t, k in zip(found, keep, strict=True) if k]

    encoded = as_documents(labels, known, range(len(labels.turns.counts)))
    ids, mask = encoded.columns["input_ids"], encoded.columns["loss_mask"]
    assert [(ids[i].tolist(), mask[i].tolist()) for i in range(len(ids))] == expected
    assert ids.values.dtype == np.dtype(known.dtype)
    assert encoded.totals.tokens == sum(len(row) for row, _ in expected)
    assert encoded.lengths.tolist() == [len(row) for row, _ in expected]
    losses = sum(sum(flags) for _, flags in expected)
    assert encoded.totals.loss_tokens == losses == labels.losses().sum()
    kept = [talk for talk, is_kept in zip(found, keep, strict=True) if is_kept]
    beyond = [sum(len(p) + len(r) for p, r in talk) - length for talk in kept]
    assert encoded.totals.lost_tokens == sum(n for n in beyond if n > 0)


def test_pairs_are_cut_where_the_row_ends(tokenizer: Tokenizer) -> None:
    """But for one token of a target, which the collator reads; an encoder's context that is cut ends in EOS."""
    all_prompts, apart = {"target_prompts": "all"}, {"decoder_only_format": False}
    for longest, policy, contexts, targets, expected, sums in (
        # 8 trains, the EOS that the collator adds to it is cut off; 9 and its own EOS train.
        (3, {}, [[5, 6], [7]], [[8], [9, EOS]], [([5, 6], [8]), ([7], [9, EOS])], (1 + 2, 0)),
        (4, {}, [[5, 6]], [[7, 8, 9, EOS]], [([5, 6], [7, 8])], (2, 2)),
        (3, all_prompts, [[5, 6, 7, 8]], [[9, EOS]], [([5, 6, 7], [9])], (2, 2)),
        (3, apart, [[5, 6, 7, 8], [5, 6, 7]], [[9], [9, 8, 7, 6]], [([5, 6, EOS], [9]), ([5, 6, 7], [9, 8, 7])], (2 + 3, 2)),
        (3, {}, [], [], [], (0, 0)),
    ):  # fmt: skip
        ids = Ragged.of([s for pair in zip(contexts, targets, strict=True) for s in pair], "uint16")
        turns = Turns(ids, np.ones(len(contexts), np.int64))
        labels = Labels(Targets(max_seq_len=longest, **policy), turns, tokenizer.eos_id)  # type: ignore[arg-type]
        found = as_pairs(labels, tokenizer, range(len(contexts)))
        one, other = found.columns["input_ids"], found.columns["labels"]
        assert [(one[i].tolist(), other[i].tolist()) for i in range(len(one))] == expected
        assert (found.totals.loss_tokens, found.totals.lost_tokens) == sums
        assert found.lengths.tolist() == [len(c) + len(t) for c, t in expected]
        assert found.totals.largest_id == max(
            (t for row in expected for s in row for t in s), default=-1
        )
