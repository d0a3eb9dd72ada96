"""No boundary of a row lies inside a control token: a row's tokens are those of the whole text, whatever template, kind and policy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.encode.control_words import ControlWords
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.record import Conversation
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
    """As a search of the whole text finds it; runs of white space and single letters are no control words."""
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
    """And its answer begins with a token, by transformers: conversations, compact ones, preferences and images."""
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


def test_a_prompt_that_inference_ends_inside_a_token_is_refused(
    web: Web, tokenizer_folder: Path
) -> None:
    """Its place cannot be moved, since inference sees it there; an answer that goes on otherwise is a row."""
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
