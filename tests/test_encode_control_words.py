"""No boundary of a row is inside a control token: a row's tokens are those of the whole text, for
any template, kind and policy.
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
from tests.converting import Project, chats, read_quarantined, read_samples
from tests.pictures import TOKEN, drawing
from tests.styles import GLM_4_7, add_tokens, make_dialogue
from tests.styles import open_chats as encoder_of

WORDS = ["<think>", "</think>", "<|a|>", "<|ab|>", "[/I]", "\n\n", "  ", "x"]
TEXTS = st.text(st.sampled_from("</think>|ab[I]x\n "), max_size=14)
ROLES = ["<|user|>", "<|assistant|>", "<|system|>"]
# As GLM-4.7's, with other signs: none of them begins as a tag does.
OTHER_SIGNS = GLM_4_7.replace("</think>", "◁/think▷").replace("<think>", "◁think▷")
SIGNS = {GLM_4_7: ["<think>", "</think>"], OTHER_SIGNS: ["◁think▷", "◁/think▷"]}


@given(TEXTS, TEXTS)
def test_the_first_split_word_is_found(left: str, right: str) -> None:
    """Compared with a search of the whole text. Runs of white space and single letters are not
    control words.
    """
    whole, words = left + right, WORDS[:5]
    places = [
        start
        for start in range(len(left))
        if any(whole.startswith(w, start) and start + len(w) > len(left) for w in words)
    ]
    control_words = ControlWords(WORDS)
    assert control_words.start_of_split(left, right) == min([*places, len(left)])
    assert control_words.are_split(["", left, right]) == bool(places)
    assert control_words.may_begin_in(left) or not places


TALKS = [
    make_dialogue("Why?", "So."),
    make_dialogue("Why?", "<think>hm</think>So.", "And?", "Now."),
    make_dialogue("Why?", "So.", "And?", "<think>hm</think>Now.", "Go.", "<b>Gone.</b>"),
]


def prompt_and_answer(sample: Any) -> tuple[list[int], list[int]]:
    """Return the ids of prompt and answer of a row with one turn, in any layout."""
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
    source: str, project: Project, tokenizer_folder: Path
) -> None:
    """As tokenized by transformers, and its answer begins with a token: conversations, compact
    ones, preferences and images.
    """
    from transformers import AutoTokenizer

    thinks = SIGNS[source]
    folder = add_tokens(tokenizer_folder, project.folder / "t", source, [*ROLES, TOKEN], thinks)
    project.tokenizer = folder
    tokenizer, ends = AutoTokenizer.from_pretrained(folder), thinks[1]
    begin = tokenizer.convert_tokens_to_ids(ends)
    talks = [
        [
            m | {"content": m["content"].replace("<think>", thinks[0]).replace("</think>", ends)}
            for m in talk
        ]
        for talk in TALKS
    ]
    (project.folder / "i.png").write_bytes(drawing("PNG", (8, 8)))
    both = [
        {"chosen": talk, "rejected": [*talk[:-1], {"role": "assistant", "content": "No."}]}
        for talk in talks
    ]
    like = {"kind": "preference", "source": {"path": "b.jsonl", "shape": "preference"}}
    loader = {"train_loader": {"name": "pairwise_preference"}}
    plain, last = {"target_responses": "all"}, {"rewritten_history": "last"}
    with_images = chats("a.jsonl", **last, images={"token": TOKEN})
    tried = 0
    for stream, settings in (
        (chats("a.jsonl", rewritten_history="each"), plain),
        *((chats("a.jsonl", **last, **columns), {}) for columns in ({}, {"columns": "compact"})),
        (like, loader),
        (with_images, {}),
    ):
        project.write_source([{"messages": talk, "images": []} for talk in talks], "a.jsonl")
        project.write_source(both, "b.jsonl")
        project.configure(stream, max_seq_len=256, **settings).run_all(reencode=True)
        texts = [
            tokenizer.apply_chat_template(talk[: end + 1], tokenize=False)
            for talk in talks
            for end in (range(1, len(talk), 2) if "each" in stream.values() else [len(talk) - 1])
        ]
        rows = [prompt_and_answer(sample) for sample in read_samples(project.train)]
        if "each" not in stream.values():
            assert len(rows) == len(talks)
        for (prompt, answer), text in zip(rows, texts, strict=True):
            assert [*prompt, *answer] == tokenizer(text, add_special_tokens=False).input_ids
            assert answer[0] == begin or tokenizer.decode(prompt).endswith(thinks[0])
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
def test_a_preference_with_reasoning_in_one_answer_has_the_tokens_of_both_texts(
    source: str, are_tokens: bool, kwargs: Any, project: Project, tokenizer_folder: Path
) -> None:
    """As tokenized by transformers, after one question and after an earlier answer with reasoning.
    The prompt is all text that the template prints before any answer.
    """
    from transformers import AutoTokenizer

    opens, ends = SIGNS[source]
    ordinary = SIGNS[source] if are_tokens else []
    folder = add_tokens(tokenizer_folder, project.folder / "t", source, ROLES, ordinary)
    project.tokenizer = folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pasts = [
        make_dialogue("Why?"),
        make_dialogue("Why?", THOUGHT, "And?"),
        make_dialogue("Why?", PLAIN, "And?"),
    ]
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
    project.write_source([each | {"chat_template_kwargs": kwargs} for each in records], "b.jsonl")
    like = {"kind": "preference", "source": {"path": "b.jsonl", "shape": "preference"}}
    project.configure(like, max_seq_len=256, train_loader={"name": "pairwise_preference"}).run_all()

    def ids(text: str) -> list[int]:
        input_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return input_ids

    rows = read_samples(project.train)
    assert len(rows) == len(talks)
    for row, sides in zip(rows, talks, strict=True):
        prompt, *stored = (
            np.frombuffer(row[key], "<i8").tolist() for key in ("prompt", "chosen", "rejected")
        )
        texts = [tokenizer.apply_chat_template(each, tokenize=False, **kwargs) for each in sides]
        if are_tokens:
            assert [[*prompt, *each[:-1]] for each in stored] == [*map(ids, texts)]
        assert [tokenizer.decode([*prompt, *each[:-1]]) for each in stored] == texts
        before = tokenizer.apply_chat_template(sides[0][:-1], tokenize=False) + "<|assistant|>"
        begins = [text.removeprefix(before).startswith(opens) for text in texts]
        shown = tokenizer.decode(prompt)
        assert shown == before if are_tokens and len({*begins}) > 1 else shown.startswith(before)


def test_prompts_that_differ_in_the_history_are_shown(
    project: Project, tokenizer_folder: Path
) -> None:
    """Also if the answers differ in their reasoning."""
    folder = add_tokens(tokenizer_folder, project.folder / "t", GLM_4_7, ROLES, SIGNS[GLM_4_7])
    project.tokenizer = folder
    first, second = make_dialogue("Which?", THOUGHT), make_dialogue("What?", PLAIN)
    others = [second, make_dialogue("Which?", PLAIN)]
    project.write_source([{"chosen": first, "rejected": other} for other in others])
    like = {"kind": "preference", "source": {"path": "a.jsonl", "shape": "preference"}}
    project.configure(
        like, max_seq_len=256, train_loader={"name": "pairwise_preference"}, max_bad=0.9
    ).run()
    [bad] = read_quarantined(project.train)
    assert (bad["reason"], bad["detail"]) == (
        "prompts_differ",
        {
            "before_chosen": "<|user|>Which?<|assistant|><think>",
            "before_rejected": "<|user|>What?<|assistant|>",
        },
    )


def test_a_prompt_that_inference_ends_inside_a_token_is_refused(
    project: Project, tokenizer_folder: Path
) -> None:
    """The boundary cannot be moved, since inference has it there. An answer that does not complete
    the token is a row.
    """
    source = "{% for m in messages %}<|{{ m.role }}|>{{ '<' if m.role == 'assistant' }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|><{% endif %}"
    project.tokenizer = add_tokens(
        tokenizer_folder, project.folder / "t", source, ROLES, ["</think>"]
    )
    project.write_source(
        [
            {"messages": make_dialogue("Why?", "/think>So.")},
            {"messages": make_dialogue("Why?", "b>So.")},
        ]
    )
    project.configure(chats("a.jsonl"), max_seq_len=64).run()
    assert len(read_samples(project.train)) == 1
    [bad] = read_quarantined(project.train)
    assert bad["reason"] == "split_token"
    assert bad["detail"]["before"].endswith("<|assistant|><")
    assert bad["detail"]["behind"] == "/think>So."


def test_every_boundary_of_a_row_is_checked(lettered: Tokenizer) -> None:
    """Also the end of an answer, before the next question."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    encoder = encoder_of(lettered, source, special_tokens_in_text="allow")
    conversations = [
        Conversation(make_dialogue("a", "b<|im_", "end|>", "d")),
        Conversation(make_dialogue("a", "b", "c", "d")),
    ]
    encoded = encoder.encode(conversations)
    assert (dict(encoded.rejected), encoded.positions.tolist()) == ({0: "split_token"}, [1])
