"""A chat template reaches nothing outside the conversation, and has what transformers gives it."""

from __future__ import annotations

import pytest
from jinja2 import Environment, TemplateError
from jinja2.sandbox import MAX_RANGE

from mdsmix.encode.template_code import template_sandbox

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
