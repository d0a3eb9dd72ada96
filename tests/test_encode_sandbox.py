"""A chat template reaches nothing outside the conversation, and has what transformers gives it."""

from __future__ import annotations

from datetime import datetime

import pytest
from jinja2 import TemplateError

from mdsmix.encode.budget import RANGE_LIMIT
from mdsmix.encode.sandbox import template_sandbox

DAY = datetime(2026, 1, 2)


def rendered(source: str, **variables: object) -> str:
    return template_sandbox(DAY).from_string(source).render(**variables)


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
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
    ],
)
def test_what_would_reach_out_or_run_for_ever_fails(source: str) -> None:
    with pytest.raises(Exception, match=r".") as failure:
        rendered(source, messages=[])
    assert not isinstance(failure.value, AssertionError)


def test_each_rendering_has_the_whole_range() -> None:
    template = template_sandbox(DAY).from_string("{{ range(n) | length }}")
    assert [template.render(n=RANGE_LIMIT) for _ in range(2)] == [str(RANGE_LIMIT)] * 2


@pytest.mark.parametrize("source", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_nothing_is_drawn_at_random(source: str) -> None:
    with pytest.raises(TemplateError):
        rendered(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
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
