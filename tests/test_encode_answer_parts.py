"""Where a chat template prints the reasoning, the calls and the answer of an assistant's message.

The expectations are written out by hand, or follow from the text alone: a thought, a name or an
answer of the record must be found in its part and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from mdsmix.encode.answer_parts import PARTS, find_parts, require_findable_parts
from mdsmix.encode.forms import fit_tools
from mdsmix.encode.open_template import open_template
from mdsmix.encode.rewritten_history import render_rows
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, RecordRefused, RichConversation
from tests import styles
from tests.corpus import CHATML
from tests.tool_styles import (
    GEMMA_4,
    GPT_OSS,
    KIMI_K3,
    LLAMA_3,
    MISTRAL,
    QWEN_2_5,
    QWEN_3,
    TEMPLATES_WITH_TOOLS,
    TOOLS,
    Message,
    draw_conversations,
)

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {
    "id": "123456789",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": 'a "b"'}},
}
THOUGHT = {"content": "<think>\nHm.\n</think>\n\nYes, it is."}
BY_KEY = {"content": "Yes, it is.", "reasoning_content": "Hm."}
CALLS = {"content": "", "tool_calls": [CALL]}
ALL_THREE = {"content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
# Prints reasoning in a channel of its own, as the template of gpt-oss does.
CHANNELS = (
    "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OWN_TAGS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}"
    "[/THINK]{% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def render(
    source: str, answer: Message, tools: Any = None
) -> tuple[list[tuple[str, str]], str, str]:
    """Return the parts of an answer with their texts, the prompt and the response."""
    template = open_template(source, VARIABLES, "2026-01-01")
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", **answer}]
    record_type = RichConversation if len(messages[1]) > 2 or tools else Conversation
    conversation: Any = record_type(messages, None, tools)
    if tools:
        conversation = fit_tools(template, conversation)
    ((prompt, response),) = render_rows(template, conversation, "each")[-1]
    parts = find_parts(template, conversation, 1, prompt, response)
    return [(part, response[start:stop]) for start, stop, part in parts], prompt, response


CASES: list[tuple[str, str, Message, list[tuple[str, str]]]] = [
    ("chatml", CHATML, {"content": "Yes."}, [("answer", "Yes.<|im_end|>\n")]),
    (
        "chatml, with a thought",
        CHATML,
        THOUGHT,
        [
            ("reasoning", "<think>\nHm.\n</think>"),
            ("answer", "\n\nYes, it is.<|im_end|>\n"),
        ],
    ),
    (
        "chatml, tags that an answer writes about",
        CHATML,
        {"content": "It ends in </think> here."},
        [("answer", "It ends in </think> here.<|im_end|>\n")],
    ),
    (
        "chatml, a tag in a sentence",
        CHATML,
        {"content": "Write <think> first."},
        [("answer", "Write <think> first.<|im_end|>\n")],
    ),
    (
        "chatml, an empty thought",
        CHATML,
        {"content": "<think>\n\n</think>\n\nYes."},
        [("reasoning", "<think>\n\n</think>"), ("answer", "\n\nYes.<|im_end|>\n")],
    ),
    (
        "chatml, thoughts between answers",
        CHATML,
        {"content": "First. <think>a</think> Then <think>b</think> last."},
        [
            ("answer", "First."),
            ("reasoning", " <think>a</think>"),
            ("answer", " Then"),
            ("reasoning", " <think>b</think>"),
            ("answer", " last.<|im_end|>\n"),
        ],
    ),
    (
        "chatml, several ends of thoughts",
        CHATML,
        {"content": "<think>a</think>b</think>c"},
        [("reasoning", "<think>a</think>"), ("answer", "b</think>c<|im_end|>\n")],
    ),
    (
        "chatml, nothing but a thought",
        CHATML,
        {"content": "<think>Hm.</think>"},
        [("reasoning", "<think>Hm.</think><|im_end|>\n")],
    ),
    (
        "qwen 3, by tags",
        QWEN_3,
        THOUGHT,
        [
            ("reasoning", "<think>\nHm.\n</think>"),
            ("answer", "\n\nYes, it is.<|im_end|>\n"),
        ],
    ),
    (
        "qwen 3, by key",
        QWEN_3,
        BY_KEY,
        [
            ("reasoning", "<think>\nHm.\n</think>"),
            ("answer", "\n\nYes, it is.<|im_end|>\n"),
        ],
    ),
    (
        "qwen 3, a thought that only the template opens",
        QWEN_3,
        {"content": "Hm.\n</think>\n\nYes, it is."},
        [
            ("reasoning", "<think>\nHm.\n</think>"),
            ("answer", "\n\nYes, it is.<|im_end|>\n"),
        ],
    ),
    (
        "qwen 3, all three",
        QWEN_3,
        ALL_THREE,
        [
            ("reasoning", "<think>\nHm.\n</think>"),
            ("answer", "\n\nI look."),
            (
                "calls",
                '\n<tool_call>\n{"name": "weather", "arguments": {"city": "a \\"b\\""}}\n'
                "</tool_call><|im_end|>\n",
            ),
        ],
    ),
    (
        "qwen 3, a thought and a call",
        QWEN_3,
        ALL_THREE | {"content": ""},
        [
            ("reasoning", "<think>\nHm.\n</think>"),
            (
                "calls",
                '\n\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "a \\"b\\""}}\n'
                "</tool_call><|im_end|>\n",
            ),
        ],
    ),
    (
        "deepseek r1, whose prompt opens the thought",
        styles.DEEPSEEK_V3,
        {"content": "<think>\nHm.\n</think>\n\nYes."},
        [("reasoning", "Hm.\n</think>"), ("answer", "\n\nYes.</s>")],
    ),
    (
        "nemotron 3, which prints an empty thought",
        styles.NEMOTRON_3,
        {"content": "Yes."},
        [("reasoning", "<think></think>"), ("answer", "Yes.<|im_end|>\n")],
    ),
    (
        "glm 4.7, whose answer closes a thought that nothing opens",
        styles.GLM_4_7,
        {"content": "Yes."},
        [("reasoning", "</think>"), ("answer", "Yes.")],
    ),
    (
        "gpt-oss, by tags",
        styles.GPT_OSS,
        {"content": "<think>Hm.</think>Yes."},
        [
            ("reasoning", "<|channel|>analysis<|message|>Hm.<|end|>"),
            ("answer", "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"),
        ],
    ),
    (
        "gpt-oss, by key",
        CHANNELS,
        {"content": "Yes.", "thinking": "Hm."},
        [
            ("reasoning", "<|channel|>analysis<|message|>Hm.<|end|>"),
            ("answer", "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"),
        ],
    ),
    (
        "gpt-oss, a thought and a call",
        CHANNELS,
        {"content": "", "thinking": "Hm.", "tool_calls": [CALL]},
        [
            ("reasoning", "<|channel|>analysis<|message|>Hm.<|end|>"),
            (
                "calls",
                "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
                '{"city": "a \\"b\\""}<|call|>',
            ),
        ],
    ),
    (
        "gpt-oss, whose content next to a call is printed as a thought",
        GPT_OSS,
        {"content": "I look.", "tool_calls": [CALL]},
        [
            ("reasoning", "<|channel|>analysis<|message|>I look.<|end|>"),
            (
                "calls",
                "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
                '{"city": "a \\"b\\""}<|call|>',
            ),
        ],
    ),
    (
        "tags of the template's own",
        OWN_TAGS,
        BY_KEY,
        [("reasoning", "[THINK]Hm.[/THINK]"), ("answer", "Yes, it is.</s>")],
    ),
    (
        "llama 3, a call",
        LLAMA_3,
        CALLS,
        [("calls", '{"name": "weather", "parameters": {"city": "a \\"b\\""}}<|im_end|>')],
    ),
    (
        "mistral, a call with an id",
        MISTRAL,
        CALLS,
        [
            (
                "calls",
                '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "a \\"b\\""}, "id": '
                '"123456789"}]</s>',
            )
        ],
    ),
    (
        "gemma 4, which prints calls before the content",
        GEMMA_4,
        {"content": "I look.", "tool_calls": [CALL]},
        [
            ("calls", '<|tool_call>call:weather{city:<|q|>a "b"<|q|>}<tool_call|>'),
            ("answer", "I look.<turn|>\n"),
        ],
    ),
]


@pytest.mark.parametrize(
    ("source", "answer", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_parts_are_those_written_by_hand(
    source: str, answer: Message, expected: list[tuple[str, str]]
) -> None:
    parts, _, response = render(source, answer, TOOLS if "tool_calls" in answer else None)
    assert parts == expected
    assert "".join(text for _, text in parts) == response


def texts_of(parts: Sequence[tuple[int, int, str]], response: str) -> dict[str, str]:
    """Return part -> its text in the response."""
    texts = dict.fromkeys(PARTS, "")
    for start, stop, part in parts:
        texts[part] += response[start:stop]
    return texts


@pytest.mark.parametrize(
    "name", [*TEMPLATES_WITH_TOOLS, *styles.REWRITING, *styles.TEMPLATES, "channels", "kimi"]
)
def test_each_text_of_a_record_is_in_its_part(name: str) -> None:
    """For random conversations, in every row that a template makes of them. Each word of a thought,
    a call or an answer is in the text of that part, and in no other.
    """
    sources = {**styles.TEMPLATES, **styles.REWRITING, **TEMPLATES_WITH_TOOLS}
    source = (sources | {"channels": CHANNELS, "kimi": KIMI_K3})[name]
    template = open_template(source, VARIABLES, "2026-01-01")
    found = dict.fromkeys(PARTS, 0)
    for messages, tools in draw_conversations(60, seed=3):
        conversation: Any = RichConversation(messages, None, tools)
        try:
            conversation = fit_tools(template, conversation)
            rows = render_rows(template, conversation, "each")
        except RecordRefused:
            continue
        answers = [position for position, m in enumerate(messages) if m["role"] == "assistant"]
        turns = [turn for row in rows for turn in row]
        for answer, (prompt, response) in zip(answers, turns, strict=True):
            parts = find_parts(template, conversation, answer, prompt, response)
            assert [start for start, _, _ in parts[1:]] == [stop for _, stop, _ in parts[:-1]]
            assert (parts[0].start, parts[-1].stop) == (0, len(response))
            assert all(a.name != b.name for a, b in pairwise(parts))
            texts = texts_of(parts, response)
            message = messages[answer]
            content = message.get("content") or ""
            thought, tag, said = content.rpartition("</think>")
            words = {"reasoning": thought.strip("<think>\n") if tag else "", "answer": said.strip()}
            for call in message.get("tool_calls") or ():
                assert f"{call['function']['name']}" in texts["calls"] or "weather" in response
                found["calls"] += 1
            if not message.get("tool_calls"):
                assert not texts["calls"]
            for part, text in words.items():
                places = [other for other in PARTS if text and text in texts[other]]
                if text not in response:
                    continue
                if message.get("tool_calls") and "analysis" in texts["reasoning"]:
                    part = "reasoning"  # gpt-oss prints the content there
                assert places == ([part] if text else []), (text, texts)
                found[part] += bool(text)
    assert found["answer"] > 10
    assert name not in TEMPLATES_WITH_TOOLS or found["calls"] > 0


CONTENT = "message['content']"
REFUSED = {
    "changes": CHATML.replace(CONTENT, f"{CONTENT} | upper"),
    "prints twice": CHATML.replace(CONTENT, f"{CONTENT} + {CONTENT}"),
    "cuts": CHATML.replace(CONTENT, f"{CONTENT}[:33]"),
    "counts": CHATML.replace(CONTENT, f"{CONTENT} + {CONTENT}.count('e') | string"),
    "escapes": CHATML.replace(CONTENT, f"({CONTENT} | tojson)"),
    "fails": CHATML.replace(
        CONTENT,
        f"({CONTENT} if 'Y' in {CONTENT} or message['role'] == 'user' else raise_exception('no Y'))",
    ),
}
"What a template does with a content -> such a template."


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_does_more_than_print_is_refused(name: str) -> None:
    """With the reason and the texts that differ, and by the recipe before anything is converted."""
    with pytest.raises(RecordRefused) as refused:
        render(REFUSED[name], {"content": '<think>\nHm "1"\n</think>\n\nYes it is'})
    assert refused.value.why == "parts_not_found"
    assert refused.value.why.detail["why"]
    template = open_template(REFUSED[name], VARIABLES)
    if name in ("cuts", "escapes", "fails"):  # the probes do not show it
        require_findable_parts(template)
    else:
        with pytest.raises(RecipeError, match="train_parts cannot be used"):
            require_findable_parts(template)


@pytest.mark.parametrize("source", [CHATML, QWEN_3, QWEN_2_5, MISTRAL, GEMMA_4, CHANNELS, GPT_OSS])
def test_usual_templates_can_be_used(source: str) -> None:
    require_findable_parts(open_template(source, VARIABLES))


def test_reasoning_under_two_keys_is_printed_once() -> None:
    """Some servers write the same reasoning under both keys."""
    parts, _, _ = render(QWEN_3, BY_KEY | {"reasoning": "Hm."})
    assert [part for part, _ in parts] == ["reasoning", "answer"]


def test_private_characters_of_a_record_are_refused() -> None:
    with pytest.raises(RecordRefused) as refused:
        render(CHATML, {"content": "<think>a</think>b\U000f1e03"})
    assert "U+F1E01" in refused.value.why.detail["why"]


def test_calls_without_a_name_are_refused() -> None:
    template = CHATML.replace(
        "{{ message['content'] }}", "{{ message['content'] }}{{ 'calls' if message.tool_calls }}"
    )
    source = open_template(template, VARIABLES)
    message = {"role": "assistant", "content": "", "tool_calls": json.loads(json.dumps([CALL]))}
    conversation = RichConversation([{"role": "user", "content": "x"}, message])
    ((prompt, response),) = render_rows(source, conversation, "each")[0]
    with pytest.raises(RecordRefused) as refused:
        find_parts(source, conversation, 1, prompt, response)
    assert "neither the name" in refused.value.why.detail["why"]
