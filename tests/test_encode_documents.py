"""Documents to be packed, beside the collator's rule written out token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.encode.documents import as_documents, side_by_side
from mdsmix.encode.pairs import lacks_eos
from mdsmix.encode.targets import USABLE, Targets, Turns, count_losses, judge
from mdsmix.encode.tokenizer import Tokenizer
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


@settings(max_examples=150, deadline=None)
@given(talks, st.sampled_from(POLICIES), st.integers(2, 30), st.booleans())
def test_documents_are_what_the_collator_makes_of_each_sample(
    tokenizer: Tokenizer, found: list[Talk], policy: tuple[str, str], length: int, has_eos: bool
) -> None:
    targets = Targets(max_seq_len=length, target_prompts=policy[0], target_responses=policy[1])
    known = tokenizer if has_eos else replace(tokenizer, eos_id=None)
    segments = Ragged.of([side for talk in found for turn in talk for side in turn], np.int64)
    counts = np.array([len(talk) for talk in found], np.int64)
    turns = Turns.interleaved(segments.lengths, counts)
    keep = judge(targets, turns) == USABLE
    segments, counts = segments.take(np.repeat(keep, 2 * counts)), counts[keep]
    turns = Turns.interleaved(segments.lengths, counts)
    expected = [by_token(t, targets, known.eos_id) for t, k in zip(found, keep, strict=True) if k]

    encoded = as_documents(segments, turns, targets, known, [], 0)
    ids, mask = encoded.columns["input_ids"], encoded.columns["loss_mask"]
    assert [(ids[i].tolist(), mask[i].tolist()) for i in range(len(ids))] == expected
    assert ids.values.dtype == np.dtype(known.dtype)
    assert encoded.tokens == sum(len(row) for row, _ in expected)
    assert encoded.lengths.tolist() == [len(row) for row, _ in expected]
    whole = Ragged(segments.values, segments.offsets[2 * turns.offsets])
    losses = count_losses(targets, turns, lacks_eos(whole, known.eos_id))
    assert encoded.loss_tokens == sum(sum(flags) for _, flags in expected) == losses.sum()
    whole_lengths = [
        sum(len(p) + len(r) for p, r in t) for t, k in zip(found, keep, strict=True) if k
    ]
    beyond = [n - length for n in whole_lengths]
    assert encoded.lost_tokens == sum(n for n in beyond if n > 0)


@given(st.lists(st.tuples(part, part), max_size=5))
def test_two_columns_side_by_side(pairs: list[tuple[list[int], list[int]]]) -> None:
    sides = [Ragged.of([pair[side] for pair in pairs], np.uint16) for side in (0, 1)]
    joined = side_by_side(*sides)
    assert [joined[i].tolist() for i in range(len(joined))] == [s for pair in pairs for s in pair]
