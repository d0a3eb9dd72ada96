"""The codes that the package gives are those of its table, from which the page is made."""

import ast
import re
from pathlib import Path

import mdsmix
from mdsmix.kinds.encodings import KINDS
from mdsmix.record import BAD as OF_ALL
from mdsmix.record import FILTERED

BAD = OF_ALL | {code: text for kind in KINDS for code, text in kind.reasons.items()}
GIVES = re.compile(r"\b(?:Bad|NoRecord|RecordRefused)\(")


def test_every_reason_that_is_given_is_in_the_table_and_every_one_of_the_table_is_given() -> None:
    assert not BAD.keys() & FILTERED.keys()
    files = [path.read_text("utf-8") for path in Path(mdsmix.__file__).parent.rglob("*.py")]
    given = set[str]()
    for text in filter(GIVES.search, files):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and GIVES.match(f"{ast.unparse(node.func)}("):
                constants = (n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant))
                given |= {code for code in constants if code}
    assert len(given) > 40
    assert given <= BAD.keys() | FILTERED.keys()
    text = "\n".join(files)
    assert [code for code in (*BAD, *FILTERED) if text.count(f'"{code}"') < 2] == []
