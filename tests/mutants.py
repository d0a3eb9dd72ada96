"""`python -m tests.mutants --seed N`: faults planted in a copy of the tree, one at a time, and
those that no test notices.

The operators are mutmut's. Its own runner forks the process that has imported a module, so it tries
nothing in decorated functions, at module level and in forked workers; here a fault is a file on
disk.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from math import sqrt
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parents[1]
COPY = 'cd "$0" && git ls-files -coz --exclude-standard | tar c --null -T - | tar x -C "$1"'
"What git knows or would add: the developer's own tree is never touched."
BOUNDED = 'ulimit -v 16777216; exec timeout -s KILL 900 "$@"'
"""A fault may run, or allocate, without end. torch and MinIO reserve a few GiB of addresses without
using them.
"""
# mutmut leaves alone what these do too. Documentation, or words for a reader: no test compares
# every one of them, and none should.
CALLED = m.Name(m.MatchRegex("len|isinstance|cast|TypeVar"))
CODE = m.Annotation() | m.Decorator() | m.Import() | m.ImportFrom() | m.Call(CALLED)
LEFT_ALONE = CODE | m.Expr(m.SimpleString()) | m.SimpleString(m.MatchRegex("(?s).* .*"))
Fault = tuple[str, str]
"A file of the package, relative to the repository, and its text with one change."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=50, help="faults to try")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("rooms", nargs="*", default=["."], help="files or folders below mdsmix")
    options = parser.parse_args()
    named = [ROOT / "mdsmix" / room for room in options.rooms]
    files = sorted(f for path in named for f in ([path] if path.is_file() else path.rglob("*.py")))
    with ThreadPoolExecutor(options.jobs) as pool:
        found = [*pool.map(is_noticed, drawn(files, options.sample, random.Random(options.seed)))]
    share = (sum(found) + 2) / (len(found) + 4)  # the interval of Agresti and Coull
    margin = 2 * sqrt(share * (1 - share) / (len(found) + 4))
    low, high = share - margin, min(share + margin, 1)
    print(f"\n{sum(found)} of {len(found)} noticed, 95 % interval {low:.0%} to {high:.0%}")


def drawn(files: list[Path], count: int, order: random.Random) -> Iterator[Fault]:
    """Places are drawn evenly, then one fault of each: a call with many arguments weighs no more
    than a comparison.
    """
    trees = [(file, cst.parse_module(file.read_text())) for file in files]
    places = [(file, tree, node) for file, tree in trees for node in nodes(tree)]
    order.shuffle(places)
    found = ((file, [*changed(tree, node)]) for file, tree, node in places)
    for file, sources in islice((f for f in found if f[1]), count):
        yield str(file.relative_to(ROOT)), order.choice(sources)


def nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if not m.matches(node, LEFT_ALONE):
        yield node
        for child in node.children:
            yield from nodes(child)


def changed(tree: cst.Module, node: cst.CSTNode) -> Iterator[str]:
    """What mutmut's operators make of a node; what does not compile, or is the same program, is
    left out.
    """
    for kind, operator in mutation_operators:
        for other in operator(node) if isinstance(node, kind) else ():
            source = tree.deep_replace(node, other).code  # type: ignore[attr-defined]
            with suppress(SyntaxError):
                if ast.dump(ast.parse(source)) != ast.dump(ast.parse(tree.code)):
                    yield source


def is_noticed(fault: Fault) -> bool:
    name, source = fault
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        subprocess.run(["bash", "-c", COPY, ROOT, folder], check=True)
        by = next(filter(None, (first(Path(folder), fault, each) for each in tests(name))), "")
    print(f"{'noticed' if by else 'PASSED'}  {name}  {by}", flush=True)
    if not by:
        lines = [text.splitlines(keepends=True) for text in ((ROOT / name).read_text(), source)]
        print("".join([*difflib.unified_diff(*lines, n=0)][2:]), end="", flush=True)
    return bool(by)


def tests(name: str) -> Iterator[list[str]]:
    """Those that are named for the room of this file or import of it: those without torch, and the
    others.
    """
    room = Path(name).parts[1].removesuffix(".py")
    for folders in (("tests", "tests/e2e", "tests/abuse"), ("tests/with_torch",)):
        paths = [p for f in folders for p in sorted((ROOT / f).glob("test_*.py"))]
        of_it = re.compile(rf"^(from|import) mdsmix\.{room}\b", re.MULTILINE)
        yield [
            str(p.relative_to(ROOT))
            for p in paths
            if p.name.startswith(f"test_{room}") or of_it.search(p.read_text())
        ]


def first(copy: Path, fault: Fault, tests: list[str]) -> str:
    """The first test that fails with the fault, fails again alone, and passes without it; or what
    ended otherwise.
    """
    doubted: list[str] = []
    while (code := run(copy, fault, *tests, *doubted)) == 1:
        *_, by = json.loads((copy / ".pytest_cache/v/cache/lastfailed").read_text())
        whole = fault[0], (ROOT / fault[0]).read_text()
        if run(copy, fault, by) and not run(copy, whole, by):
            return by
        doubted.append(f"--deselect={by}")
    return "" if code in (0, 5) else f"ended with {code}"


def run(copy: Path, fault: Fault, *arguments: str) -> int:
    """pytest's exit code: 1 where a test failed, 5 where there was none."""
    (copy / fault[0]).write_text(fault[1])
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    pytest = ["bash", "-c", BOUNDED, "bash", sys.executable, "-m", "pytest", "-xq", *arguments]
    return subprocess.run(pytest, cwd=copy, env=env, capture_output=True).returncode


if __name__ == "__main__":
    main()
