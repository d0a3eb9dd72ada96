"""A chat template reaches nothing outside the conversation, and has what transformers gives it."""

from __future__ import annotations

import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2 import Environment, TemplateError
from jinja2.sandbox import MAX_RANGE

from mdsmix.encode.bounds import bounded
from mdsmix.encode.chat import open_template
from mdsmix.encode.template_code import template_sandbox
from mdsmix.record import Conversation

SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
VARIABLES = {"items": [1, 2, 3], "text": "a<b", "tree": [[1, [2]], [3]], "none": None, "many": "ab"}
SOURCES = [
    "{% for i in items %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.nextitem }}{{ loop.revindex }}{% endfor %}",
    "{% for i in items if i > 1 %}{{ i }}{{ loop.length }}{% else %}none{% endfor %}",
    "{% for i in nothing %}x{% else %}none{% endfor %}",
    "{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}",
    "{% for t in tree recursive %}{{ t if t is number else '(' ~ loop(t) ~ ')' }}{{ loop.depth }}{% endfor %}",
    "{% for i in range(5000) %}{{ loop.last }}{% endfor %}",
    "{{ 'a' ~ 1 ~ none ~ nothing ~ text }}{{ 1 + 2 }}{{ [1] + items }}{{ 'a' + text + 'b' * 3 }}",
    "{% set x = text + 'c' %}{% set y = [x, items] %}{% set z = {'k': x} %}{{ y }}{{ z }}{{ (x, 1) }}",
    "{% set ns = namespace(n=0, t='') %}{% for i in items %}{% set ns.n = ns.n + i %}{% set ns.t = ns.t ~ i %}{% endfor %}{{ ns.n }}{{ ns.t }}",
    "{% macro m(a, b='x') %}{{ a + b }}{{ caller() if caller }}{% endmacro %}{{ m('y') }}{% call m('z', b='w') %}inside{% endcall %}",
    "{% set x %}{{ text | upper }}{{ items | join('-') }}{% endset %}{{ x }}{% filter upper %}{{ 'a' + text }}{% endfilter %}",
    "{{ items | join(', ') }}{{ items | map('string') | join }}{{ ', '.join(['a', 'b']) }}{{ [many] | map('replace', 'a', 'c') | list }}",
    "{{ text | replace('a', 'bb') }}{{ text.replace('a', 'c', 1) }}{{ text.center(9) }}{{ many | indent(2, first=true) }}{{ 'a b' | wordwrap(1) }}",
    "{{ '%s-%5d' % (text, 3) }}{{ '%s' | format(1) }}{{ '{:>5}{}'.format(1, text) }}{{ '{a}'.format_map({'a': 1}) }}{{ 7 % 3 }}{{ 2 ** 9 }}{{ 2.5 ** 2 }}",
    "{{ items | batch(2, 'x') | list }}{{ items | slice(2) | list }}{{ dict(a=1, b=text) }}{{ '7'.zfill(3) }}{{ items * 2 }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{% block b %}{{ text }}{% endblock %}{{ self.b() }}",
    "{{ text if none else 'b' + text }}{{ 'x' in ['x', text] }}{{ items[1:] }}{{ text[::-1] }}{{ -(1 + 2) }}",
    "{{ " + " + ".join(["text"] * 150) + " }}",
]


def rendered(source: str, **variables: object) -> str:
    return template_sandbox().from_string(source).render(**variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ raise_exception('no') }}",
        "{% set _ = messages.append(1) %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(100001) %}{% endfor %}",
        "{% autoescape 'a' | upper %}{% endautoescape %}",
        "{{ 9 ** 9999 }}",
        "{% set x = 9 ** 999 %}{{ x * x }}",
    ],
)
def test_what_would_reach_out_or_take_long_fails(source: str) -> None:
    with pytest.raises(Exception, match=r".") as failure:
        rendered(source, messages=[])
    assert not isinstance(failure.value, AssertionError)


def test_each_rendering_has_the_whole_range() -> None:
    template = template_sandbox().from_string("{{ range(n) | length }}")
    assert [template.render(n=MAX_RANGE) for _ in range(2)] == [str(MAX_RANGE)] * 2


@pytest.mark.parametrize("source", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_nothing_is_drawn_at_random(source: str) -> None:
    with pytest.raises(TemplateError):
        rendered(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ raise_exception is defined }}{{ random is defined }}", "TrueFalse"),
        (
            "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
            "13",
        ),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}x{{ y }}{% endgeneration %}", "x1"),
    ],
)
def test_it_has_the_extras_of_transformers(source: str, text: str) -> None:
    assert rendered(source, y=1) == text


@pytest.mark.parametrize("source", SOURCES)
def test_it_prints_what_jinja2_prints(source: str) -> None:
    plain = Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert rendered(source, **VARIABLES) == plain.render(**VARIABLES)


ACCUMULATES = (
    "{% set ns = namespace(text='', seen=[]) %}{% for m in messages %}"
    "{% set ns.text = ns.text + m.content %}{% set ns.seen = ns.seen + [m] %}{% endfor %}{{ ns.text }}"
)
LOOKS_AT_ALL = (
    "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("source", [ACCUMULATES, LOOKS_AT_ALL])
@pytest.mark.parametrize(("messages", "letters"), [(200, 1000), (3, 8_000_000)])
def test_a_long_conversation_is_within_bounds(source: str, messages: int, letters: int) -> None:
    said = ["user", "assistant", "user", "assistant"] * messages
    content = "\U0001f600" + "x" * (letters - 1)  # four bytes each
    conversation = Conversation([{"role": r, "content": content} for r in said[:messages]])
    template = open_template(source, {}, "2026-01-01")
    with template.bounded(len(conversation.said)):
        turns = template.turns(conversation)
    assert "".join(map("".join, turns)) == content * (messages // 2 * 2)


def test_a_process_that_has_a_limit_keeps_the_lower_one() -> None:
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    lower = (1 << 40, limit[1])
    resource.setrlimit(resource.RLIMIT_DATA, lower)
    try:
        with bounded(template_sandbox(), 1 << 40):
            assert resource.getrlimit(resource.RLIMIT_DATA) == lower
        assert resource.getrlimit(resource.RLIMIT_DATA) == lower
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limit)


def test_another_alarm_goes_on_after_the_batch() -> None:
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        with bounded(template_sandbox(), 1):
            assert signal.getitimer(signal.ITIMER_REAL)[0] < 100
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_a_thread_hears_no_alarm_and_renders_all_the_same() -> None:
    template, said = open_template(None, {}, "2026-01-01"), Conversation(SAID)

    def turns() -> object:
        with template.bounded(len(said.said)):
            return template.turns(said)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(turns).result() == turns()
