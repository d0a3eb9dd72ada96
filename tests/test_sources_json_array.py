"""Where the elements of a JSON array begin and end in the bytes of its file, by regular expressions
that Python 3.10 compiles too.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mdsmix.sources import json_array
from mdsmix.sources.json_array import _Scan

PACKAGE = Path(__file__).parents[1] / "mdsmix"
NEVER_BACK = re.compile(r"[+*?}]\+|\(\?>")
"Possessive quantifiers and atomic groups, which `re` knows since Python 3.11."
RAW = re.compile(r"""\b(?:r|rb|br)["']""")
COMPILED_BY_RUST = {"word_form.py"}


def import_under(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module as this version of Python imports it."""
    monkeypatch.setattr(sys, "version_info", version)
    spec = importlib.util.find_spec(json_array.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[(3, 10), sys.version_info[:2]], ids=["3.10", "this"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return import_under(request.param, monkeypatch)


def scan_byte_by_byte(data: bytes, depth: int, in_string: bool) -> tuple[int, _Scan]:
    """Return what `_scan` returns, by a look at each byte, and where it was found: at the end of
    the bytes, or of the array.
    """
    edges = list[int]()
    is_escaped = False
    begin = 0 if depth else data.find(b"[")
    if begin < 0:
        return len(data), _Scan([], 0, False)
    for position, byte in enumerate(data[begin:], begin):
        sign = chr(byte)
        if is_escaped:
            is_escaped = False
        elif sign == "\\":
            is_escaped = True
        elif sign == '"':
            in_string = not in_string
        elif not in_string:
            before = depth
            depth += (sign in "[{") - (sign in "]}")
            if min(before, depth) == 0 or (sign == "," and depth == 1):
                edges.append(position)
            if depth == 0:
                return position + 1, _Scan(edges, depth, in_string)
    return len(data), _Scan(edges, depth, in_string)


def test_elements_end_where_a_look_at_each_byte_says(module: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(20_000):
        data = bytes(draw.choices(b'[]{},"\\a ', k=draw.randint(0, 24)))
        depth = draw.randint(0, 4)
        in_string = depth > 0 and draw.random() < 0.3
        end, scan = scan_byte_by_byte(data.rstrip(b"\\"), depth, in_string)
        assert module._scan(data[:end], depth, in_string) == scan, data


def test_a_string_or_object_that_does_not_end_takes_time_in_proportion(module: ModuleType) -> None:
    """If parts of an expression could match in two ways, 40 of them would take years."""
    for data in (b'["' + b"\\na" * 5_000, b"[{" + b'"a": "b", ' * 5_000, b"[[" + b"1, " * 5_000):
        assert module._scan(data, 0, False).depth > 0


def test_regular_expressions_compile_under_python_3_10(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of json_array.py are compiled without what Python 3.10 does not know."""
    module = import_under((3, 10), monkeypatch)
    for compiled in (module._SIGN, module._STRING_END):
        assert not NEVER_BACK.search(compiled.pattern.decode())
    for path in PACKAGE.rglob("*.py"):
        if path.name == "json_array.py" or path.name in COMPILED_BY_RUST:
            continue
        for line in path.read_text("utf-8").splitlines():
            assert not (RAW.search(line) and NEVER_BACK.search(line)), (path, line)
