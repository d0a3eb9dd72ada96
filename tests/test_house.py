"""The house as README draws it: imports point one way and run in no circle, pages name what is
there, reasons stand in their table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from mdsmix.kinds.reasons import list_bad_reasons
from mdsmix.record import FILTERED

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mdsmix"
LAYERS = (
    {"cli"},
    {"report"},
    {"preview", "leaks"},
    {"init", "bench", "doctor", "conversion", "mix", "load"},
    {"estimate"},
    {"engines", "kinds", "foundry_yaml"},
    {"images"},
    {"shapes", "sources", "tokenizer", "processor", "encode", "shards"},
    {"recipe", "storage"},
)
"""As the README names them: a room imports those of its own line and of lines below, and the files
at the top of the package.
"""
PAGES = [*ROOT.glob("docs/*.md"), *PACKAGE.rglob("*.md")]
PAGES += [ROOT / "tests/README.md", ROOT / "benchmarks/README.md"]


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, those for type checkers and inside of
    functions too.
    """
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mdsmix"):
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if file_of(whole) else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("mdsmix"))


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


GRAPH = {p: {f for m in imports(p) if (f := file_of(m)) and f != p} for p in PACKAGE.rglob("*.py")}


def room(path: Path) -> str:
    """The first folder below the package; empty of files at its top."""
    return path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""


def test_imports_run_in_no_circle() -> None:
    """A package's `__init__` names what its files hold, and they may name it."""
    files = {p: {f for f in found if f.name != "__init__.py"} for p, found in GRAPH.items()}
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(str(p.relative_to(ROOT)) for p in error.args[1]))


def test_imports_point_one_way() -> None:
    levels = {name: number for number, names in enumerate(LAYERS) for name in names}
    assert {room(p) for p in GRAPH} - {""} == levels.keys()
    back = [
        f"{p.relative_to(ROOT)} -> {f.relative_to(ROOT)}"
        for p, found in GRAPH.items()
        for f in found
        if room(f) and (levels[room(f)] < levels[room(p)] if room(p) else True)
    ]
    assert back == []


def words(text: str) -> set[str]:
    """What stands between backticks outside of blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", text)))


CODE = [
    p for folder in ("mdsmix", "tests", "benchmarks", "docs") for p in (ROOT / folder).rglob("*.py")
]
EXAMPLES = {"my_shapes.py", "json_seq.py", "dolly.py"}
"Files of a reader's own, on pages."
FOREIGN = {"HF_HOME", "RAY_JOB_STOP_WAIT_TIME_S"}
"Names of other projects, which no code here mentions."


def test_files_that_a_page_names_are_there() -> None:
    """Of a room's README: in that room, where the name has no folder."""
    lost = []
    for page in PAGES:
        is_of_room = PACKAGE in page.parents
        near = {p.name for p in CODE if not is_of_room or page.parent in p.parents} | EXAMPLES
        for name in words(page.read_text("utf-8")):
            if re.fullmatch(r"[a-z_]+(/[a-z_]+)*\.py", name):
                is_there = any((folder / name).is_file() for folder in (ROOT, PACKAGE, page.parent))
                if not is_there and Path(name).name not in (EXAMPLES if "/" in name else near):
                    lost.append(f"{page.relative_to(ROOT)}: {name}")
    assert lost == []


def test_classes_and_constants_that_a_room_names_are_there() -> None:
    """A name that was changed in the code alone is found."""
    known = {word for p in CODE for word in re.findall(r"\w+", p.read_text("utf-8"))} | FOREIGN
    lost = {
        f"{page.relative_to(ROOT)}: {word}"
        for page in PACKAGE.rglob("*.md")
        for word in words(page.read_text("utf-8")) - known
        if re.fullmatch(r"[A-Z][a-z]+([A-Z][a-z]+)+|[A-Z]+(_[A-Z]+)+", word)
    }
    assert lost == set()


REASONS = list_bad_reasons()
GIVES = re.compile(r"\b(?:BadImage|NoRecord|RecordRefused)\(")


def test_every_reason_that_is_given_is_in_the_table_and_every_one_of_the_table_is_given() -> None:
    assert not REASONS.keys() & FILTERED.keys()
    files = [path.read_text("utf-8") for path in GRAPH]
    given = set[str]()
    for text in filter(GIVES.search, files):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and GIVES.match(f"{ast.unparse(node.func)}("):
                constants = (n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant))
                given |= {code for code in constants if code}
    assert len(given) > 40
    assert given <= REASONS.keys() | FILTERED.keys()
    text = "\n".join(files)
    assert [code for code in (*REASONS, *FILTERED) if text.count(f'"{code}"') < 2] == []
