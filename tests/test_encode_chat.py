"""Conversations are rendered as transformers renders them and cut at each answer; one rendering gives what rendering every prefix gives."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2 import TemplateError

from mdsmix.encode.chat import open_template, parse_day, rendered_rows, today
from mdsmix.encode.template_code import MARK, template_sandbox
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, RecordRefused
from mdsmix.shapes.messages import MESSAGES
from tests.styles import DATED, FORGETS, GENERATION, NO_SYSTEM, REWRITING, TEMPLATES

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<|im_start|>"]}
CHATML_OF_FOUNDRY = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LOOKS_AHEAD = {
    "length": "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "last": "{% for m in messages %}{{ loop.last }}{{ m.content }}{% endfor %}",
    "nextitem": "{% for m in messages %}{{ loop.nextitem.role }}{{ m.content }}{% endfor %}",
    "last message": "{{ messages[-1].role }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "any": "{% for m in messages %}{{ messages[loop.index0].content }}{% endfor %}",
    "loop itself": "{% for m in messages %}{% set l = loop %}{{ l.last }}{% endfor %}",
    "macro": "{% macro n() %}{{ messages | length }}{% endmacro %}{% for m in messages %}{{ n() }}{% endfor %}",
    "break": "{% for m in messages %}{% if m.content == 'b' %}{% break %}{% endif %}x{% endfor %}",
    "chosen": "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
    "else": "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
    "twice": "{% for m in messages %}a{% endfor %}{% for m in messages %}b{% endfor %}",
    "renamed": "{% set messages = messages[1:] %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "skips two": "{% set x = messages[2:] %}{% for m in x %}{{ m.content }}{% endfor %}",
    "set again": "{% set x = messages %}{% set x = [] %}{% for m in x %}{{ m.content }}{% endfor %}",
    "prompt inside": "{% for m in messages %}{{ m.content }}{{ add_generation_prompt }}{% endfor %}",
    "tail of state": "{% set ns = namespace(r='') %}{% for m in messages %}{% set ns.r = m.role %}{% endfor %}{{ ns.r }}",
    "tail of a name": "{% set eos_token = messages[0].content %}{% for m in messages %}x{% endfor %}{% if add_generation_prompt %}{{ eos_token }}{% endif %}",
    "tail of another form": "{% for m in messages %}{{ m.content }}{% endfor %}{% with %}{% if add_generation_prompt %}A{% endif %}{% endwith %}",
    "tail always": "{% for m in messages %}{{ m.content }}{% endfor %}the end",
    "nested": "{% if true %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}",
    "no loop": "{{ messages }}",
}
CONTENTS = ("", " ", "a", "b\n", "<think>x</think>y", " {{ z }} ", "é\U0001f600", "<s>", "{% if %}")


def conversations(count: int) -> Iterator[list[dict[str, str]]]:
    """Valid ones of 2 to 8 messages, most of them a plain dialogue."""
    rng = random.Random(3)
    while count:
        roles = ["user", "assistant"] * rng.randint(1, 4)
        if rng.random() < 0.3:
            roles = ["system", *roles]
        if rng.random() < 0.3:
            roles.insert(rng.randrange(len(roles)), rng.choice(["tool", "system", "user"]))
        messages = [{"role": role, "content": rng.choice(CONTENTS)} for role in roles]
        if not isinstance(MESSAGES.read({"said": messages}, {"messages": "said"}), str):
            count -= 1
            yield messages


def say(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]


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


def test_a_template_that_may_look_ahead_is_rendered_by_prefix() -> None:
    every = LOOKS_AHEAD | TEMPLATES
    at_once = {n for n, source in every.items() if open_template(source, VARIABLES).causal}
    assert at_once == TEMPLATES.keys() - {"forgets", "last_opens"}


def test_both_ways_give_the_same_turns_or_the_same_reason() -> None:
    """And what is not rewritten stays one row of all turns, whatever becomes of the rest."""

    def outcome(render: Any, messages: list[dict[str, str]]) -> Any:
        try:
            return list(render(Conversation(messages)))
        except RecordRefused as fault:
            return fault.why

    talks = [*conversations(100)]
    talks.append([{"role": "user", "content": f"a{MARK}b"}, {"role": "assistant", "content": MARK}])
    for source in (*TEMPLATES.values(), None):
        template = open_template(source, VARIABLES, "2026-01-01")
        found = [outcome(template.turns, messages) for messages in talks]
        assert found == [outcome(template.turns_by_prefix, messages) for messages in talks]
        rendered = [each for each in zip(talks, found, strict=True) if isinstance(each[1], list)]
        assert rendered
        for messages, turns in rendered:
            for rule in ("last", "each"):
                assert rendered_rows(template, Conversation(messages), rule) == [turns]  # type: ignore[arg-type]


def test_what_a_template_cannot_do_has_a_reason() -> None:
    for source, reason in (
        ("{{ messages[0].nothing.at_all }}", "template_error"),
        ("{{ messages[0].__class__.__mro__[1] }}", "template_error"),
        ("{% include 'secret' %}", "template_error"),
        (NO_SYSTEM, "template_error"),
        ("{{ messages | length }}", "not_prefix_stable"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "not_prefix_stable"),
        (GENERATION.replace("%}A:{% endif", "%}B:{% endif"), "not_prefix_stable"),
    ):
        roles = ["system"] * (source == NO_SYSTEM) + ["user", "assistant"]
        with pytest.raises(RecordRefused, match=reason):
            open_template(source, {}).turns(Conversation(say(*roles)))
    empty = open_template("", {})  # a template all the same: Foundry takes ChatML for none
    assert empty.turns(Conversation(say("user", "assistant"))) == [("", "")]
    forgetful, messages = open_template(FORGETS, {}), say(*["user", "assistant"] * 2)
    assert len(forgetful.turns(Conversation(messages))) == 2
    messages[1]["content"] = "<think>hm</think>yes"
    with pytest.raises(RecordRefused, match="not_prefix_stable"):
        forgetful.turns(Conversation(messages))
    with pytest.raises(RecipeError, match="cannot be compiled"):
        open_template("{% for m in messages %}", {})


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
    with pytest.raises(RecipeError, match="date_string is 'soon'"):
        open_template(None, {}, "soon")


def test_an_answer_that_is_not_trained_belongs_to_the_next_prompt() -> None:
    """So LLM-Foundry's loader, which trains every answer or the last, trains just the others."""
    messages, template = say(*["user", "assistant"] * 3), open_template(None, {})
    every = template.turns(Conversation(messages))
    some = template.turns(Conversation(messages, trained=[True, True, True, False, True, True]))
    assert some == [every[0], (every[1][0] + every[1][1] + every[2][0], every[2][1])]


def test_a_template_has_what_transformers_gives_it_and_draws_nothing_at_random() -> None:
    for source, text in (
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ raise_exception is defined }}{{ random is defined }}", "TrueFalse"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}{% set z = 1 %}{{ z }}{{ y }}{% endgeneration %}{{ z }}", "11"),
    ):  # fmt: skip
        assert template_sandbox().from_string(source).render(y=1) == text
    for source in ("{{ [1, 2] | random }}", "{{ lipsum() }}"):
        with pytest.raises(TemplateError):
            template_sandbox().from_string(source).render()
