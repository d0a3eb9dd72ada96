"""Which tokens are trained, which are stored, and what happens to long samples, compared with the
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

from mdsmix.encode.encoded import Encoded, lay_out_documents, lay_out_pairs
from mdsmix.encode.labels import USABLE, Labels, Targets, Turns
from mdsmix.kinds import pictured
from mdsmix.kinds.finetuning import Pairs
from mdsmix.kinds.pictured import ConversationsWithImages, ImageTurnRenderer
from mdsmix.kinds.turn_renderer import TurnRenderer
from mdsmix.kinds.turn_rows import TurnRows
from mdsmix.ragged import Ragged
from mdsmix.record import FILTERED, Conversation, Pair, RecordRefused, RichConversation
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer
from tests.styles import EOS, USUAL_SETTINGS, make_dialogue, open_chats, open_kind, to_lists

IMAGE, WORD = 9, 40
Talk = list[tuple[list[int], list[int]]]
"Prompts and responses."
POLICIES = [(p, r) for p in ("none", "all", "length>=3") for r in ("last", "all")]


def make_turns(talks: list[Talk]) -> Turns:
    sides = [side for talk in talks for turn in talk for side in turn]
    return Turns(
        Ragged.from_rows(sides, np.int64), np.array([len(talk) for talk in talks], np.int64)
    )


def stitch(talk: Talk, targets: Targets, eos: int | None) -> tuple[list[int], list[bool]]:
    """Return the ids of one conversation, and whether each is trained, as LLM-Foundry's collator
    does. Images are never trained.
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
def test_documents_equal_the_collators_samples(
    lettered: Tokenizer, drawn: list[Talk], policies: tuple[str, str], length: int, has_eos: bool
) -> None:
    prompts, responses = policies
    targets = Targets(max_seq_len=length, target_prompts=prompts, target_responses=responses)
    tokenizer = lettered if has_eos else replace(lettered, eos_id=None)
    uncut = Labels(targets, make_turns(drawn), tokenizer.eos_id, IMAGE)
    keep = list[Talk]()
    for talk, verdict in zip(drawn, uncut.judge(), strict=True):
        _, trained = stitch(talk, targets, None)
        expected = "" if any(trained[:length]) else "no_loss_tokens"
        expected = expected if all(response for _, response in talk) else "empty_response"
        assert verdict == (expected if all(prompt for prompt, _ in talk) else "empty_prompt")
        keep += [talk] * (verdict == USABLE)

    labels = Labels(targets, make_turns(keep), tokenizer.eos_id, IMAGE)
    stitched = [stitch(talk, targets, tokenizer.eos_id) for talk in keep]
    rows = [(ids[:length], [0, *map(int, trained[1:length])]) for ids, trained in stitched]
    encoded = lay_out_documents(labels, tokenizer, range(len(keep)))
    ids, mask = encoded.columns["input_ids"], encoded.columns["loss_mask"]
    assert [*zip(to_lists(ids), to_lists(mask), strict=True)] == rows
    assert ids.values.dtype == np.dtype(tokenizer.dtype)
    assert encoded.lengths.tolist() == [len(row) for row, _ in rows]
    assert encoded.totals.tokens == sum(len(row) for row, _ in rows)
    assert labels.count_losses().tolist() == [sum(flags) for _, flags in rows]
    assert encoded.totals.loss_tokens == labels.count_losses().sum()
    beyond = [sum(len(p) + len(r) for p, r in talk) - length for talk in keep]
    assert labels.count_cut().tolist() == [max(0, n) for n in beyond]
    assert encoded.totals.lost_tokens == labels.count_cut().sum()


