"""Conversations are valid by Foundry's rules, rendered as transformers renders them, and cut at each answer."""

from typing import Any

import pytest

from mdsmix.encode.chat import open_template, parse_day, today
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, RecordRefused
from mdsmix.shapes.messages import MESSAGES
from tests.styles import DATED, FORGETS, NO_SYSTEM, REWRITING, TEMPLATES
from tests.test_encode_causal import conversations

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<|im_start|>"]}
CHATML_OF_FOUNDRY = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def say(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]


def before_answer(**first: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"} | first, *say("assistant")]


RULES: list[tuple[Any, str | None]] = [
    (say("user", "assistant"), None),
    (say("system", "user", "assistant"), None),
    (say("system", "assistant"), None),
    (say("user", "assistant", "tool", "assistant"), None),
    ([], "no_messages"),
    (say("assistant"), "too_few_messages"),
    (["hi", "there"], "bad_message_keys"),
    ([{"role": "user"}, *say("assistant")], "bad_message_keys"),
    ([{"role": "user", "text": "a"}, *say("assistant")], "bad_message_keys"),
    (before_answer(name="b"), "bad_message_keys"),
    (say("human", "assistant"), "unknown_role"),
    (before_answer(role=["user"]), "unknown_role"),
    (before_answer(content=None), "content_not_text"),
    (before_answer(content=[{"type": "text", "text": "a"}]), "content_not_text"),
    (say("user", "user", "assistant"), "repeated_role"),
    (say("user", "assistant", "assistant"), "repeated_role"),
    (say("user", "assistant", "user"), "last_not_assistant"),
    (say("assistant", "user", "assistant"), "starts_with_assistant"),
]


def test_each_rule_has_its_reason() -> None:
    for messages, reason in RULES:
        found = MESSAGES.read({"said": messages}, {"messages": "said"})
        assert (found if isinstance(found, str) else None) == reason, messages


def test_a_rendering_is_that_of_transformers() -> None:
    """Of every prefix of a conversation, with and without the generation prompt, failures included."""
    from transformers.utils.chat_template_utils import render_jinja_template

    day, tried = today(), 0

    def text_or_fault(render: Any) -> str | None:
        try:
            return str(render())
        except Exception:
            return None

    for given in (*TEMPLATES.values(), *REWRITING.values(), None):
        template, source = open_template(given, VARIABLES, day), given or CHATML_OF_FOUNDRY
        for messages in conversations(7):
            for length in range(1, len(messages) + 1):
                for asked in (False, True):
                    said, more = messages[:length], {"add_generation_prompt": asked}
                    more |= {**VARIABLES, "date_string": day}
                    theirs = text_or_fault(
                        lambda: render_jinja_template([said], chat_template=source, **more)[0][0]  # noqa: B023
                    )
                    ours = text_or_fault(lambda: template.render(said, asked))  # noqa: B023
                    assert ours == theirs, (source, said)
                    tried += ours is not None
    assert tried > 600


def test_turns_are_cut_at_each_answer() -> None:
    said = Conversation(say("system", "user", "assistant", "user", "assistant"))
    asked = "<|im_start|>system\nsystem 0<|im_end|>\n<|im_start|>user\nuser 1<|im_end|>\n<|im_start|>assistant\n"
    again = "<|im_start|>user\nuser 3<|im_end|>\n<|im_start|>assistant\n"
    turns = [(asked, "assistant 2<|im_end|>\n"), (again, "assistant 4<|im_end|>\n")]
    assert open_template(None, {}).turns(said) == turns
    empty = open_template(
        "", {}
    )  # a template all the same: Foundry takes ChatML where there is none
    assert empty.turns(Conversation(say("user", "assistant"))) == [("", "")]


def test_what_a_template_cannot_do_has_a_reason() -> None:
    for source, reason in (
        ("{{ messages[0].nothing.at_all }}", "template_error"),
        ("{{ messages[0].__class__.__mro__[1] }}", "template_error"),
        ("{% include 'secret' %}", "template_error"),
        (NO_SYSTEM, "template_error"),
        ("{{ messages | length }}", "not_prefix_stable"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "not_prefix_stable"),
    ):
        roles = ["system"] * (source == NO_SYSTEM) + ["user", "assistant"]
        with pytest.raises(RecordRefused, match=reason):
            open_template(source, {}).turns(Conversation(say(*roles)))


def test_a_template_that_rewrites_the_past_is_stable_where_it_need_not() -> None:
    template = open_template(FORGETS, {})
    messages = say("user", "assistant", "user", "assistant")
    assert len(template.turns(Conversation(messages))) == 2
    messages[1]["content"] = "<think>hm</think>yes"
    with pytest.raises(RecordRefused, match="not_prefix_stable"):
        template.turns(Conversation(messages))


def test_a_day_is_the_pinned_one_everywhere_or_today_as_foundry_writes_it() -> None:
    for pinned in ("2026-01-02", "02 Jan 2026"):
        template = open_template(DATED, VARIABLES, pinned)
        assert template.render(say("user"), False).startswith("02 Jan 2026 2026\n")
        assert open_template(DATED, VARIABLES, pinned) is template, "compiled once"
    before = today()
    shown = open_template(DATED, {}).render(say("user"), False)
    assert shown.startswith((before, today())), "midnight may have passed"
    assert parse_day(today()).strftime("%d %b %Y") == today()
    by_clock = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    dated = [open_template(source, {}).prints_date for source in (DATED, by_clock, None)]
    assert dated == [True, True, False]


def test_what_is_no_day_and_what_is_no_template_are_refused() -> None:
    with pytest.raises(RecipeError, match="date_string is 'soon'"):
        open_template(None, {}, "soon")
    with pytest.raises(RecipeError, match="cannot be compiled"):
        open_template("{% for m in messages %}", {})


def test_an_answer_that_is_not_trained_belongs_to_the_next_prompt() -> None:
    """So LLM-Foundry's loader, which trains every answer or the last, trains just the others."""
    messages = say("user", "assistant", "user", "assistant", "user", "assistant")
    template = open_template(None, {})
    every = template.turns(Conversation(messages))
    trained = [True, True, True, False, True, True]
    some = template.turns(Conversation(messages, trained=trained))
    assert some == [every[0], (every[1][0] + every[1][1] + every[2][0], every[2][1])]
