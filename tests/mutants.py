"""`python -m tests.mutants --seed N`: plant faults in a copy of the tree, one at a time, and print
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
from math import sqrt
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parents[1]
COPY = 'cd "$0" && git ls-files -coz --exclude-standard | tar c --null -T - | tar x -C "$1"'
"Copies the files that git tracks or would add. The developer's own tree is never changed."
BOUNDED = 'ulimit -v 16777216; exec timeout -s KILL 900 "$@"'
"""Limits a fault that runs or allocates without end. torch and MinIO reserve a few GiB of addresses
without using them.
"""
# Not changed, as by mutmut: annotations, decorators, imports, and text for a reader, which no test
# should compare word by word.
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
    parser.add_argument("paths", nargs="*", default=["."], help="files or folders below mdsmix")
    options = parser.parse_args()
    files = list[Path]()
    for name in options.paths:
        path = ROOT / "mdsmix" / name
        files += [path] if path.is_file() else path.rglob("*.py")
    faults = draw_faults(sorted(files), options.sample, random.Random(options.seed))
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(is_noticed, faults))
    noticed = sum(results)
    share = (noticed + 2) / (len(results) + 4)  # the interval of Agresti and Coull
    margin = 2 * sqrt(share * (1 - share) / (len(results) + 4))
    low, high = share - margin, min(share + margin, 1)
    print(f"\n{noticed} of {len(results)} noticed, 95 % interval {low:.0%} to {high:.0%}")


def draw_faults(files: list[Path], count: int, rng: random.Random) -> Iterator[Fault]:
    """Draw nodes of the code evenly, then one fault for each, so that a call with many arguments
    weighs no more than a comparison.
    """
    nodes = []
    for file in files:
        tree = cst.parse_module(file.read_text())
        nodes += [(file, tree, node) for node in walk(tree)]
    rng.shuffle(nodes)
    drawn = 0
    for file, tree, node in nodes:
        if drawn == count:
            return
        sources = list(mutate(tree, node))
        if sources:
            drawn += 1
            yield str(file.relative_to(ROOT)), rng.choice(sources)


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and its descendants, apart from those that are left alone."""
    if not m.matches(node, LEFT_ALONE):
        yield node
        for child in node.children:
            yield from walk(child)


def mutate(tree: cst.Module, node: cst.CSTNode) -> Iterator[str]:
    """Yield the sources that mutmut's operators make by changing a node, if they compile and are
    another program.
    """
    for kind, operator in mutation_operators:
        for other in operator(node) if isinstance(node, kind) else ():
            source = tree.deep_replace(node, other).code  # type: ignore[attr-defined]
            with suppress(SyntaxError):
                if ast.dump(ast.parse(source)) != ast.dump(ast.parse(tree.code)):
                    yield source


def is_noticed(fault: Fault) -> bool:
    """Return whether a test notices a fault, and print it."""
    name, source = fault
    test = ""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        subprocess.run(["bash", "-c", COPY, ROOT, folder], check=True)
        for files in list_test_files(name):
            test = test or find_failing_test(Path(folder), fault, files)
    print(f"{'noticed' if test else 'PASSED'}  {name}  {test}", flush=True)
    if not test:
        lines = [text.splitlines(keepends=True) for text in ((ROOT / name).read_text(), source)]
        print("".join([*difflib.unified_diff(*lines, n=0)][2:]), end="", flush=True)
    return bool(test)


def list_test_files(name: str) -> Iterator[list[str]]:
    """Yield the test files that are named for the package of this file, or import it: first those
    without torch, then the others.
    """
    package = Path(name).parts[1].removesuffix(".py")
    imports_package = re.compile(rf"^(from|import) mdsmix\.{package}\b", re.MULTILINE)
    for folders in (("tests", "tests/e2e", "tests/abuse"), ("tests/with_torch",)):
        files = []
        for folder in folders:
            for path in sorted((ROOT / folder).glob("test_*.py")):
                is_named = path.name.startswith(f"test_{package}")
                if is_named or imports_package.search(path.read_text()):
                    files.append(str(path.relative_to(ROOT)))
        yield files


def find_failing_test(copy: Path, fault: Fault, files: list[str]) -> str:
    """Return the first test that fails with the fault, fails again alone, and passes without it. A
    run that ends otherwise is named by its exit code.
    """
    original = (fault[0], (ROOT / fault[0]).read_text())
    deselected: list[str] = []
    while True:
        code = run_tests(copy, fault, *files, *deselected)
        if code != 1:
            return "" if code in (0, 5) else f"ended with {code}"
        *_, test = json.loads((copy / ".pytest_cache/v/cache/lastfailed").read_text())
        if run_tests(copy, fault, test) and not run_tests(copy, original, test):
            return str(test)
        deselected.append(f"--deselect={test}")


def run_tests(copy: Path, fault: Fault, *arguments: str) -> int:
    """Return pytest's exit code: 1 if a test failed, 5 if there was none."""
    (copy / fault[0]).write_text(fault[1])
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    pytest = ["bash", "-c", BOUNDED, "bash", sys.executable, "-m", "pytest", "-xq", *arguments]
    return subprocess.run(pytest, cwd=copy, env=env, capture_output=True).returncode


if __name__ == "__main__":
    main()