@settings(max_examples=100, deadline=None)
@given(talks, st.integers(2, 12), st.booleans())
@example([[([5, 6, 7], [8])]], 3, True)  # a context that just fits is not cut
def test_pairs_are_cut_to_a_row(
    lettered: Tokenizer, drawn: list[Talk], length: int, apart: bool
) -> None:
    """But one token of a target is always kept, which the collator reads. An encoder-decoder's
    context and target are cut separately, and a context that is cut ends in EOS.
    """
    targets = Targets(max_seq_len=length, target_prompts="all", decoder_only_format=not apart)
    verdicts = Labels(targets, make_turns(drawn), EOS).judge()
    keep = [talk for talk, verdict in zip(drawn, verdicts, strict=True) if verdict == USABLE]
    assert keep == [talk for talk in drawn if all(chain(*talk))]
    sides = [[*chain(*talk)] for talk in keep]
    rows = list[tuple[list[int], list[int]]]()
    for *before, target in sides:
        context = [*chain(*before)]
        ends = [EOS] if apart and len(context) > length else []
        stored = context[: length - len(ends)] + ends
        rows.append((stored, target[: length if apart else max(length - len(stored), 1)]))
    labels = Labels(targets, make_turns(keep), EOS)
    encoded = lay_out_pairs(labels, lettered, range(len(keep)))
    halves = (to_lists(encoded.columns[name]) for name in ("input_ids", "labels"))
    assert [*zip(*halves, strict=True)] == rows
    assert encoded.columns["labels"].values.dtype == lettered.dtype
    assert encoded.lengths.tolist() == [len(context + target) for context, target in rows]
    assert encoded.totals.largest_id == max((max(c + t) for c, t in rows), default=-1)
    lost = (
        sum(len(side) for sides_of_talk in sides for side in sides_of_talk) - encoded.lengths.sum()
    )
    assert encoded.totals.lost_tokens == lost
    over = [len(context + target) - length for context, target in rows if not apart]
    stored_beyond = [tokens for tokens in over if tokens > 0]
    assert encoded.totals.cut_rows == len(stored_beyond)
    assert encoded.totals.cut_tokens == sum(stored_beyond)
    assert encoded.totals.loss_tokens == labels.count_losses().sum()
    if apart:
        lasts = [(len(target), target[-1] != EOS) for *_, target in sides]
        assert labels.count_losses().tolist() == [min(n + ends, length) for n, ends in lasts]
        assert labels.count_cut().sum() == lost


LONGEST = 10
Sizes = list[tuple[int, int]]
"Of each turn, the letters of its question and its answer."
SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)
RULES = st.sampled_from(["cut", "filter", "first_turns"])


def encode_sizes(
    tokenizer: Tokenizer, conversations: list[Sizes], end: str = "", **policy: Any
) -> Encoded:
    """Encode conversations whose contents have these lengths."""
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{{{{ '{end}' if m.role == 'assistant' }}}}{{% endfor %}}"
    policy = {"target_responses": "all", "special_tokens_in_text": "allow"} | policy
    encoder = open_chats(tokenizer, template, {}, max_seq_len=LONGEST, **policy)
    letters = [["a" * n for turn in sizes for n in turn] for sizes in conversations]
    return encoder.encode([Conversation(make_dialogue(*texts)) for texts in letters])


@settings(max_examples=30, deadline=None)
@given(st.lists(SIZES, max_size=5), RULES, st.sampled_from(["last", "all"]), st.booleans())
def test_long_samples_are_cut_dropped_or_keep_their_first_turns(
    lettered: Tokenizer, conversations: list[Sizes], rule: str, responses: str, ends: bool
) -> None:
    """`ends`: the template ends each answer in EOS; otherwise the loader appends one to a row, for
    which `filter` and `first_turns` leave room.
    """
    encoded = encode_sizes(
        lettered, conversations, "</s>" * ends, too_long=rule, target_responses=responses
    )
    targets = Targets(max_seq_len=LONGEST, target_responses=responses)
    talks = [[([WORD] * q, [WORD] * a + [EOS] * ends) for q, a in sizes] for sizes in conversations]

    def keep_fitting(talk: Talk) -> Talk:
        """Return the turns that end within a row."""
        reach = accumulate(len(prompt + response) for prompt, response in talk)
        return [turn for turn, end in zip(talk, reach, strict=True) if end + 1 - ends <= LONGEST]

    rows = {
        "cut": [talk for talk in talks if any(stitch(talk, targets, None)[1][:LONGEST])],
        "filter": [talk for talk in talks if keep_fitting(talk) == talk],
        "first_turns": [fitting for fitting in map(keep_fitting, talks) if fitting],
    }[rule]
    stored = [orjson.loads(blob.tobytes()) for blob in encoded.columns["turns"]]
    assert [[[*map(len, turn.values())] for turn in row] for row in stored] == [
        [[*map(len, turn)] for turn in row] for row in rows
    ]
    losses = [sum(stitch(row, targets, EOS)[1][1:LONGEST]) for row in rows]
    assert encoded.totals.loss_tokens == sum(losses)
    reasons = set(encoded.rejected.values())
    assert reasons <= {"no_loss_tokens" if rule == "cut" else "too_long"} <= FILTERED.keys()
    lost = [talk[len(fitting) :] for talk in talks if (fitting := keep_fitting(talk))]
    letters = sum(len(prompt + response) for talk in lost for prompt, response in talk)
    assert encoded.totals.lost_tokens == (letters if rule == "first_turns" else 0)


