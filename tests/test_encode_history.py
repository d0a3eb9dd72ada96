"""A conversation whose history a template rewrites: a row for an answer is what transformers renders up to it."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from mdsmix.encode.chat import open_template, rendered_rows
from mdsmix.record import Conversation, RecordRefused
from tests.styles import (
    DEEPSEEK_V3,
    NEMOTRON_3,
    PHI_3,
    QWEN_3_5_NOTHINK,
    REWRITING,
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
    for messages in chats(30):
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
            end = next(end for end in ENDS if answer.endswith(end))
            assert answer.endswith(messages[i]["content"].split("</think>")[-1] + end)
    assert several > 5


ENDS = ("<|im_end|>\n", "<|end|>\n</s>", "<|return|>", "</s>")
DEEPSEEK_V3_1 = """{%- for m in messages -%}{%- if m['role'] == 'user' -%}<User>{{ m['content'] }}{%- else -%}<Assistant></think>{{ m['content'].split('</think>')[-1] }}</s>{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<Assistant><think>{%- endif -%}"""
"With `thinking: true`: an answer ends the reasoning which the generation prompt begins."
OPENED = {
    # template: what it prints before every answer, and the rest of the generation prompt
    DEEPSEEK_V3: ("<Assistant>", "<think>\n"),
    DEEPSEEK_V3_1: ("<Assistant>", "<think>"),
    NEMOTRON_3: ("<|im_start|>assistant\n", "<think>\n"),
    QWEN_3_5_NOTHINK: ("<|im_start|>assistant\n", "<think>\n\n</think>\n\n"),
}


@pytest.mark.parametrize("source", OPENED)
def test_an_answer_is_cut_where_every_answer_begins(source: str) -> None:
    """Whatever it begins with: a part of the generation prompt or all of it, followed by a letter, a newline, or a thought."""
    template = open_template(source, VARIABLES)
    head, opening = OPENED[source]
    asked = {"role": "user", "content": "?"}
    inference = theirs(source, [asked], True)
    assert inference.endswith(head + opening)
    history, inside, whole = inference.removesuffix(head + opening), 0, head + opening
    pieces = {whole[at:] for at in range(len(whole))}
    pieces |= {opening[:at] for at in range(len(opening) + 1)}
    for piece, rest in product(sorted(pieces), ("able>", "\nhm", "hm\n</think>\n\nso", "")):
        said = {"role": "assistant", "content": piece + rest}
        [[(prompt, answer)]] = rendered_rows(template, Conversation([asked, said]), "each")
        printed = theirs(source, [asked, said], False)
        assert printed.startswith(history + head)
        text = printed.removeprefix(history + head)
        inside += text.startswith(opening[0])
        if text.startswith(opening):  # inference sees all of it
            assert (prompt, answer) == (inference, text.removeprefix(opening))
        else:
            assert (prompt, answer) == (history + head, text)
    assert inside > 20


def test_an_answer_that_is_not_trained_gets_no_row() -> None:
    messages = next(m for m in chats(40) if len(m) == 8)
    template = open_template(PHI_3, VARIABLES)
    each = rendered_rows(template, Conversation(messages), "each")
    trained = [m["role"] != "assistant" or i != 3 for i, m in enumerate(messages)]
    some = rendered_rows(template, Conversation(messages, trained=trained), "each")
    assert some == [each[0], *each[2:]]


def test_a_refusal_has_its_reason_and_its_detail() -> None:
    """Both texts where they part; no row at all where the text loses what was said; the template's own message."""
    lost = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    fails = "{{ raise_exception('System role not supported') }}"
    first = "<|user|>\nuser<|end|>\n<|assistant|>\nassistant<|end|>\n"
    parting = {"printed": f"{first}</s>", "printed_later": f"{first}<|user|>\nuser<|end|>\n"}
    for source, rule, reason, detail in (
        (PHI_3, "reject", "not_prefix_stable", parting),
        *((lost, rule, "not_prefix_stable", {}) for rule in ("reject", "last", "each")),
        (fails, "each", "template_error", {"template": "System role not supported"}),
    ):
        said = Conversation([{"role": role, "content": role} for role in ("user", "assistant") * 2])
        with pytest.raises(RecordRefused, match=reason) as fault:
            rendered_rows(open_template(source, VARIABLES), said, rule)  # type: ignore[arg-type]
        for key, text in detail.items():
            assert fault.value.why.detail[key].startswith(text), source
            assert key != "printed" or fault.value.why.detail[key] == text
