"""Conversations are rendered as by transformers and cut at each answer. The layout that is rendered
once for all conversations with the same roles gives the same turns as rendering each prefix. A
template that inspects contents is rendered for each conversation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
from jinja2 import TemplateError, Undefined, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from mdsmix.encode.chat import (
    ChatTemplate,
    find_layout_for_roles,
    find_plain,
    find_trained_answers,
    render_alike,
)
from mdsmix.encode.control_words import ControlWords
from mdsmix.encode.open_template import format_today, open_template, parse_day
from mdsmix.encode.placeholders import KEY, PLACEHOLDER_PATTERN
from mdsmix.encode.rewritten_history import NO_WORDS
from mdsmix.encode.template_code import make_template_sandbox
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, RecordRefused, RichConversation
from mdsmix.shapes.messages import MESSAGES
from tests import tool_styles
from tests.corpus import CHATML
from tests.styles import (
    DATED,
    FORGETS,
    GENERATION,
    NO_SYSTEM,
    REWRITING,
    TEMPLATES,
    make_dialogue,
)
from tests.test_shapes_refused import numbered_messages

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<|im_start|>"]}
SAID = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
PRINTS = {
    "length": "{{ messages | length > 9 }}" + SAID,
    "its state": "{% set n = namespace(said='') %}{% for m in messages %}{% set n.said = n.said + m['content'] + ' ' %}<{{ m.role }}>{{ n.said.strip() }}{% set n.said = '' %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "twice": SAID.replace("{{ m.content }}", "{{ m.content }}{{ '%s' + m.content | trim }}"),
    "joined": SAID.replace("{{ m.content }}", "{{ messages[0].content | trim }}{{ m.content }}"),
    "types": SAID.replace("{{ m.content }}", "{% if m.content is string and m.content is not none and m.content is defined %}{{ m.content }}{% else %}{{ m.content | tojson }}{% endif %}"),
    "blank or none": SAID.replace("{{ m.content }}", "{% if m.content and m.content != '' and m.content != none %}{{ m.content | default('x') }}{% else %}none{% endif %}"),
    "chosen": SAID.replace("in messages", "in messages | rejectattr('role', 'equalto', 'tool')"),
    "sequences": SAID.replace("{{ m.content }}", "{{ m.content is iterable }}{{ m.content is sequence }}{{ m.content is mapping }}"),
    "a macro": "{% macro said(m) %}{{ m.role }}{% endmacro %}{% for m in messages %}{{ said(m) }}{{ m.content }}{% endfor %}",
    "keys": SAID.replace("{{ m.content }}", "{{ 'tool_calls' in m }}{{ m.get('content') }}"),
}  # fmt: skip
LOOKS = [
    *(f"m.content | {it}" for it in ["length", "upper", "int", "float(0.5)", "tojson", "first", "list", "string", "e", "safe", "indent"]),
    *("m.content | replace('a', 'b')", "m.content | trim('a')", "'%s' % m.content", "'{}'.format(m.content)"),
    *(f"m.content is {it}" for it in ("lower", "escaped", "in(['a'])", "sameas messages[0].content")),
    *(f"m.content {it}" for it in ("~ ''", "* 2", "+ 1", "in 'abc'", "in ['a', 'b']", "== 'a'", "!= 'a'", "< 'b'")),
    *(f"m.content{it}" for it in ("[0]", ".split('a')", ".strip('a')", ".strip", ".x", " == messages[0].content")),
    *(f"{it}(m.content)" for it in ("raise_exception", "range", "strftime_now", "{'42': 'b'}.get")),
    *("'a' in m.content", "{'a': 'b'}[m.content]", "m[m.content]", "[5, 6][m.content]", "[m.content, 'a'] | max"),
    *(f"[m.content] | {it}" for it in ("join", "unique | list", "pprint")),
    *(f"m{it}" for it in ("", " | list", ".items() | list", " | reverse | list", ".copy()", " | dictsort", ".values() | list")),
    *("dict(m)", "messages | tojson", "messages | map(attribute='content') | join"),
    "messages | map(attribute='content') | sum(start=messages[0].content)",
    "messages | selectattr('content', 'equalto', 'a') | list | length",
    *("messages | groupby('content') | list | length", "messages | sort(attribute='content') | first"),
]  # fmt: skip
"Expressions on a message `m` that a content decides."
CAPTURES = [
    "{% macro said(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ said(m) | upper }}{% endfor %}",
    "{% for m in messages %}{% set said %}{{ m.content }}{% endset %}{{ 'a' in said }}{% endfor %}",
    "{% for m in messages %}{% filter upper %}{{ m.content }}{% endfilter %}{% endfor %}",
    "{% for m in messages %}{% autoescape true %}{{ m.content }}{% endautoescape %}{% endfor %}",
    "{% block said %}{% for m in messages %}{{ m.content }}{% endfor %}{% endblock %}{{ self.said() | length }}",
    "{% for m in [messages] recursive %}{% if m.content is defined %}{{ m.content }}{% else %}{{ loop(m) | length }}{% endif %}{% endfor %}",
    "{% macro said() %}{{ caller() | upper }}{% endmacro %}{% call said() %}{{ messages[0].content }}{% endcall %}",
]
CONTENTS = (
    "",
    " ",
    "a",
    "b\n",
    "<think>x</think>y",
    " {{ z }} ",
    "é\U0001f600",
    "<s>",
    "{% if %}",
    "42",
    "%s",
)


def draw_plain_conversations(count: int) -> Iterator[list[dict[str, str]]]:
    """Yield valid conversations of 2 to 8 messages, most of them a plain dialogue."""
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


def render_by_transformers(
    source: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    **variables_of_record: Any,
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {**VARIABLES, **variables_of_record, "add_generation_prompt": add_generation_prompt}
    return render_jinja_template([messages], chat_template=source, **variables)[0][0]


def text_or_fault(render: Any, *arguments: Any, **options: Any) -> str | None:
    try:
        return str(render(*arguments, **options))
    except Exception:
        return None


def test_rendering_equals_transformers() -> None:
    """For every prefix of a conversation, with and without the generation prompt, failures
    included. Without a template, Foundry takes ChatML.
    """
    day, tried = format_today(), 0
    for chosen in (*TEMPLATES.values(), *REWRITING.values(), None):
        template, source = open_template(chosen, VARIABLES, day), chosen or CHATML
        for messages in draw_plain_conversations(7):
            for end, add_generation_prompt in product(range(1, len(messages) + 1), (False, True)):
                prefix = messages[:end]
                expected = text_or_fault(
                    render_by_transformers,
                    source,
                    prefix,
                    add_generation_prompt,
                    **VARIABLES,
                    date_string=day,
                )
                assert text_or_fault(template.render, prefix, add_generation_prompt) == expected, (
                    source,
                    prefix,
                )
                tried += expected is not None
    assert tried > 600


def turns_or_reason(
    render: Any, messages: list[dict[str, str]], trained: Sequence[bool] | None = None
) -> list[tuple[str, str]] | str:
    try:
        return list(render(Conversation(messages, trained)))
    except RecordRefused as fault:
        return fault.why


def render_turns(template: ChatTemplate, conversation: Conversation) -> list[tuple[str, str]]:
    """Return the turns of a conversation, each prefix of which the template renders."""
    before, turns = "", []
    for answer in find_trained_answers(conversation):
        prompt = template.render(conversation.messages[:answer], True)
        full = template.render(conversation.messages[: answer + 1], False)
        if not prompt.startswith(before) or not full.startswith(prompt):
            raise RecordRefused("not_prefix_stable")
        turns.append((prompt[len(before) :], full[len(prompt) :]))
        before = full
    return turns


def find_layouts(source: str) -> set[bool]:
    """Return whether the template has a layout for the roles of conversations, over many of them.
    Check that turns from a layout are those of rendering each prefix, also if some answers are not
    trained.
    """
    rng = random.Random(0)
    template, has_layout = open_template(source, VARIABLES, "2026-01-01"), set[bool]()
    marked = f"a{PLACEHOLDER_PATTERN.replace('[0-9]+', '1')}b"
    swapped, with_key = (
        [{"content": question, "role": "user"}, {"content": answer, "role": "assistant"}]
        for question, answer in (("a", ""), (marked, KEY))
    )
    for messages in (*draw_plain_conversations(25), swapped, with_key):
        turns = turns_or_reason(template.render_turns, messages)
        expected = turns_or_reason(partial(render_turns, template), messages)
        assert turns == expected, (source, messages)
        flags = rng.choices([True, False], k=len(messages))
        in_part = turns_or_reason(template.render_turns, messages, flags)
        by_prefix = turns_or_reason(partial(render_turns, template), messages, flags)
        assert in_part == by_prefix, (source, messages, flags)
        roles = tuple(message["role"] for message in messages)
        if isinstance(turns, list) or roles[0] == "user":
            has_layout.add(bool(find_layout_for_roles(template, roles)))
    conversations = [Conversation(messages) for messages in draw_plain_conversations(25)]
    conversations += [
        Conversation(messages, rng.choices([True, False], k=len(messages)))
        for messages in draw_plain_conversations(25)
    ]
    alike = render_alike(template, find_plain(conversations), NO_WORDS)
    for position, turns in alike.items():
        assert list(turns) == render_turns(template, conversations[position])
    return has_layout


def test_a_template_that_only_prints_contents_is_rendered_once_for_the_same_roles() -> None:
    looks = {"forgets", "generation", "deepseek_r1", "qwen_3", "gpt_oss", "mistral_v3"}
    for name, source in (TEMPLATES | REWRITING | PRINTS | {"qwen": tool_styles.QWEN_2_5}).items():
        assert (True in find_layouts(source)) == (name not in looks), name
    assert find_layouts(PRINTS["types"]) == find_layouts(PRINTS["keys"]) == {True}
    template = open_template(SAID.replace("{{ m.content }}", "{{ m.name }}"), VARIABLES)
    named = [{"role": role, "content": "a", "name": "b"} for role in ("user", "assistant")]
    assert template.render_turns(Conversation(named)) == [("<user>b<assistant>", "b")]


def test_only_plain_conversations_are_rendered_together() -> None:
    """Those of the same roles, in any order. Blank contents and everything else are left out."""
    template = open_template(SAID.replace("{{ m.content }}", "100%{{ m.content | trim }}"), {})
    roles = ["user", "assistant"]
    plain = [numbered_messages(*roles * exchanges) for exchanges in (1, 2, 1, 2, 1)]
    plain[2][0]["content"] = "  padded %s"
    plain.append(numbered_messages("system", *roles))
    blank = [numbered_messages(*roles), numbered_messages("system", *roles)]
    blank[0][0]["content"] = " \n"
    blank[1][0]["content"] = ""
    named = numbered_messages(*roles)
    named[0]["name"] = "b"
    others = [
        *map(Conversation, [*blank, named]),
        Conversation(plain[0], tools=[]),
        Conversation(plain[0], variables={"bos_token": ""}),
        RichConversation(plain[0]),
    ]
    conversations = [*map(Conversation, plain), *others]
    expected = [template.render_turns_by_prefix(Conversation(messages)) for messages in plain]
    order = random.Random(0).sample(range(len(conversations)), len(conversations))
    mixed = find_plain([conversations[number] for number in order])
    alike = render_alike(template, mixed, NO_WORDS)
    for position, number in enumerate(order):
        turns = alike.get(position)
        found = None if turns is None else list(turns)
        assert found == (expected[number] if number < len(plain) else None), conversations[number]


def test_conversations_that_split_a_control_word_are_not_rendered_together() -> None:
    """Prompts end in the content of the question. Only those that end in the beginning of the word
    that the answer continues are left out.
    """
    template = open_template("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    words = ControlWords(["</think>"])
    exchanges = [("Why?", "So."), ("Why <", "/think>"), ("Why <", "So."), ("a</t", "hink>b")]
    conversations = [Conversation(make_dialogue(*exchange)) for exchange in exchanges]
    alike = render_alike(template, find_plain(conversations), words)
    assert {position: [*turns] for position, turns in alike.items()} == {
        0: [("Why?", "So.")],
        2: [("Why <", "So.")],
    }


def test_a_template_that_inspects_contents_is_rendered_for_each_conversation() -> None:
    """So is a template that strips the last message only: the text of a prompt ends before the
    space that the next text prints.
    """
    stripped = "{{ m.content.strip() if loop.last else m.content }}"
    sources = [SAID.replace("{{ m.content }}", f"{{{{ {look} }}}}") for look in LOOKS]
    for source in (*sources, *CAPTURES, f"{{% for m in messages %}}{stripped}{{% endfor %}}"):
        assert find_layouts(source) == {False}, source
    for look in LOOKS:
        find_layouts(
            SAID.replace("{{ m.content }}", f"{{% if {look} %}}{{{{ m.content }}}}{{% endif %}}")
        )


def test_faults_of_a_template_have_a_reason() -> None:
    for source, reason in (
        ("{{ messages[0].nothing.at_all }}", "template_error"),
        ("{{ messages[0].__class__.__mro__[1] }}", "template_error"),
        *(("{% include 'secret' %}", "template_error"), (NO_SYSTEM, "template_error")),
        ("{{ messages | length }}", "not_prefix_stable"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "not_prefix_stable"),
        (GENERATION.replace("%}A:{% endif", "%}B:{% endif"), "not_prefix_stable"),
    ):
        roles = ["system"] * (source == NO_SYSTEM) + ["user", "assistant"]
        with pytest.raises(RecordRefused, match=reason):
            open_template(source, {}).render_turns(Conversation(numbered_messages(*roles)))
    empty = open_template("", {})  # a template all the same: Foundry takes ChatML for none
    assert empty.render_turns(Conversation(numbered_messages("user", "assistant"))) == [("", "")]
    forgetful, messages = open_template(FORGETS, {}), numbered_messages(*["user", "assistant"] * 2)
    assert len(forgetful.render_turns(Conversation(messages))) == 2
    messages[1]["content"] = "<think>hm</think>yes"
    with pytest.raises(RecordRefused, match="not_prefix_stable"):
        forgetful.render_turns(Conversation(messages))
    with pytest.raises(RecipeError, match="cannot be compiled"):
        open_template("{% for m in messages %}", {})


def test_the_date_is_the_pinned_day_or_today_as_in_foundry() -> None:
    for pinned in ("2026-01-02", "02 Jan 2026"):
        template = open_template(DATED, VARIABLES, pinned)
        assert template.render(numbered_messages("user"), False).startswith("02 Jan 2026 2026\n")
        assert open_template(DATED, VARIABLES, pinned) is template, "compiled once"
    before = format_today()
    shown = open_template(DATED, {}).render(numbered_messages("user"), False)
    assert shown.startswith((before, format_today())), "midnight may have passed"
    assert parse_day(format_today()).strftime("%d %b %Y") == format_today()
    by_clock = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    dated = [open_template(source, {}).prints_date for source in (DATED, by_clock, None)]
    assert dated == [True, True, False]
    with pytest.raises(RecipeError, match="date_string is 'soon'"):
        open_template(None, {}, "soon")


def test_a_template_has_the_functions_of_transformers_but_no_random_ones() -> None:
    for source, text in (
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ raise_exception is defined }}{{ random is defined }}", "TrueFalse"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}{% set z = 1 %}{{ z }}{{ y }}{% endgeneration %}{{ z }}", "11"),
    ):  # fmt: skip
        assert make_template_sandbox().from_string(source).render(y=1) == text
    for source in ("{{ [1, 2] | random }}", "{{ lipsum() }}"):
        with pytest.raises(TemplateError):
            make_template_sandbox().from_string(source).render()


def test_arguments_of_tojson_have_the_order_of_transformers() -> None:
    """The first argument of jinja2's own filter is the indent; here `tojson(2)` is ASCII without an
    indent.
    """
    messages = [{"role": "user", "content": "é", "b": {"z": 1, "a": [2]}}]
    calls = (
        "",
        "2",
        "false, 2",
        "true, none",
        "indent=4",
        "separators=(',', ':')",
        "false, 1, none, true",
    )
    for call in calls:
        source = f"{{{{ messages | tojson({call}) }}}}"
        printed = open_template(source, VARIABLES).render(messages, False)
        assert printed == render_by_transformers(source, messages, False)


def test_attributes_of_values_are_those_of_jinja2() -> None:
    """Keys of dicts, methods, and what the sandbox forbids of one type and not of another. It is
    asked twice.
    """

    class Keyed(dict[str, Any]):
        role = "of the class"
        append = "safe, of a list not"

    def generate() -> Iterator[int]:
        yield 1

    reference, sandbox = ImmutableSandboxedEnvironment(), make_template_sandbox()
    values = ({"role": 1, "items": 2, "__class__": 3}, Keyed(role=1, b=2), "text", [1], 5, None)
    callables = (generate(), generate, "x".join, str, reference.undefined(name="x"))
    names = ("role", "b", "items", "clear", "append", "upper", "__class__", "gi_frame", "mro")
    found = set[str]()
    for value, name in product((*values, *callables), (*names, *names)):
        results = list[Any]()
        for environment in (reference, sandbox):
            try:
                result = environment.getattr(value, name)
                kind = result._undefined_exception if isinstance(result, Undefined) else None
                results.append((kind, str(result)) if kind is not SecurityError else kind)
            except UndefinedError as error:
                results.append(str(error))
        assert results[0] == results[1], (value, name)
        found.add(str(results[0]))
    assert {"(None, '1')", "(None, 'of the class')", str(SecurityError)} < found
