"""Conversations are valid by Foundry's rules, rendered as transformers renders them, and cut at each answer."""

from __future__ import annotations

from typing import Any

import pytest

from mdsmix.encode.chat import open_template, parse_day, today
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, RecordRefused
from mdsmix.shapes.messages import MESSAGES
from tests.styles import DATED, FORGETS, NO_SYSTEM, REWRITING, TEMPLATES
from tests.test_encode_causal import conversations

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<|im_start|>"]}


def say(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (say("user", "assistant"), None),
        (say("system", "user", "assistant"), None),
        (say("system", "assistant"), None),
        (say("user", "assistant", "tool", "assistant"), None),
        ([], "no_messages"),
        (say("assistant"), "too_few_messages"),
        (["hi", "there"], "bad_message_keys"),
        ([{"role": "user"}, *say("assistant")], "bad_message_keys"),
        ([{"role": "user", "text": "a"}, *say("assistant")], "bad_message_keys"),
        ([{"role": "user", "content": "a", "name": "b"}, *say("assistant")], "bad_message_keys"),
        (say("human", "assistant"), "unknown_role"),
        ([{"role": ["user"], "content": "a"}, *say("assistant")], "unknown_role"),
        ([{"role": "user", "content": None}, *say("assistant")], "content_not_text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *say("assistant")],
            "content_not_text",
        ),
        (say("user", "user", "assistant"), "repeated_role"),
        (say("user", "assistant", "assistant"), "repeated_role"),
        (say("user", "assistant", "user"), "last_not_assistant"),
        (say("assistant", "user", "assistant"), "starts_with_assistant"),
    ],
)
def test_each_rule_has_its_reason(messages: Any, reason: str | None) -> None:
    found = MESSAGES.read({"said": messages}, {"messages": "said"})
    assert (found if isinstance(found, str) else None) == reason


@pytest.mark.parametrize("name", [*TEMPLATES, *REWRITING, "default"])
def test_a_rendering_is_that_of_transformers(name: str) -> None:
    """Every prefix of every conversation, with and without the generation prompt, failures included."""
    from transformers.utils.chat_template_utils import render_jinja_template

    every, day = TEMPLATES | REWRITING, today()
    template = open_template(every.get(name), VARIABLES, day)
    source = every.get(name, CHATML_OF_FOUNDRY)

    def theirs(messages: list[dict[str, str]], asked: bool) -> str:
        variables = {**VARIABLES, "date_string": day}
        return render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=asked, **variables
        )[0][0]

    for messages in conversations(30):
        for length in range(1, len(messages) + 1):
            for asked in (False, True):
                expected = _text_or_fault(theirs, messages[:length], asked)
                assert _text_or_fault(template.render, messages[:length], asked) == expected


CHATML_OF_FOUNDRY = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _text_or_fault(render: Any, messages: list[dict[str, str]], asked: bool) -> str | None:
    try:
        return str(render(messages, asked))
    except Exception:
        return None


def test_without_a_template_chatml_is_cut_at_each_answer() -> None:
    turns = open_template(None, {}).turns(
        Conversation(say("system", "user", "assistant", "user", "assistant"))
    )
    assert turns == [
        (
            "<|im_start|>system\nsystem 0<|im_end|>\n<|im_start|>user\nuser 1<|im_end|>\n"
            "<|im_start|>assistant\n",
            "assistant 2<|im_end|>\n",
        ),
        ("<|im_start|>user\nuser 3<|im_end|>\n<|im_start|>assistant\n", "assistant 4<|im_end|>\n"),
    ]


def test_an_empty_template_is_a_template() -> None:
    """Foundry falls back to ChatML where there is none, not where it prints nothing."""
    assert open_template("", {}).turns(Conversation(say("user", "assistant"))) == [("", "")]


@pytest.mark.parametrize(
    ("source", "roles", "reason"),
    [
        (NO_SYSTEM, ("system", "user", "assistant"), "template_error"),
        ("{{ messages[0].nothing.at_all }}", ("user", "assistant"), "template_error"),
        ("{{ messages[0].__class__.__mro__[1] }}", ("user", "assistant"), "template_error"),
        ("{% include 'secret' %}", ("user", "assistant"), "template_error"),
        ("{{ messages | length }}", ("user", "assistant"), "not_prefix_stable"),
        (
            "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
            ("user", "assistant"),
            "not_prefix_stable",
        ),
    ],
)
def test_what_a_template_cannot_do_has_a_reason(
    source: str, roles: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(RecordRefused, match=reason):
        open_template(source, {}).turns(Conversation(say(*roles)))


def test_a_template_that_rewrites_the_past_is_stable_where_it_need_not() -> None:
    template = open_template(FORGETS, {})
    messages = say("user", "assistant", "user", "assistant")
    assert len(template.turns(Conversation(messages))) == 2
    messages[1]["content"] = "<think>hm</think>yes"
    with pytest.raises(RecordRefused, match="not_prefix_stable"):
        template.turns(Conversation(messages))


@pytest.mark.parametrize("date_string", ["2026-01-02", "02 Jan 2026"])
def test_a_pinned_day_is_the_day_everywhere(date_string: str) -> None:
    template = open_template(DATED, {}, date_string)
    assert template.prints_date
    assert template.turns(Conversation(say("user", "assistant")))[0][0].startswith(
        "02 Jan 2026 2026\n"
    )


def test_without_a_pin_it_is_today_as_foundry_writes_it() -> None:
    before = today()
    shown = open_template(DATED, {}).render(say("user"), False)
    assert shown.startswith((before, today())), "midnight may have passed"
    assert parse_day(today()).strftime("%d %b %Y") == today()
    assert not open_template(None, {}).prints_date


def test_the_day_of_strftime_now_is_kept_too() -> None:
    """A template that prints it under no other name has rows that depend on the day all the same."""
    source = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert open_template(source, {}).prints_date


def test_what_is_no_day_is_refused() -> None:
    with pytest.raises(RecipeError, match="date_string is 'soon'"):
        open_template(None, {}, "soon")


def test_a_template_that_is_not_jinja_is_refused() -> None:
    with pytest.raises(RecipeError, match="cannot be compiled"):
        open_template("{% for m in messages %}", {})


def test_a_template_is_compiled_once() -> None:
    assert open_template(DATED, VARIABLES, "2026-01-02") is open_template(
        DATED, VARIABLES, "2026-01-02"
    )


def test_an_answer_that_is_not_trained_belongs_to_the_next_prompt() -> None:
    """So LLM-Foundry's loader, which trains every answer or the last, trains just the others."""
    messages = say("user", "assistant", "user", "assistant", "user", "assistant")
    template = open_template(None, {})
    every = template.turns(Conversation(messages))
    trained = [True, True, True, False, True, True]
    some = template.turns(Conversation(messages, trained=trained))
    assert some == [every[0], (every[1][0] + every[1][1] + every[2][0], every[2][1])]


def test_tools_reach_the_template_as_transformers_hands_them_over() -> None:
    source = "{{ tools | tojson if tools else 'none' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    template, messages = open_template(source, {}), say("user", "assistant")
    ((plain, _),) = template.turns(Conversation(messages))
    ((prompt, answer),) = template.turns(Conversation(messages, tools=tools))
    assert plain.startswith("none<user>")
    assert prompt.startswith('[{"type": "function", "function": {"name": "f"}}]<user>')
    assert answer == "assistant 1"
