"""A rendering within its budget is left alone, however long its conversation; one over it ends, on every machine alike."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from mdsmix.encode import budget
from mdsmix.encode.budget import Overrun
from mdsmix.encode.chat import NotRendered, open_template
from mdsmix.encode.sandbox import template_sandbox
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation

ACCUMULATES = (
    "{% set ns = namespace(text='', seen=[]) %}{% for m in messages %}"
    "{% set ns.text = ns.text + m.content %}{% set ns.seen = ns.seen + [m] %}{% endfor %}{{ ns.text }}"
)
LOOKS_AT_ALL = (
    "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.content }}{% endfor %}"
)
ENDLESS = "{% for a in l %}{% for b in l %}{% for c in l %}{% endfor %}{% endfor %}{% endfor %}"


def rendered(source: str, **variables: Any) -> str:
    return template_sandbox(datetime(2026, 1, 1)).from_string(source).render(**variables)


def conversation(messages: int, letters: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * letters} for _ in range(messages)]


@pytest.mark.parametrize("source", [ACCUMULATES, LOOKS_AT_ALL])
@pytest.mark.parametrize(("messages", "letters"), [(400, 1000), (3, 3_000_000)])
def test_a_long_conversation_is_rendered_whole(source: str, messages: int, letters: int) -> None:
    said = conversation(messages, letters)
    assert rendered(source, messages=said) == "x" * messages * letters


def test_every_rendering_has_a_budget_of_its_own() -> None:
    template = template_sandbox(datetime(2026, 1, 1)).from_string(LOOKS_AT_ALL)
    for _ in range(3):
        assert template.render(messages=conversation(800, 1))


def test_renderings_that_come_to_nothing_stop_the_run_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "PATIENCE", 0.3)
    template = open_template("{% set l = range(999) | list %}" + ENDLESS, {"a": 1}, "2026-01-01")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def convert() -> None:
        for _ in range(1000):
            with pytest.raises(NotRendered, match="template_error"):
                template.turns(Conversation(messages))

    with pytest.raises(RecipeError, match="conversion would not end: correct its chat_template"):
        convert()


def test_one_rendering_that_makes_no_new_text_is_stopped_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "PATIENCE", 0.2)
    slow = "{% for i in range(99999) %}{% if text | upper == 'b' %}{% endif %}{% endfor %}"
    with pytest.raises(RecipeError, match="would not end"):
        rendered(slow, text="x" * 1_000_000)


def test_the_same_text_is_over_the_budget_or_not() -> None:
    text = "x" * 10_000
    most = budget.TEXT_LIMIT + budget.GROWTH * budget.size_of({"text": text})
    times = most // (len(text) + 1) - 2
    assert len(rendered(f"{{{{ text * {times} }}}}", text=text)) == times * len(text)
    with pytest.raises(Overrun):
        rendered(f"{{{{ text * {times + 2} }}}}", text=text)
