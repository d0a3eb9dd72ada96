"""A conversation whose history a template rewrites: a row for an answer is what transformers renders up to it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdsmix.encode.chat import open_template, rendered_rows
from mdsmix.record import FILTERED, Conversation, RecordRefused
from tests import encoders
from tests.styles import (
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    NEMOTRON_3,
    PHI_3,
    QWEN_3_5_NOTHINK,
    REWRITING,
    TEMPLATES,
    letters,
)

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def chats(count: int) -> Iterator[list[dict[str, Any]]]:
    """Conversations of 1 to 4 answers, half of them with reasoning, half with a system prompt."""
    draw = random.Random(5)
    for number in range(count):
        messages = [{"role": "system", "content": f"be {number}"}] if draw.random() < 0.5 else []
        for turn in range(draw.randint(1, 4)):
            thought = f"<think>\nhm {turn}\n</think>\n\n" if draw.random() < 0.5 else ""
            messages += [
                {"role": "user", "content": f"question {turn}?"},
                {"role": "assistant", "content": f"{thought}answer {turn}"},
            ]
        yield messages


def theirs(source: str, messages: list[dict[str, Any]], asked: bool, **more: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {**VARIABLES, **more, "add_generation_prompt": asked}
    return render_jinja_template([messages], chat_template=source, **variables)[0][0]


@pytest.mark.parametrize("name", REWRITING)
def test_each_row_is_what_transformers_renders_at_its_answer(name: str) -> None:
    """And `last` is the last of them."""
    source, several = REWRITING[name], 0
    template = open_template(source, VARIABLES)
    for messages in chats(60):
        rows = rendered_rows(template, Conversation(messages), "each")
        assert rendered_rows(template, Conversation(messages), "last") == rows[-1:]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(rows) == 1 and len(answers) > 1:
            whole = "".join(prompt + answer for prompt, answer in rows[0])
            assert whole == theirs(source, messages, False)
            continue
        several += len(rows) > 1
        for [(prompt, answer)], i in zip(rows, answers, strict=True):
            assert prompt + answer == theirs(source, messages[: i + 1], False)
            inference = theirs(source, messages[:i], True)
            assert inference.startswith(prompt)
            assert inference[len(prompt) :] in ("", "<think>\n")
            assert answer.endswith(
                messages[i]["content"].split("</think>")[-1] + answer[-len(_end(answer)) :]
            )
    assert several > 10


def _end(answer: str) -> str:
    return next(
        end
        for end in ("<|im_end|>\n", "<|end|>\n</s>", "<|return|>", "</s>")
        if answer.endswith(end)
    )


DEEPSEEK_V3_1 = """{%- for m in messages -%}{%- if m['role'] == 'user' -%}<User>{{ m['content'] }}{%- else -%}<Assistant></think>{{ m['content'].split('</think>')[-1] }}</s>{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<Assistant><think>{%- endif -%}"""
"With `thinking: true`: an answer ends the reasoning which the generation prompt begins."


OPENED = {
    # template: what it prints before every answer, the rest of the generation prompt, and an answer as it prints it
    DEEPSEEK_V3: ("<Assistant>", "<think>\n", lambda said: f"{said}</s>"),
    DEEPSEEK_V3_1: (
        "<Assistant>",
        "<think>",
        lambda said: f"</think>{said.split('</think>')[-1]}</s>",
    ),
    NEMOTRON_3: (
        "<|im_start|>assistant\n",
        "<think>\n",
        lambda said: (
            f"{'' if '<think>' in said or '</think>' in said else '<think></think>'}{said}<|im_end|>\n"
        ),
    ),
    QWEN_3_5_NOTHINK: (
        "<|im_start|>assistant\n",
        "<think>\n\n</think>\n\n",
        lambda said: f"{_qwen(said)}<|im_end|>\n",
    ),
}


def _qwen(said: str) -> str:
    if "</think>" not in said:
        return said
    thought, said = said.split("</think>")[0].split("<think>")[-1], said.split("</think>")[-1]
    return "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + said.lstrip("\n")


@pytest.mark.parametrize("source", OPENED)
def test_an_answer_is_cut_where_every_answer_begins(source: str) -> None:
    """Whatever it begins with: a part of the generation prompt or all of it, followed by a letter, a newline, or a thought."""
    template = open_template(source, VARIABLES)
    head, opening, printed = OPENED[source]
    asked = {"role": "user", "content": "?"}
    inference = theirs(source, [asked], True)
    assert inference.endswith(head + opening)
    history, inside = inference.removesuffix(head + opening), 0
    whole = head + opening
    pieces = {whole[i:j] for i in range(len(whole)) for j in range(i, len(whole) + 1)}
    for piece in sorted(pieces):
        for rest in ("able>", "\nhm", "hm\n</think>\n\nso", ""):
            said = {"role": "assistant", "content": piece + rest}
            [[(prompt, answer)]] = rendered_rows(template, Conversation([asked, said]), "each")
            text = printed(piece + rest)
            inside += text.startswith(opening[0])
            if text.startswith(opening):  # inference sees all of it
                assert (prompt, answer) == (inference, text.removeprefix(opening))
            else:
                assert (prompt, answer) == (history + head, text)
    assert inside > 20


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_not_rewritten_stays_one_row_of_all_turns(name: str) -> None:
    template = open_template(TEMPLATES[name], VARIABLES, "2026-01-01")
    said = Conversation(
        [
            {"role": role, "content": f"{role} {i}"}
            for i, role in enumerate(["user", "assistant"] * 3)
        ]
    )
    for rule in ("last", "each"):
        assert rendered_rows(template, said, rule) == [template.turns(said)]


def test_an_answer_that_is_not_trained_gets_no_row() -> None:
    messages = next(m for m in chats(40) if len(m) == 8)
    template = open_template(PHI_3, VARIABLES)
    each = rendered_rows(template, Conversation(messages), "each")
    trained = [m["role"] != "assistant" or i != 3 for i, m in enumerate(messages)]
    some = rendered_rows(template, Conversation(messages, trained=trained), "each")
    assert some == [each[0], *each[2:]]


def test_a_rejection_holds_both_texts_where_they_part() -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    with pytest.raises(RecordRefused) as fault:
        rendered_rows(open_template(PHI_3, VARIABLES), Conversation(messages), "reject")
    assert fault.value.why == "not_prefix_stable"
    detail = fault.value.why.detail
    assert detail is not None
    assert detail["printed"] == "<|user|>\nuser<|end|>\n<|assistant|>\nassistant<|end|>\n</s>"
    assert detail["printed_later"].startswith(
        "<|user|>\nuser<|end|>\n<|assistant|>\nassistant<|end|>\n<|user|>\nuser"
    )


def test_a_template_that_loses_what_was_said_before_an_answer_has_no_row_to_give() -> None:
    """What the model would see before its answer and what stands before it in the text have nothing in common."""
    source = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    said = Conversation([{"role": role, "content": role} for role in ("user", "assistant")])
    for rule in ("reject", "last", "each"):
        with pytest.raises(RecordRefused, match="not_prefix_stable"):
            rendered_rows(open_template(source, {}), said, rule)


def test_the_template_s_own_message_is_kept() -> None:
    source = "{{ raise_exception('System role not supported') }}"
    said = Conversation([{"role": role, "content": role} for role in ("user", "assistant")])
    with pytest.raises(RecordRefused) as fault:
        rendered_rows(open_template(source, {}), said, "each")
    assert fault.value.why.detail == {"template": "System role not supported"}


def test_a_record_counts_once_however_many_rows_it_gives(tmp_path: Path) -> None:
    said = [
        Conversation(
            [
                {"role": r, "content": c}
                for r, c in zip(("user", "assistant") * 2, texts, strict=True)
            ]
        )
        for texts in (("a", "b", "c", "d"), ("a", "b", "c" * 300, "d"), ("a" * 300, "b", "c", "d"))
    ]
    settings = {"max_seq_len": 200, "target_responses": "all", "special_tokens_in_text": "allow"}
    variables = {"bos_token": "", "eos_token": "."}
    encoder = encoders.chats(
        letters(tmp_path), DEEPSEEK_R1, variables, rewritten_history="each", **settings
    )
    found = encoder.encode(said)
    assert len(found.lengths) == 3  # two of the first, one of the second
    assert [(at, why, why in FILTERED) for at, why in found.rejected.items()] == [
        (2, "no_loss_tokens", True)
    ]
    cut = len("<User>a<Assistant>b.<User>" + 300 * "c" + "<Assistant>d.")
    assert found.totals.lost_tokens == cut
    assert found.totals.tokens == int(found.lengths.sum())
