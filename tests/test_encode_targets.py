"""Which tokens train follows Foundry's rules: worked by hand, and against labels laid out token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.encode.labels import Labels, Targets, Turns
from mdsmix.ragged import Ragged
from mdsmix.recipe.rules import target_contradictions

Conversation = list[tuple[int, int]]
"The lengths of each prompt and response."


EOS, WORD, IMAGE = 0, 1, 2


def turns_of(
    batch: Sequence[Conversation], gets_eos: Sequence[bool] = (), images: Any = None
) -> Turns:
    """Words, with EOS at the end of those that get none, and images where they are wanted."""
    lengths = np.array([part for turns in batch for pair in turns for part in pair], np.int64)
    counts = np.array([len(turns) for turns in batch], np.int64)
    turns = Turns(Ragged.from_lengths(np.full(lengths.sum(), WORD), lengths), counts)
    for end, gets in zip(turns.samples.offsets[1:], gets_eos, strict=False):
        if end and not gets:
            turns.ids.values[end - 1] = EOS
    if images is not None:
        turns.ids.values[images] = IMAGE
    return turns


def verdict(targets: Targets, conversation: Conversation) -> str:
    return str(Labels(targets, turns_of([conversation]), None).verdicts()[0])


def losses(targets: Targets, conversation: Conversation, gets_eos: bool = False) -> int:
    return int(Labels(targets, turns_of([conversation], [gets_eos]), EOS).losses()[0])


def policy(longest: int, prompts: str = "none", responses: str = "last") -> Targets:
    return Targets(max_seq_len=longest, target_prompts=prompts, target_responses=responses)


def test_each_policy_trains_its_segments() -> None:
    """Prompt 3, response 2, prompt 4, response 5: the last answer is 5, the answers are 7 ..."""
    talk = [(3, 2), (4, 5)]
    for prompts, responses, expected in (
        ("none", "last", 5),
        ("none", "all", 7),
        # ... a trained first prompt gives one less than its length, since nothing predicts token 0 ...
        ("all", "all", 13),
        ("all", "last", 11),
        # ... and only the second prompt has four tokens.
        ("length>=4", "last", 9),
        ("length>=5", "all", 7),
    ):
        assert losses(policy(100, prompts, responses), talk) == expected
        assert losses(policy(100, prompts, responses), talk, gets_eos=True) == expected + 1
    # What is cut off gives no loss.
    assert [losses(policy(longest), talk, gets_eos=True) for longest in (12, 14)] == [3, 5]
    assert losses(policy(4, responses="all"), talk) == 1


def test_a_conversation_needs_something_left_to_train() -> None:
    none, two = "no_loss_tokens", [(3, 2), (4, 5)]
    for longest, prompts, responses, conversation, expected in (
        (100, "none", "last", [(0, 5)], "empty_prompt"),
        (100, "none", "last", [(5, 0)], "empty_response"),
        (100, "none", "last", [(2, 2), (2, 0)], "empty_response"),
        (100, "none", "last", [(2, 2), (0, 2)], "empty_prompt"),
        (5, "none", "last", [(5, 1)], none),
        (6, "none", "last", [(5, 1)], ""),
        (9, "none", "last", two, none),
        (9, "none", "all", two, ""),
        (3, "none", "all", two, none),
        (1, "all", "last", [(3, 2)], ""),
        (5, "length>=4", "last", two, none),
        (6, "length>=4", "last", two, ""),
    ):
        found = verdict(policy(longest, prompts, responses), conversation)
        assert found == expected, (longest, prompts, responses, conversation)


def test_an_encoder_decoder_cuts_context_and_target_apart() -> None:
    apart = Targets(max_seq_len=5, decoder_only_format=False)
    assert verdict(apart, [(9, 1)]) == ""
    assert verdict(apart, [(9, 0)]) == "empty_response"
    assert losses(apart, [(9, 3)], gets_eos=True) == 4
    assert losses(apart, [(2, 9), (9, 9)], gets_eos=True) == 5


def test_a_batch_is_judged_as_its_conversations_are_alone() -> None:
    """And the losses are those of labels laid out token by token, with images, which no policy trains, and without."""
    rng = np.random.default_rng(7)
    batch = [
        [(int(p), int(r)) for p, r in rng.integers(0, 9, (rng.integers(1, 5), 2))]
        for _ in range(100)
    ]
    eos = rng.random(100) < 0.5
    for prompts, responses in product(("none", "all", "length>=4"), ("last", "all")):
        targets = policy(12, prompts, responses)
        made = Labels(targets, turns_of(batch, eos), EOS)
        found = made.verdicts()
        assert list(found) == [verdict(targets, c) for c in batch]
        ends = [all(map(all, c)) for c in batch]  # an empty one has no end to lack EOS
        images = [rng.random(sum(map(sum, c))) < 0.3 for c in batch]
        for image in images:
            image[-1:] = False
        seen = Labels(targets, turns_of(batch, eos, np.concatenate(images)), EOS, IMAGE)
        for labels, hidden in ((made, [image & False for image in images]), (seen, images)):
            for each in zip(batch, eos, hidden, labels.losses(), ends, strict=True):
                talk, gets_eos, image, count, is_whole = each
                plain = np.array(_laid_out(targets, talk, gets_eos))
                plain[: len(image)] &= ~image
                assert not is_whole or count == sum(plain[1:12])
        usable = [all(map(all, c)) and any(_laid_out(targets, c, False)[:12]) for c in batch]
        assert (found == "").tolist() == usable
        assert 0 < sum(usable) < 100


def _laid_out(targets: Targets, conversation: Conversation, gets_eos: bool) -> list[bool]:
    """Token by token, whether it is trained."""
    trained: list[bool] = []
    for i, (prompt, response) in enumerate(conversation):
        is_last = i == len(conversation) - 1
        trained += [prompt >= targets.least_trained_prompt] * prompt
        trained += [is_last or targets.target_responses == "all"] * (
            response + (is_last and gets_eos)
        )
    return trained


def test_no_conversation_at_all_is_no_error() -> None:
    made = Labels(Targets(max_seq_len=8), turns_of([]), EOS)
    assert [len(made.verdicts()), len(made.losses()), len(made.cut())] == [0, 0, 0]


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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
        max_size=5,
    ),
    st.integers(1, 30),
    st.booleans(),
)
def test_what_the_loader_cuts_off_is_what_is_beyond_its_rows(
    batch: list[list[tuple[int, int]]], max_seq_len: int, is_decoder_only: bool
) -> None:
    """Laid out token by token: one row in all, or a context and a target."""
    targets = Targets(max_seq_len=max_seq_len, decoder_only_format=is_decoder_only)
    for conversation, cut in zip(batch, Labels(targets, turns_of(batch), None).cut(), strict=True):
        row = [part for turn in conversation for part in turn]
        parts = [sum(row)] if is_decoder_only else [sum(row[:-1]), row[-1]]
        assert cut == sum(len(range(part)[max_seq_len:]) for part in parts)
