"""A chat template from anyone: it reaches nothing, and one that does not end ends the run with a sentence.

What a rendering may take is in mdsmix/encode/bounds.py; every way that is known here to make much of little is tried.
"""

from __future__ import annotations

import gc
import json
import re
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdsmix.encode import bounds
from mdsmix.encode.chat import NotRendered, open_template
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation
from tests.abuse.conftest import MEMORY, Arena
from tests.converting import chats, manifest_of, quarantined, write_jsonl

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
BIG = "{% set x = 'a' * 100000 %}"
NS = "{% set ns = namespace(x='ab') %}"


def nested(start: str, times: int) -> str:
    return start * times + "{% endfor %}" * times


def repeated(first: str, step: str, times: int = 60) -> str:
    return first + step * times + "{{ x }}"


OUT_OF_BOUNDS = (
    r"The chat template of the tokenizer takes more than \S+ (s|MiB) of (time|memory) over the conversation that begins "
    r"with '\w', so that the conversion would not end: correct its chat_template\."
)
GREEDY = {
    "a product": "{{ 'a' * 10**9 }}",
    "a product the other way": "{{ 10**9 * 'a' }}",
    "a list": "{% set x = [0] * 10**9 %}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a product of numbers": repeated("{% set x = 9 ** 999 %}", "{% set x = x * x %}"),
    "loops in one list": "{% set l = range(300) | list %}" + nested("{% for a in l %}", 4),
    "loops over what was said": nested("{% for m in messages * 100 %}", 4),
    "loops over constants": nested(f"{{% for a in [{','.join('1' * 99)}] %}}", 6),
    "loops over a range": nested("{% for a in range(99999) %}", 2),
    "a loop in a loop's filter": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "a cycler": "{% set c = cycler(1, 2) %}"
    + "{% for i in range(999) %}{% for j in [0] * 9999 %}{{ c.next() }}{% endfor %}{% endfor %}",
    "a sum that doubles": NS + "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a text that doubles": NS + "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "sums one by one": repeated("{% set x = 'ab' %}", "{% set x = x + x %}"),
    "lists of lists": repeated("{% set x = ['ab'] %}", "{% set x = [x, x] %}"),
    "lists and lists": repeated("{% set x = ['ab'] %}", "{% set x = x + x %}"),
    "objects of objects": repeated("{% set x = {'a': 1} %}", "{% set x = dict(a=x, b=x) %}"),
    "namespaces": repeated("{% set x = 1 %}", "{% set x = namespace(a=x, b=x) %}"),
    "cyclers of cyclers": repeated("{% set x = ['a'] %}", "{% set x = cycler(x, x).items %}"),
    "sums of lists": repeated("{% set x = ['a'] %}", "{% set x = [x, x] | sum(start=[]) %}"),
    "quotes in quotes": "{% set x = '\"' %}{{ x" + " | tojson" * 60 + " }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width of format": "{{ '{:>1000000000}'.format(1) }}",
    "a width from a value": "{{ '{:{}}'.format(1, 10**9) }}",
    "a width from a star": "{{ '%*d' | format(1000000000, 1) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "ljust by another way": "{{ 'a'['ljust'](1000000000) }}{{ ('a' | attr('zfill'))(1000000000) }}",
    "center for each": "{{ ['a'] | map('center', 1000000000) | list }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "replace": BIG + "{{ x.replace('a', x) }}",
    "replace as a filter": BIG + "{{ x | replace('', x) }}",
    "join": BIG + "{{ range(99999) | join(x) }}",
    "join as a method": BIG + "{{ x.join(x) }}",
    "indent": BIG + "{{ ('a\n' * 1000) | indent(x) }}",
    "an indent of JSON": "{{ [[1]] | tojson(indent=1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "wordwrap": BIG + "{{ ('a ' * 1000) | wordwrap(1, wrapstring=x) }}",
    "a macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "a macro that doubles": "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('ab') }}",
    "a loop in itself": "{% set l = [1, 2] %}{% for x in l recursive %}{{ loop(l) }}{% endfor %}",
    "a block in itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "much printed": BIG + "{% for i in range(99999) %}{{ x }}{% endfor %}",
    "much printed in a macro": BIG
    + "{% macro m() %}{% for i in range(99999) %}{{ x | upper }}{% endfor %}{% endmacro %}{{ m() }}",
    "much printed behind what is kept": BIG
    + "{% macro m() %}{% set y %}a{% endset %}"
    + "{% for i in range(99999) %}{{ x | upper }}{% endfor %}{% endmacro %}{{ m() }}",
    "much printed into a name": BIG
    + "{% set y %}{% for i in range(99999) %}{{ x + x }}{% endfor %}{% endset %}",
    "a long sum": BIG + "{{ " + " + ".join(["x"] * 150) + " }}",
}
REACHING = {
    "the classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the globals": "{{ cycler.__init__.__globals__.os.system('touch ../sprung') }}",
    "the frame": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "a format": "{{ '{0.__class__.__init__.__globals__}'.format(range) }}",
    "a file": "{% include '../precious.jsonl' %}",
    "another template": "{% import '../precious.jsonl' as p %}{% extends 'a' %}",
    "the environment": "{{ self.environment.loader }}{{ self._TemplateReference__context.environment.x.y }}",
    "what was said": "{% set _ = messages.append(1) %}",
}
UNREADABLE = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "loops": nested("{% for a in messages %}", 500),
    "digits": "{{ " + "9" * 100_000 + " }}",
    "no template": "{% for",
    "no such filter": "{{ 1 | system('id') }}",
}


