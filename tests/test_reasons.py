"""The codes that the package gives are those of its table, from which the page is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mdsmix
from mdsmix.kinds.encodings import KINDS
from mdsmix.record import BAD as OF_ALL
from mdsmix.record import FILTERED

BAD = OF_ALL | {code: text for kind in KINDS for code, text in kind.reasons.items()}
CALLS = ("Bad", "NoRecord", "RecordRefused")


def calls() -> Iterator[tuple[str, list[str]]]:
    """The name of each call of the package, and the texts in its argument that gives a reason."""
    for path in Path(mdsmix.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:  # fmt: skip
                given = ast.walk(node.args[0])
                yield (
                    node.func.id,
                    [c.value for c in given if isinstance(c, ast.Constant) and c.value],
                )


def test_every_reason_that_is_given_is_in_the_table() -> None:
    found = {code for _, codes in calls() for code in codes}
    assert len(found) > 40
    assert found <= BAD.keys() | FILTERED.keys()
    assert not BAD.keys() & FILTERED.keys()


def test_every_code_of_the_table_is_given_somewhere() -> None:
    text = "\n".join(
        path.read_text("utf-8")
        for path in Path(mdsmix.__file__).parent.rglob("*.py")
        if path.name != "reasons.py"
    )
    assert [code for code in (*BAD, *FILTERED) if f'"{code}"' not in text] == []
