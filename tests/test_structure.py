"""The structure that README describes: imports point one way and form no circle, pages name files
and classes that exist, and every reason code is in its table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from mdsmix.foundry_yaml.extra_loaders import EXTRA_LOADERS
from mdsmix.kinds.kind_table import KINDS, find_kinds, list_kinds
from mdsmix.kinds.reasons import list_bad_reasons
from mdsmix.record import FILTERED

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mdsmix"
LAYERS = (
    {"__main__"},
    {"cli"},
    {"__init__", "api"},
    {"report"},
    {"preview", "leaks", "callbacks", "exporting"},
    {"init", "example", "bench", "doctor", "conversion", "mix", "load"},
    {"estimate"},
    {"engines", "kinds"},
    {"images", "foundry_yaml"},
    {"shapes", "sources", "tokenizer", "processor", "encode", "shards"},
    {"recipe", "storage"},
)
"""The lines of README: a package imports packages of its own line and of lines below, and the files
at the top of `mdsmix/`. The Python API is files at the top that import packages.
"""
API = {"__init__", "__main__", "api"}
PAGES = [*ROOT.glob("docs/*.md"), *PACKAGE.rglob("*.md")]
PAGES += [ROOT / "tests/README.md", ROOT / "benchmarks/README.md"]


def list_imports(path: Path) -> Iterator[str]:
    """Yield the modules of mdsmix that a file imports, also in functions and for type checkers."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mdsmix"):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if find_file(submodule) else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("mdsmix"))


def find_file(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def make_graph() -> dict[Path, set[Path]]:
    """Map each file of mdsmix to the files that it imports."""
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        files = {find_file(module) for module in list_imports(path)}
        graph[path] = {file for file in files if file and file != path}
    return graph


GRAPH = make_graph()


def package_of(path: Path) -> str:
    """Return the first folder below `mdsmix/`. For a file at its top: its name if it is of the
    Python API, otherwise an empty string.
    """
    if path.parent != PACKAGE:
        return path.relative_to(PACKAGE).parts[0]
    return path.stem if path.stem in API else ""


def test_imports_form_no_circle() -> None:
    """A package's `__init__` imports its files, and they may import it."""
    graph = {}
    for path, imported in GRAPH.items():
        graph[path] = {file for file in imported if file.name != "__init__.py"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(str(path.relative_to(ROOT)) for path in error.args[1]))


def test_imports_point_one_way() -> None:
    levels = {name: number for number, names in enumerate(LAYERS) for name in names}
    assert {package_of(path) for path in GRAPH} - {""} == levels.keys()
    back = []
    for path, imported in GRAPH.items():
        for file in imported:
            package, other = package_of(path), package_of(file)
            if not other or other == "__init__":  # `from mdsmix import __version__`
                continue
            if not package or levels[other] < levels[package]:
                back.append(f"{path.relative_to(ROOT)} -> {file.relative_to(ROOT)}")
    assert back == []


def list_code_words(page: str) -> set[str]:
    """Return the words between single backticks, outside fenced blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", page)))


CODE = list[Path]()
for folder in ("mdsmix", "tests", "benchmarks", "docs"):
    CODE += (ROOT / folder).rglob("*.py")
EXAMPLES = {"my_shapes.py", "json_seq.py", "dolly.py"}
"Files of a reader's own, on pages."
FOREIGN = {"HF_HOME", "RAY_JOB_STOP_WAIT_TIME_S"}
"Names of other projects, which no code here mentions."


def test_the_loader_of_each_kind_is_in_the_table_of_loaders() -> None:
    """Checks, rendering and `mdsmix.load` look loaders up in this table, and import no kinds for
    it.
    """
    own_loaders = {kind.loader.name: kind.loader for kind in list_kinds() if kind.loader}
    assert own_loaders == EXTRA_LOADERS


def test_each_kind_is_in_the_table_under_its_word() -> None:
    for word in KINDS:
        assert {kind.word for kind in find_kinds(word)} == {word}


def test_files_named_on_pages_exist() -> None:
    """A name without a folder in a package's README is a file of that package."""
    missing = []
    for page in PAGES:
        is_of_package = PACKAGE in page.parents
        near = {file.name for file in CODE if not is_of_package or page.parent in file.parents}
        near |= EXAMPLES
        for name in list_code_words(page.read_text("utf-8")):
            if not re.fullmatch(r"[a-z_]+(/[a-z_]+)*\.py", name):
                continue
            exists = any((folder / name).is_file() for folder in (ROOT, PACKAGE, page.parent))
            if not exists and Path(name).name not in (EXAMPLES if "/" in name else near):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert missing == []


def test_classes_and_constants_named_in_package_readmes_exist() -> None:
    """A name that was changed only in the code is found."""
    known = set(FOREIGN)
    for file in CODE:
        known.update(re.findall(r"\w+", file.read_text("utf-8")))
    missing = set()
    for page in PACKAGE.rglob("*.md"):
        for word in list_code_words(page.read_text("utf-8")) - known:
            if re.fullmatch(r"[A-Z][a-z]+([A-Z][a-z]+)+|[A-Z]+(_[A-Z]+)+", word):
                missing.add(f"{page.relative_to(ROOT)}: {word}")
    assert missing == set()


REASONS = list_bad_reasons()
RAISES = re.compile(r"\b(?:BadImage|NoRecord|RecordRefused)\(")


def test_the_reason_codes_in_the_code_are_those_of_the_tables() -> None:
    assert not REASONS.keys() & FILTERED.keys()
    texts = [path.read_text("utf-8") for path in GRAPH]
    raised = set[str]()
    for text in filter(RAISES.search, texts):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and RAISES.match(f"{ast.unparse(node.func)}("):
                constants = (n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant))
                raised |= {code for code in constants if code}
    assert len(raised) > 40
    assert raised <= REASONS.keys() | FILTERED.keys()
    all_text = "\n".join(texts)
    assert [code for code in (*REASONS, *FILTERED) if all_text.count(f'"{code}"') < 2] == []
