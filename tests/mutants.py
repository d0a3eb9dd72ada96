"""`python -m tests.mutants --seed N`: faults planted in a copy of the tree, one at a time, and those that no test notices.

The operators are mutmut's. Its own runner forks the process that has imported a module, so it tries nothing in decorated functions, at module
level and in forked workers; here a fault is a file on disk.
"""

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from queue import SimpleQueue

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parents[1]
ALSO = {
    "encode": "test_kinds_* test_convert_chats* abuse/test_recipes* with_torch/test_tokenizers* "
    "with_torch/test_processor_proof*",
    "kinds": "test_house_* test_encode_* test_convert_* with_torch/test_preferences*",
    "shapes": "test_kinds_* test_convert_chats* test_sources_alike* test_init_*",
    "mix": "test_cli_streams* test_cli_inspect*",
    "images": "test_kinds_images* test_convert_images* with_torch/test_load_vision*",
    "shards": "test_convert_* abuse/test_* test_cli_inspect*",
    "training": "test_mix_* test_typed* with_torch/test_load_*",
    "recipe": "test_mix_shares* test_convert_budget* test_kinds_* abuse/test_recipe*",
    "convert": "test_cli_* test_house_* e2e/test_killed*",
    "engines": "test_convert_run*",
    "sources": "test_convert_* abuse/test_*",
    "storage": "test_convert_put* e2e/test_storage_* e2e/test_faults*",
    "preview": "with_torch/test_load_vision*",
    "report": "test_cli_* test_mix_cli* with_torch/test_preview*",
    "cli": "test_mix_cli* with_torch/test_preview*",
    "words": "test_typed*",
}
"The test files that notice faults of a room, beside those that are named for it."
SECONDS, ADDRESSES_KIB = 900, 16 << 20
"Bounds of a run of pytest: a fault may run, or allocate, without end. torch and MinIO reserve a few GiB of addresses without using them."
HARMLESS_CALLS = {"len", "isinstance", "cast", "TypeVar"}
"Calls whose arguments mutmut leaves alone too, or that do nothing when they run."


@dataclass(frozen=True)
class Fault:
    """A module with one change."""

    file: str
    "Relative to the repository."
    source: str
    diff: str


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = SimpleQueue[Path]()
        for number in range(options.jobs):
            copies.put(_copied(Path(folder, str(number))))
        with ThreadPoolExecutor(options.jobs) as pool:
            trials = [pool.submit(_tried, copies, each) for each in _drawn(options)]
            hits = sum(trial.result() for trial in trials)
    share = (hits + 2) / (len(trials) + 4)  # the interval of Agresti and Coull
    margin = 2 * sqrt(share * (1 - share) / (len(trials) + 4))
    low, high = share - margin, min(share + margin, 1)
    print(f"\n{hits} of {len(trials)} noticed, 95 % interval {low:.0%} to {high:.0%}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=50, help="faults to try")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("rooms", nargs="*", default=["."], help="files or folders below mdsmix")
    return parser.parse_args()


def _drawn(options: argparse.Namespace) -> Iterator[Fault]:
    """Places are drawn evenly, then one fault of each: a call with many arguments weighs no more than a comparison."""
    named = [ROOT / "mdsmix" / room for room in options.rooms]
    files = sorted(f for path in named for f in ([path] if path.is_file() else path.rglob("*.py")))
    nodes = [(file, number) for file in files for number in range(len(_nodes(file)[1]))]
    order = random.Random(options.seed)
    order.shuffle(nodes)
    faults = (found for place in nodes if (found := [*_faults(*place)]))
    for found, _ in zip(faults, range(options.sample), strict=False):
        yield order.choice(found)


def _faults(file: Path, number: int) -> Iterator[Fault]:
    """What mutmut's operators make of a node; what does not compile, or is the same program, is left out."""
    original, (tree, nodes) = file.read_text(), _nodes(file)
    for changed in _changed(nodes[number]):
        source = tree.deep_replace(nodes[number], changed).code  # type: ignore[attr-defined]
        with suppress(SyntaxError):
            if ast.dump(ast.parse(source)) != ast.dump(ast.parse(original)):
                lines = difflib.unified_diff(
                    original.splitlines(True), source.splitlines(True), n=0
                )
                yield Fault(str(file.relative_to(ROOT)), source, "".join([*lines][2:]))


def _nodes(file: Path) -> tuple[cst.Module, list[cst.CSTNode]]:
    wrapper, visitor = MetadataWrapper(cst.parse_module(file.read_text())), _Nodes()
    wrapper.visit(visitor)
    return wrapper.module, visitor.found


class _Nodes(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (ParentNodeProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom):
            return False
        if isinstance(node, cst.Call) and getattr(node.func, "value", "") in HARMLESS_CALLS:
            return False
        # Documentation, or words for a reader: no test compares every one of them, and none should.
        is_alone = isinstance(self.get_metadata(ParentNodeProvider, node, None), cst.Expr)
        is_prose = isinstance(node, cst.SimpleString) and (" " in node.value or is_alone)
        if not is_prose and any(True for _ in _changed(node)):
            self.found.append(node)
        return True


def _changed(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            yield from operator(node)


def _copied(copy: Path) -> Path:
    """What git knows or would add: the developer's own tree is never touched."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in (name for name in listed.stdout.splitlines() if (ROOT / name).is_file()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


def _tried(copies: SimpleQueue[Path], fault: Fault) -> bool:
    """Whether a test of the room notices the fault; those without torch are tried first."""
    copy = copies.get()
    try:
        by = next((by for tests in _tests(copy, fault) if (by := _noticed(copy, fault, tests))), "")
    finally:
        copies.put(copy)
    print(f"{'noticed' if by else 'PASSED'}  {fault.file}  {by}", flush=True)
    print("" if by else fault.diff, end="", flush=True)
    return bool(by)


def _tests(copy: Path, fault: Fault) -> Iterator[list[str]]:
    room = Path(fault.file).parts[1].removesuffix(".py")
    patterns = (f"test_{room}*", f"with_torch/test_{room}*", *ALSO.get(room, "").split())
    found = {path for each in patterns for path in (copy / "tests").glob(f"{each}.py")}
    for with_torch in (False, True):
        if named := sorted(str(p) for p in found if ("with_torch" in str(p)) == with_torch):
            yield named


def _noticed(copy: Path, fault: Fault, tests: Sequence[str]) -> str:
    """The first test that fails with the fault, fails again alone, and passes without it; or what ended otherwise."""
    doubted: list[str] = []
    while True:
        code, by = _run(copy, [*tests, *(f"--deselect={test}" for test in doubted)], fault)
        if code in (0, 5) or not by:
            return "" if code in (0, 5) else f"ended with {code}"
        if _run(copy, [by])[0] == 0 and _run(copy, [by], fault)[0] != 0:
            return by
        doubted.append(by)


def _run(copy: Path, arguments: Sequence[str], fault: Fault | None = None) -> tuple[int, str]:
    """pytest's exit code (5: no test; 124: out of time), and the first test that failed."""
    path = copy / (fault.file if fault else "mdsmix/__init__.py")
    original = path.read_text()
    path.write_text(fault.source if fault else original)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", *arguments]
    process = subprocess.Popen(
        ["sh", "-c", f'ulimit -v {ADDRESSES_KIB}; exec "$@"', "sh", *command],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        return 124, ""
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        path.write_text(original)
    named = re.search(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", output, re.MULTILINE)
    return process.returncode, named[1] if named else ""


if __name__ == "__main__":
    main()
