"""One rendering per conversation gives what rendering every prefix gives; a template that looks ahead is left alone."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2 import TemplateError

from mdsmix.encode.chat import open_template
from mdsmix.encode.template_code import MARK, template_sandbox
from mdsmix.record import Conversation, RecordRefused
from mdsmix.shapes.messages import MESSAGES
from tests.styles import GENERATION, LLAMA_2, TEMPLATES

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
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


def test_a_template_that_may_look_ahead_is_rendered_by_prefix() -> None:
    every = LOOKS_AHEAD | TEMPLATES
    at_once = {n for n, source in every.items() if open_template(source, VARIABLES).causal}
    assert at_once == TEMPLATES.keys() - {"forgets", "last_opens"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_both_ways_give_the_same_turns_or_the_same_reason(name: str) -> None:
    template = open_template(TEMPLATES[name], VARIABLES, "2026-01-01")

    def outcome(render: Any, messages: list[dict[str, str]]) -> list[tuple[str, str]] | str:
        try:
            return list(render(Conversation(messages)))
        except RecordRefused as fault:
            return fault.why

    talks = [*conversations(100)]
    found = [outcome(template.turns, messages) for messages in talks]
    assert found == [outcome(template.turns_by_prefix, messages) for messages in talks]
    assert any(isinstance(turns, list) for turns in found)


def test_a_message_that_holds_the_mark_is_text_like_any_other() -> None:
    messages = [{"role": "user", "content": f"a{MARK}b"}, {"role": "assistant", "content": MARK}]
    template, said = open_template(None, VARIABLES, "2026-01-01"), Conversation(messages)
    assert template.turns(said) == template.turns_by_prefix(said)
    assert template.turns(said)[0][1] == f"{MARK}<|im_end|>\n"


def test_a_system_message_that_the_loop_leaves_out_belongs_to_the_first_prompt() -> None:
    roles = {"system": "be", "user": "a", "assistant": "b"}
    template = open_template(LLAMA_2, VARIABLES, "2026-01-01")
    assert template.causal is not None
    messages = [{"role": role, "content": said} for role, said in roles.items()]
    turns = template.turns_at_once(messages, *template.causal)
    assert turns == [("<s>[INST] <<SYS>>be<</SYS>>a [/INST]", " b </s>")]


def test_an_answer_that_does_not_begin_with_the_generation_prompt_is_not_stable() -> None:
    source = GENERATION.replace("%}A:{% endif", "%}B:{% endif")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RecordRefused, match="not_prefix_stable"):
        open_template(source, VARIABLES).turns(Conversation(messages))


def test_a_template_has_what_transformers_gives_it_and_draws_nothing_at_random() -> None:
    for source, text in (
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ raise_exception is defined }}{{ random is defined }}", "TrueFalse"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}x{{ y }}{% endgeneration %}", "x1"),
        ("{% generation %}{% set z = 1 %}{{ z }}{% endgeneration %}{{ z }}", "1"),
    ):  # fmt: skip
        assert template_sandbox().from_string(source).render(y=1) == text
    for source in ("{{ [1, 2] | random }}", "{{ lipsum() }}"):
        with pytest.raises(TemplateError):
            template_sandbox().from_string(source).render()
