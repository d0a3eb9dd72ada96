"""Which tests reach which function: every test file once under coverage, kept until the file changes.

A test file runs in a process of its own, and coverage follows forks and subprocesses. What ran there, or in a fixture,
belongs to no one test: then the whole file counts as reaching the function.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from coverage import CoverageData

from tests.mutants.places import function_at, functions
from tests.mutants.trial import cold_run

KEPT = Path(".mutants")
SETTINGS = """[run]
source_pkgs = mdsmix
data_file = {folder}/data
parallel = true
patch = fork, subprocess, _exit
dynamic_context = test_function
"""


@dataclass(frozen=True)
class TestFile:
    """What one test file reaches."""

    path: str
    digest: str
    seconds: dict[str, float]
    "Of each of its test functions."
    reached: dict[str, list[str]]
    "`file::function` -> the test functions that reach it; an empty name where only the file is known to."

    def tests(self, place: str) -> list[str]:
        """Arguments for pytest: those that reach the place, or the whole file."""
        names = self.reached.get(place, [])
        return [self.path] if "" in names else [f"{self.path}::{name}" for name in names]

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())

    def cost(self, place: str) -> float:
        names = self.reached.get(place, [])
        whole = self.seconds if "" in names else names
        return sum(self.seconds.get(name, 0) for name in whole)


def collect(copy: Path, patterns: Sequence[str]) -> list[TestFile]:
    """Every such test file but those for the environment of `make test-foundry`; one that fails here is left out."""
    found = []
    for path in sorted({p for pattern in patterns for p in (copy / "tests").rglob(pattern)}):
        name = str(path.relative_to(copy))
        if not name.startswith("tests/foundry"):
            found += _known(copy, name) or _measured(copy, name)
    return found


ROOM_TESTS = {
    "encode": ("test_kinds_*", "test_convert_history*", "abuse/test_template*"),
    "kinds": ("test_house_*", "test_encode_*", "test_convert_changes*", "test_convert_images*"),
    "shapes": ("test_kinds_*", "test_convert_shapes*", "test_convert_advice*"),
    "images": ("test_kinds_images*", "test_convert_images*", "with_torch/test_load_vision*"),
    "shards": ("test_convert_*", "abuse/test_*", "test_cli_inspect*"),
    "training": ("test_mix_*", "with_torch/test_load_*"),
    "recipe": ("test_mix_shares*", "test_convert_budget*", "test_kinds_*", "abuse/test_recipe*"),
    "convert": ("test_cli_*", "test_house_*"),
    "engines": ("test_convert_long*", "test_convert_run*"),
    "sources": ("test_convert_*", "test_house_formats*", "abuse/test_*"),
    "storage": ("test_convert_put*", "e2e/test_storage_*", "e2e/test_faults*"),
    "preview": ("with_torch/test_load_vision*",),
    "report": ("test_cli_*", "test_mix_cli*", "with_torch/test_preview_cli*"),
    "cli": ("test_mix_cli*", "with_torch/test_preview_cli*"),
}
"The test files that most likely notice a fault in a room, beside those that are named for it, as patterns."
LEFT_OUT = ("tests/foundry", "tests/stores", "tests/abuse/test_long_line.py")
"Of other environments; and one that fails in a process that has 16 GiB of addresses."
LINES_A_SECOND = 40
"About how fast tests run, for an order from cheap to dear."


def by_room(copy: Path) -> list[TestFile]:
    """Every test file, taken to reach all of the rooms that it is for. No run is needed first; what only tests beyond the
    patience would notice counts as unnoticed, so the score is a lower bound."""
    every = (copy / "mdsmix").iterdir()
    rooms = {path.stem for path in every if path.is_dir() or path.suffix == ".py"}
    reached = {room: _places(copy, room) for room in rooms}
    found = []
    for path in sorted((copy / "tests").rglob("test_*.py")):
        name = str(path.relative_to(copy / "tests"))
        places = {place: [""] for room in rooms if _is_for(name, room) for place in reached[room]}
        seconds = 2 + path.read_text().count("\n") / LINES_A_SECOND
        found.append(TestFile(f"tests/{name}", "", {"": seconds}, places))
    return [test for test in found if not test.path.startswith(LEFT_OUT)]


def _places(copy: Path, room: str) -> list[str]:
    """Of a folder, or of a module that is a room of its own."""
    at = copy / "mdsmix" / room
    return [
        f"{file.relative_to(copy)}::{name}"
        for file in (at.rglob("*.py") if at.is_dir() else [at.with_suffix(".py")])
        for name in ("", *(name for name, _, _ in functions(file.read_text())))
    ]


def _is_for(name: str, room: str) -> bool:
    named = (f"test_{room}*", f"with_torch/test_{room}*")
    return any(fnmatch.fnmatch(name, each) for each in (*named, *ROOM_TESTS.get(room, ())))


def _known(copy: Path, name: str) -> list[TestFile]:
    kept = KEPT / f"{name.replace('/', '.')}.json"
    if not kept.exists():
        return []
    known = TestFile(**json.loads(kept.read_bytes()))
    return [known] if known.digest == _digest(copy / name) else []


def _measured(copy: Path, name: str) -> list[TestFile]:
    folder = copy / ".coverage-data"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "rc").write_text(SETTINGS.format(folder=folder))
    under = ["-m", "coverage", "run", f"--rcfile={folder / 'rc'}"]
    outcome = cold_run(copy, [name, f"--junit-xml={folder / 'times.xml'}"], 1200, under)
    print(f"{name}: {outcome.seconds:.0f} s {outcome.verdict}", flush=True)
    if outcome.verdict != "passed":
        print(f"  left out, since it fails without a fault: {outcome.by}", flush=True)
        return []
    measured = TestFile(
        name, _digest(copy / name), _times(folder / "times.xml"), _reached(copy, name)
    )
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name.replace('/', '.')}.json").write_text(json.dumps(asdict(measured)))
    return [measured]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _times(report: Path) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[case.attrib["name"].partition("[")[0]] += float(case.attrib["time"])
    return dict(seconds)


def _reached(copy: Path, name: str) -> dict[str, list[str]]:
    """Only tests that the file defines are named by their name: a helper's `test_...` is none."""
    tree = ast.parse((copy / name).read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    reached: dict[str, set[str]] = defaultdict(set)
    for part in (copy / ".coverage-data").glob("data*"):
        data = CoverageData(str(part))
        data.read()
        for file in data.measured_files():
            spans = functions(Path(file).read_text())
            bodies = [(name, start + 1, stop) for name, start, stop in spans]
            for line, contexts in data.contexts_by_lineno(file).items():
                if function := function_at(bodies, line):
                    tests = (context.rpartition(".")[2] for context in contexts)
                    place = f"{Path(file).relative_to(copy)}::{function}"
                    reached[place] |= {test if test in own else "" for test in tests}
    return {place: sorted(tests) for place, tests in sorted(reached.items())}
