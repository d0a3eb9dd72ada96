"""No boundary of a row lies inside a control token: a row's tokens are those of the whole text,
whatever template, kind and policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.encode.control_words import ControlWords
from mdsmix.record import Conversation
from mdsmix.tokenizer.card import Tokenizer
from tests.converting import Web, chats, quarantined, samples
from tests.pictures import TOKEN, drawing
from tests.styles import GLM_4_7, in_turn, with_tokens
from tests.styles import chats as encoder_of

WORDS = ["<think>", "</think>", "<|a|>", "<|ab|>", "[/I]", "\n\n", "  ", "x"]
TEXTS = st.text(st.sampled_from("</think>|ab[I]x\n "), max_size=14)
ROLES = ["<|user|>", "<|assistant|>", "<|system|>"]
# As GLM-4.7's, with other signs: none of them begins as a tag does.
OTHER_SIGNS = GLM_4_7.replace("</think>", "◁/think▷").replace("<think>", "◁think▷")
SIGNS = {GLM_4_7: ["<think>", "</think>"], OTHER_SIGNS: ["◁think▷", "◁/think▷"]}


@given(TEXTS, TEXTS)
def test_the_first_word_across_a_boundary_is_found(left: str, right: str) -> None:
    """As a search of the whole text finds it; runs of white space and single letters are no control
    words.
    """
    whole, words = left + right, WORDS[:5]
    places = [
        place
        for place in range(len(left))
        if any(whole.startswith(w, place) and place + len(w) > len(left) for w in words)
    ]
    assert ControlWords(WORDS).start_of_split(left, right) == min([*places, len(left)])


TALKS = [
    in_turn("Why?", "So."),
    in_turn("Why?", "<think>hm</think>So.", "And?", "Now."),
    in_turn("Why?", "So.", "And?", "<think>hm</think>Now.", "Go.", "<b>Gone.</b>"),
]


def ids_of(sample: Any) -> tuple[list[int], list[int]]:
    """The prompt and the answer of a row of one turn, in any layout."""
    if "turns" in sample:
        [turn] = sample["turns"]
        return turn["input_ids"], turn["labels"]
    if "chosen" in sample:
        prompt, answer = (
            np.frombuffer(sample[key], "<i8").tolist() for key in ("prompt", "chosen")
        )
        return prompt, answer[:-1]  # without EOS
    return sample["input_ids"].tolist(), sample["labels"].tolist()


@pytest.mark.parametrize("source", SIGNS)
def test_a_row_has_the_tokens_of_the_whole_text(
    source: str, web: Web, tokenizer_folder: Path
) -> None:
    """And its answer begins with a token, by transformers: conversations, compact ones, preferences
    and images.
    """
    from transformers import AutoTokenizer

    thinks = SIGNS[source]
    folder = with_tokens(tokenizer_folder, web.folder / "t", source, [*ROLES, TOKEN], thinks)
    web.tokenizer = folder
    known, ends = AutoTokenizer.from_pretrained(folder), thinks[1]
    begin = known.convert_tokens_to_ids(ends)
    talks = [
        [
            m | {"content": m["content"].replace("<think>", thinks[0]).replace("</think>", ends)}
            for m in each
        ]
        for each in TALKS
    ]
    (web.folder / "i.png").write_bytes(drawing("PNG", (8, 8)))
    both = [
        {"chosen": each, "rejected": [*each[:-1], {"role": "assistant", "content": "No."}]}
        for each in talks
    ]
    like = {"kind": "preference", "source": {"path": "b.jsonl", "shape": "preference"}}
    loader = {"train_loader": {"name": "pairwise_preference"}}
    plain, last = {"target_responses": "all"}, {"rewritten_history": "last"}
    seen = chats("a.jsonl", **last, images={"token": TOKEN})
    tried = 0
    for stream, settings in (
        (chats("a.jsonl", rewritten_history="each"), plain),
        *((chats("a.jsonl", **last, **columns), {}) for columns in ({}, {"columns": "compact"})),
        (like, loader),
        (seen, {}),
    ):
        web.holds([{"messages": each, "images": []} for each in talks], "a.jsonl")
        web.holds(both, "b.jsonl")
        web.says(stream, max_seq_len=256, **settings).runs(reencode=True)
        texts = [
            known.apply_chat_template(each[: end + 1], tokenize=False)
            for each in talks
            for end in (range(1, len(each), 2) if "each" in stream.values() else [len(each) - 1])
        ]
        rows = [ids_of(sample) for sample in samples(web.train)]
        if "each" not in stream.values():
            assert len(rows) == len(talks)
        for (prompt, answer), text in zip(rows, texts, strict=True):
            assert [*prompt, *answer] == known(text, add_special_tokens=False).input_ids
            assert answer[0] == begin or known.decode(prompt).endswith(thinks[0])
            tried += answer[0] == begin
    assert tried > 8


THOUGHT, PLAIN = "<think>hm</think>r", "c"
OPENED = [
    [THOUGHT, PLAIN],
    [PLAIN, THOUGHT],
    ["<think>\nso\n</think>\nc d", "c e"],
    ["c", "<think></think>c"],
]
BOTH_ALIKE = [[THOUGHT, "<think>so</think>d"], [PLAIN, "d"]]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=["thinks", "not"])
@pytest.mark.parametrize("are_tokens", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("source", SIGNS)
def test_a_preference_of_which_one_answer_thinks_has_the_tokens_of_both_texts(
    source: str, are_tokens: bool, kwargs: Any, web: Web, tokenizer_folder: Path
) -> None:
    """Each side by transformers, after one question and after an earlier answer with reasoning. The
    prompt is all that the template prints before any answer."""
    from transformers import AutoTokenizer

    opens, ends = SIGNS[source]
    ordinary = SIGNS[source] if are_tokens else []
    folder = with_tokens(tokenizer_folder, web.folder / "t", source, ROLES, ordinary)
    web.tokenizer = folder
    known = AutoTokenizer.from_pretrained(folder)
    pasts = [in_turn("Why?"), in_turn("Why?", THOUGHT, "And?"), in_turn("Why?", PLAIN, "And?")]
    answers = OPENED if kwargs else [*OPENED, *BOTH_ALIKE]
    talks = [
        [
            [
                m | {"content": m["content"].replace("<think>", opens).replace("</think>", ends)}
                for m in [*past, {"role": "assistant", "content": answer}]
            ]
            for answer in sides
        ]
        for past in pasts
        for sides in answers
    ]
    records = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in talks]
    web.holds([each | {"chat_template_kwargs": kwargs} for each in records], "b.jsonl")
    like = {"kind": "preference", "source": {"path": "b.jsonl", "shape": "preference"}}
    web.says(like, max_seq_len=256, train_loader={"name": "pairwise_preference"}).runs()

    def ids(text: str) -> list[int]:
        found: list[int] = known(text, add_special_tokens=False).input_ids
        return found

    rows = samples(web.train)
    assert len(rows) == len(talks)
    for row, sides in zip(rows, talks, strict=True):
        prompt, *stored = (
            np.frombuffer(row[key], "<i8").tolist() for key in ("prompt", "chosen", "rejected")
        )
        texts = [known.apply_chat_template(each, tokenize=False, **kwargs) for each in sides]
        if are_tokens:
            assert [[*prompt, *each[:-1]] for each in stored] == [*map(ids, texts)]
        assert [known.decode([*prompt, *each[:-1]]) for each in stored] == texts
        before = known.apply_chat_template(sides[0][:-1], tokenize=False) + "<|assistant|>"
        begins = [text.removeprefix(before).startswith(opens) for text in texts]
        shown = known.decode(prompt)
        assert shown == before if are_tokens and len({*begins}) > 1 else shown.startswith(before)


def test_prompts_that_part_in_the_history_are_shown(web: Web, tokenizer_folder: Path) -> None:
    """Also if the answers differ in their reasoning."""
    folder = with_tokens(tokenizer_folder, web.folder / "t", GLM_4_7, ROLES, SIGNS[GLM_4_7])
    web.tokenizer = folder
    first, second = in_turn("Which?", THOUGHT), in_turn("What?", PLAIN)
    others = [second, in_turn("Which?", PLAIN)]
    web.holds([{"chosen": first, "rejected": other} for other in others])
    like = {"kind": "preference", "source": {"path": "a.jsonl", "shape": "preference"}}
    web.says(like, max_seq_len=256, train_loader={"name": "pairwise_preference"}, max_bad=0.9).run()
    [bad] = quarantined(web.train)
    assert (bad["reason"], bad["detail"]) == (
        "prompts_differ",
        {
            "before_chosen": "<|user|>Which?<|assistant|><think>",
            "before_rejected": "<|user|>What?<|assistant|>",
        },
    )


def test_a_prompt_that_inference_ends_inside_a_token_is_refused(
    web: Web, tokenizer_folder: Path
) -> None:
    """Its place cannot be moved, since inference sees it there; an answer that goes on otherwise is
    a row.
    """
    source = "{% for m in messages %}<|{{ m.role }}|>{{ '<' if m.role == 'assistant' }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|><{% endif %}"
    web.tokenizer = with_tokens(tokenizer_folder, web.folder / "t", source, ROLES, ["</think>"])
    web.holds([{"messages": in_turn("Why?", "/think>So.")}, {"messages": in_turn("Why?", "b>So.")}])
    web.says(chats("a.jsonl"), max_seq_len=64).run()
    assert len(samples(web.train)) == 1
    [bad] = quarantined(web.train)
    assert bad["reason"] == "split_token"
    assert bad["detail"]["before"].endswith("<|assistant|><")
    assert bad["detail"]["behind"] == "/think>So."


def test_every_boundary_of_a_row_is_looked_at(lettered: Tokenizer) -> None:
    """The end of an answer too, before the next question."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    encoder = encoder_of(lettered, source, special_tokens_in_text="allow")
    given = [
        Conversation(in_turn("a", "b<|im_", "end|>", "d")),
        Conversation(in_turn("a", "b", "c", "d")),
    ]
    found = encoder.encode(given)
    assert (dict(found.rejected), found.positions.tolist()) == ({0: "split_token"}, [1])
