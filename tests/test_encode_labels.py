"""Which tokens train, what is stored of a sample, and what becomes of long ones, beside the
collator's rule written out token by token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate, chain, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mdsmix.encode import forms
from mdsmix.encode.encoded import Encoded, lay_out_documents, lay_out_pairs
from mdsmix.encode.labels import USABLE, Labels, Targets, Turns
from mdsmix.kinds.finetuning import Pairs
from mdsmix.kinds.pictured import ConversationsWithImages, ImageTurnRenderer
from mdsmix.kinds.turn_renderer import TurnRenderer
from mdsmix.kinds.turn_rows import TurnRows
from mdsmix.ragged import Ragged
from mdsmix.record import FILTERED, Conversation, Pair, RecordRefused, RichConversation
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer
from tests.styles import EOS, USUAL, chats, in_turn, lists, opened

IMAGE, WORD = 9, 40
Talk = list[tuple[list[int], list[int]]]
"Prompts and responses."
POLICIES = [(p, r) for p in ("none", "all", "length>=3") for r in ("last", "all")]


def turns_of(talks: list[Talk]) -> Turns:
    sides = [side for talk in talks for turn in talk for side in turn]
    return Turns(
        Ragged.from_rows(sides, np.int64), np.array([len(talk) for talk in talks], np.int64)
    )


def by_token(talk: Talk, targets: Targets, eos: int | None) -> tuple[list[int], list[bool]]:
    """Ids of one conversation, and whether each is trained, as LLM-Foundry's collator stitches
    them; images never are.
    """
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
    lettered: Tokenizer, found: list[Talk], policies: tuple[str, str], length: int, has_eos: bool
) -> None:
    prompts, responses = policies
    targets = Targets(max_seq_len=length, target_prompts=prompts, target_responses=responses)
    known = lettered if has_eos else replace(lettered, eos_id=None)
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
    encoded = lay_out_documents(labels, known, range(len(keep)))
    ids, mask = encoded.columns["input_ids"], encoded.columns["loss_mask"]
    assert [*zip(lists(ids), lists(mask), strict=True)] == rows
    assert ids.values.dtype == np.dtype(known.dtype)
    assert encoded.lengths.tolist() == [len(row) for row, _ in rows]
    assert encoded.totals.tokens == sum(len(row) for row, _ in rows)
    assert labels.losses().tolist() == [sum(flags) for _, flags in rows]
    assert encoded.totals.loss_tokens == labels.losses().sum()
    beyond = [sum(len(p) + len(r) for p, r in talk) - length for talk in keep]
    assert labels.cut().tolist() == [max(0, n) for n in beyond]
    assert encoded.totals.lost_tokens == labels.cut().sum()


@settings(max_examples=100, deadline=None)
@given(talks, st.integers(2, 12), st.booleans())
@example([[([5, 6, 7], [8])]], 3, True)  # a context that just fits is not cut
def test_pairs_are_cut_to_a_row(
    lettered: Tokenizer, found: list[Talk], length: int, apart: bool
) -> None:
    """But for one token of a target, which the collator reads. An encoder-decoder's context and
    target are cut apart, and a context that is cut ends in EOS.
    """
    targets = Targets(max_seq_len=length, target_prompts="all", decoder_only_format=not apart)
    verdicts = Labels(targets, turns_of(found), EOS).verdicts()
    keep = [talk for talk, verdict in zip(found, verdicts, strict=True) if verdict == USABLE]
    assert keep == [talk for talk in found if all(chain(*talk))]
    sides = [[*chain(*talk)] for talk in keep]
    rows = list[tuple[list[int], list[int]]]()
    for *before, target in sides:
        context = [*chain(*before)]
        ends = [EOS] if apart and len(context) > length else []
        stored = context[: length - len(ends)] + ends
        rows.append((stored, target[: length if apart else max(length - len(stored), 1)]))
    labels = Labels(targets, turns_of(keep), EOS)
    made = lay_out_pairs(labels, lettered, range(len(keep)))
    halves = (lists(made.columns[name]) for name in ("input_ids", "labels"))
    assert [*zip(*halves, strict=True)] == rows
    assert made.columns["labels"].values.dtype == lettered.dtype
    assert made.lengths.tolist() == [len(context + target) for context, target in rows]
    assert made.totals.largest_id == max((max(c + t) for c, t in rows), default=-1)
    lost = sum(len(side) for of in sides for side in of) - made.lengths.sum()
    assert made.totals.lost_tokens == lost
    assert made.totals.loss_tokens == labels.losses().sum()
    if apart:
        lasts = [(len(target), target[-1] != EOS) for *_, target in sides]
        assert labels.losses().tolist() == [min(n + ends, length) for n, ends in lasts]
        assert labels.cut().sum() == lost


LONGEST = 10
Sizes = list[tuple[int, int]]
"Of each turn, the letters of its question and its answer."
SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)
RULES = st.sampled_from(["cut", "filter", "first_turns"])


def encoded(tokenizer: Tokenizer, said: list[Sizes], end: str = "", **policy: Any) -> Encoded:
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{{{{ '{end}' if m.role == 'assistant' }}}}{{% endfor %}}"
    policy = {"target_responses": "all", "special_tokens_in_text": "allow"} | policy
    encoder = chats(tokenizer, template, {}, max_seq_len=LONGEST, **policy)
    letters = [["a" * n for turn in sizes for n in turn] for sizes in said]
    return encoder.encode([Conversation(in_turn(*texts)) for texts in letters])


@settings(max_examples=30, deadline=None)
@given(st.lists(SIZES, max_size=5), RULES, st.sampled_from(["last", "all"]), st.booleans())
def test_what_is_too_long_is_cut_dropped_or_kept_in_part(
    lettered: Tokenizer, said: list[Sizes], rule: str, responses: str, ends: bool
) -> None:
    """`ends`: the template ends each answer in EOS; else the loader appends one to a row, which
    `filter` and `first_turns` keep.
    """
    found = encoded(lettered, said, "</s>" * ends, too_long=rule, target_responses=responses)
    targets = Targets(max_seq_len=LONGEST, target_responses=responses)
    talks = [[([WORD] * q, [WORD] * a + [EOS] * ends) for q, a in sizes] for sizes in said]

    def whole(talk: Talk) -> Talk:
        """The turns that end within a row."""
        reach = accumulate(len(prompt + response) for prompt, response in talk)
        return [turn for turn, end in zip(talk, reach, strict=True) if end + 1 - ends <= LONGEST]

    rows = {
        "cut": [talk for talk in talks if any(by_token(talk, targets, None)[1][:LONGEST])],
        "filter": [talk for talk in talks if whole(talk) == talk],
        "first_turns": [kept for kept in map(whole, talks) if kept],
    }[rule]
    stored = [orjson.loads(blob.tobytes()) for blob in found.columns["turns"]]
    assert [[[*map(len, turn.values())] for turn in row] for row in stored] == [[[*map(len, turn)] for turn in row] for row in rows]  # fmt: skip
    losses = [sum(by_token(row, targets, EOS)[1][1:LONGEST]) for row in rows]
    assert found.totals.loss_tokens == sum(losses)
    reasons = set(found.rejected.values())
    assert reasons <= {"no_loss_tokens" if rule == "cut" else "too_long"} <= FILTERED.keys()
    lost = [talk[len(kept) :] for talk in talks if (kept := whole(talk))]
    letters = sum(len(prompt + response) for talk in lost for prompt, response in talk)
    assert found.totals.lost_tokens == (letters if rule == "first_turns" else 0)


def test_a_row_that_is_full_without_the_eos_of_the_loader_is_too_long(lettered: Tokenizer) -> None:
    for rule, (size, written) in product(("filter", "first_turns"), ((8, 1), (9, 0))):
        assert len(encoded(lettered, [[(1, size)]], too_long=rule).lengths) == written
    for rule, written in (("cut", 2), ("filter", 1)):
        encoder = opened(Pairs, lettered, max_seq_len=LONGEST, too_long=rule)
        assert len(encoder.encode([Pair("a", "b" * n) for n in (1, 99)]).lengths) == written


def pictured() -> Any:
    images = {"id": IMAGE, "token": "<image>", "processor": "b1"}
    return ConversationsWithImages(Encoding(**USUAL, columns={}, images=images))


def seen(*images: int) -> RichConversation:
    """A question with so many images and its answer, for each number."""
    messages = list[dict[str, Any]]()
    for count in images:
        parts = [{"type": "image"}] * count + [{"type": "text", "text": "Which?"}]
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": "This."}]
    return RichConversation(messages, None, None, ["a.jpg"] * sum(images))


def test_more_and_fewer_than_images_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several rows has the images before its answer, and where one of them is wrong, none
    is left.
    """
    nothing: Any = None
    renderer: Any = ImageTurnRenderer(pictured().encoding, nothing, nothing)
    image = "<image>"
    renderer.chat = SimpleNamespace(for_tools=lambda tools: None)
    monkeypatch.setattr(forms, "fit_images", lambda chat, token, said: said)

    def rows(said: RichConversation, *texts: str) -> Any:
        """Where the template prints these texts, each a row of one turn."""
        found = [[(text, "This.")] for text in texts]
        monkeypatch.setattr(TurnRenderer, "rows_of", lambda *_: found)
        return renderer.rows_of(said, Counter())

    assert rows(seen(2), image * 2) == [[(image * 2, "This.")]]
    for printed in (0, 1, 3):
        with pytest.raises(RecordRefused, match="image_placeholders") as bad:
            rows(seen(2), image * printed)
        assert bad.value.why.detail == {"images": 2, "placeholders": printed}
    assert len(rows(seen(1, 2), image, image * 3)) == 2
    assert len(rows(seen(1, 2), image * 3)) == 1, "all turns, or the last one"
    for wrong in ((image, image * 2), (image * 2, image * 3), (image * 2,)):
        with pytest.raises(RecordRefused, match="image_placeholders"):
            rows(seen(1, 2), *wrong)


def test_a_row_is_as_long_as_its_images_make_it_and_none_is_cut() -> None:
    """The third row ends early and holds the first of its images alone; what is too long without an
    image is cut as any.
    """
    turns = turns_of([[([IMAGE, 1, IMAGE], [2])], [([3] * 9, [4])], [([IMAGE], [5, 5])]])
    images = [[SimpleNamespace(tokens=n) for n in of] for of in ([4, 3], [], [6, 100])]
    lengths = pictured().expanded_lengths(
        turns, TurnRows(turns, [0, 1, 2], {}, set(), images=images)
    )
    assert lengths.tolist() == [4 + 1 + 3, 1, 9, 1, 6, 2]
    several = turns_of([[([3], [4]), ([IMAGE, IMAGE], [IMAGE])], [([5], [])]])
    assert (turns.count(IMAGE).tolist(), several.count(IMAGE).tolist()) == ([2, 0, 1], [3, 0])
    for longest, keep in ((9, [True] * 3), (8, [False, True, True]), (7, [False, True, False])):
        targets = Targets(max_seq_len=longest, target_prompts="all")
        verdicts = Labels(targets, turns, None, IMAGE).verdicts(lengths).tolist()
        assert verdicts == [USABLE if kept else "images_too_long" for kept in keep]