SAID = Conversation(MESSAGES)
ONE_LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}SOURCE{% endif %}"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Half a second of patience. What hypothesis hangs onto the garbage collector is taken off meanwhile: in a large process most of
    the time goes there, and Python drops an alarm's exception that comes up in such a callback."""
    monkeypatch.setattr(bounds, "SECONDS", 0.5)
    kept = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = kept


@pytest.mark.parametrize("around", ["SOURCE", ONE_LOOP], ids=["alone", "behind the loop"])
@pytest.mark.parametrize("source", (GREEDY | REACHING).values(), ids=(GREEDY | REACHING).keys())
def test_compiling_it_works_nothing_out(source: str, around: str) -> None:
    began, memory = time.process_time(), _peak()
    open_template(around.replace("SOURCE", source), {"bos_token": "<s>"}, "2026-01-01")
    assert time.process_time() - began < 10  # worked out: minutes, or memory
    assert _peak() - memory < 64 << 20


@pytest.mark.parametrize("source", GREEDY.values(), ids=GREEDY.keys())
def test_a_batch_of_it_ends_in_little_time_and_memory(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.1)  # here nothing ends too early
    template = open_template(source, {"bos_token": "<s>"}, "2026-01-01")
    began, memory = time.process_time(), _peak()
    with pytest.raises((RecipeError, NotRendered)) as ended, template.bounded(len(SAID.said)):
        raise AssertionError(len([template.turns(SAID) for _ in range(99)]))
    assert time.process_time() - began < 30  # without a bound: hours
    assert _peak() - memory < MEMORY
    if isinstance(ended.value, RecipeError):
        assert re.fullmatch(OUT_OF_BOUNDS, str(ended.value))


def test_what_is_over_is_over_for_the_next_ones_too() -> None:
    """The alarm and the limit are gone when the batch is: who comes after has its own."""
    alarm, limit = signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_DATA)
    template = open_template(GREEDY["a product"], {}, "2026-01-01")
    for _ in range(2):
        with pytest.raises(RecipeError, match="of memory"), template.bounded(len(SAID.said)):
            template.turns(SAID)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == alarm
    assert resource.getrlimit(resource.RLIMIT_DATA) == limit


def test_no_alarm_is_raised_where_nothing_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor while an error of the batch is on its way out: a MemoryError lets go of its frames for longer than the alarm waits."""
    monkeypatch.setattr(bounds, "SECONDS", 0.02)
    template = open_template(ONE_LOOP.replace("SOURCE", ""), {}, "2026-01-01")
    with template.bounded(len(SAID.said)):
        template.turns(SAID)
        time.sleep(0.2)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.parametrize("source", REACHING.values(), ids=REACHING.keys())
def test_what_reaches_out_fails_on_each_conversation(source: str) -> None:
    template = open_template(source, {"bos_token": "<s>"}, "2026-01-01")
    with pytest.raises(NotRendered, match="template_error"):
        template.turns(SAID)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("source", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_one_that_cannot_be_read_is_a_sentence(source: str) -> None:
    with pytest.raises(RecipeError, match="correct its chat_template") as refusal:
        open_template(source, {}, "2026-01-01")
    assert len(str(refusal.value)) < 400


def with_template(arena: Arena, source: str) -> Path:
    """The recipe of ten conversations, numbered, under this template."""
    folder = arena.home / "tokenizer"
    shutil.copytree(arena.tokenizer, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": source}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    said = [[{"role": "user", "content": str(n)}, *MESSAGES[1:]] for n in range(10)]
    write_jsonl(arena.home / "a.jsonl", [{"messages": messages} for messages in said])
    return arena.recipe(tokenizer=folder, streams={"chat": chats("a.jsonl")})


HOSTILE = "{% if messages[0].content == '7' %}BOMB{% endif %}{% for m in messages %}{{ m.role + m.content }}{% endfor %}"


@pytest.mark.parametrize("bomb", ["loops over a range", "a product", "a sum that doubles"])
def test_the_command_ends_with_the_conversation_that_a_template_does_not_end_on(
    arena: Arena, bomb: str
) -> None:
    recipe = with_template(arena, HOSTILE.replace("BOMB", GREEDY[bomb]))
    answer = arena.run("convert", recipe, "--workers", 1)
    assert answer.code == 2
    *_, error = answer.err.splitlines()
    assert re.fullmatch(f"error: {OUT_OF_BOUNDS}", error)
    assert "begins with '7'" in error
    assert arena.run("convert", recipe, "--dry-run").code == 0, "only the worker renders"


def test_the_command_sets_aside_what_a_template_fails_on(arena: Arena) -> None:
    recipe = with_template(arena, HOSTILE.replace("BOMB", REACHING["the globals"]))
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    folder = arena.out / "chat" / "train"
    records = manifest_of(folder).records
    assert (records.written, records.quarantined) == (9, {"template_error": 1})
    assert [bad["line"] for bad in quarantined(folder)] == [8]