def test_a_row_without_room_for_the_loaders_eos_is_too_long(lettered: Tokenizer) -> None:
    for rule, (size, written) in product(("filter", "first_turns"), ((8, 1), (9, 0))):
        assert len(encode_sizes(lettered, [[(1, size)]], too_long=rule).lengths) == written
    for rule, written in (("cut", 2), ("filter", 1)):
        encoder = open_kind(Pairs, lettered, max_seq_len=LONGEST, too_long=rule)
        assert len(encoder.encode([Pair("a", "b" * n) for n in (1, 99)]).lengths) == written


def open_images() -> Any:
    images = {"id": IMAGE, "token": "<image>", "processor": "b1"}
    return ConversationsWithImages(Encoding(**USUAL_SETTINGS, columns={}, images=images))


def ask_about_images(*images: int) -> RichConversation:
    """Return a question with so many images and its answer, for each number."""
    messages = list[dict[str, Any]]()
    for count in images:
        parts = [{"type": "image"}] * count + [{"type": "text", "text": "Which?"}]
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": "This."}]
    return RichConversation(messages, None, None, ["a.jpg"] * sum(images))


def test_more_or_fewer_image_tokens_than_images_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several rows has the images before its answer. If one of them is wrong, no row is
    kept.
    """
    nothing: Any = None
    renderer: Any = ImageTurnRenderer(open_images().encoding, nothing, nothing)
    image = "<image>"
    renderer.chat = SimpleNamespace(for_tools=lambda tools: None)
    monkeypatch.setattr(pictured, "fit_images", lambda chat, token, conversation: conversation)

    def rows(conversation: RichConversation, *texts: str) -> Any:
        """Return the rows if the template prints these texts, each a row of one turn."""
        printed_rows = [[(text, "This.")] for text in texts]
        monkeypatch.setattr(TurnRenderer, "rows_of", lambda *_: printed_rows)
        return renderer.rows_of(conversation, Counter())

    assert rows(ask_about_images(2), image * 2) == [[(image * 2, "This.")]]
    for printed in (0, 1, 3):
        with pytest.raises(RecordRefused, match="image_placeholders") as bad:
            rows(ask_about_images(2), image * printed)
        assert bad.value.why.detail == {"images": 2, "placeholders": printed}
    assert len(rows(ask_about_images(1, 2), image, image * 3)) == 2
    assert len(rows(ask_about_images(1, 2), image * 3)) == 1, "all turns, or the last one"
    for wrong in ((image, image * 2), (image * 2, image * 3), (image * 2,)):
        with pytest.raises(RecordRefused, match="image_placeholders"):
            rows(ask_about_images(1, 2), *wrong)


def test_the_length_of_a_row_counts_its_images_and_no_image_is_cut() -> None:
    """The third row ends early and contains only the first of its images. A long row without an
    image is cut as usual.
    """
    turns = make_turns([[([IMAGE, 1, IMAGE], [2])], [([3] * 9, [4])], [([IMAGE], [5, 5])]])
    images = [[SimpleNamespace(tokens=n) for n in of] for of in ([4, 3], [], [6, 100])]
    lengths = open_images().expanded_lengths(
        turns, TurnRows(turns, [0, 1, 2], {}, set(), images=images)
    )
    assert lengths.tolist() == [4 + 1 + 3, 1, 9, 1, 6, 2]
    several = make_turns([[([3], [4]), ([IMAGE, IMAGE], [IMAGE])], [([5], [])]])
    assert (turns.count(IMAGE).tolist(), several.count(IMAGE).tolist()) == ([2, 0, 1], [3, 0])
    for longest, keep in ((9, [True] * 3), (8, [False, True, True]), (7, [False, True, False])):
        targets = Targets(max_seq_len=longest, target_prompts="all")
        verdicts = Labels(targets, turns, None, IMAGE).judge(lengths).tolist()
        assert verdicts == [USABLE if kept else "images_too_long" for kept in keep]
