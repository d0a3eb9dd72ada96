"""`python -m tests.mutants --seed N`: a sample of faults, one at a time, and those that no test notices."""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import sqrt
from pathlib import Path

from tests.mutants.contexts import KEPT, TestFile, by_room, collect
from tests.mutants.places import Place, mutants, places
from tests.mutants.trial import SILENCE, Outcome, Warm, copy_tree

ROOT = Path(__file__).parents[2]
WITH_TORCH = ("with_torch/", "test_encode_tokenizer")
"Test files that import torch, or transformers and with it torch."


@dataclass(frozen=True)
class Mutant:
    """One fault and what became of it."""

    place: Place
    verdict: str
    "`failed` (noticed), `hung` (noticed by the time limit), `passed` (not noticed), `unreached` (no test runs it)."
    by: str
    "The test, or what ended where it is none's doing."
    seconds: float
    diff: str
    is_second_look: bool = False
    "Oddities by tests of other rooms than those that `--by-room` tries first."

    @property
    def is_caught(self) -> bool:
        return self.verdict in ("failed", "hung")


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        clean = copy_tree(ROOT, Path(folder, "clean"))
        tests = by_room(clean) if options.by_room else collect(clean, options.tests)
        drawn = list(_draw(clean, options))
        print(f"seed {options.seed}: {len(drawn)} mutants", flush=True)
        copies = [_Copy(Path(folder, str(number))) for number in range(options.jobs)]
        with ThreadPoolExecutor(options.jobs) as pool:
            tried = [pool.submit(_try, copies, tests, options.patience, *one) for one in drawn]
            done = [_told(one.result()) for one in tried]
        for copy in copies:
            copy.close()
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"seed-{options.seed}.json").write_text(json.dumps([asdict(m) for m in done], indent=1))
    _report(done)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=100, help="mutants to try")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--patience", type=float, default=120, help="seconds of tests for a mutant")
    parser.add_argument("--tests", nargs="*", default=["test_*.py"], help="patterns of test files")
    parser.add_argument(
        "--by-room",
        action="store_true",
        help="the test files of a fault's room first, then others: no map is needed",
    )
    parser.add_argument("rooms", nargs="*", default=["."], help="files or folders below mdsmix")
    return parser.parse_args()


def _draw(clean: Path, options: argparse.Namespace) -> Iterator[tuple[Place, str]]:
    """Places are drawn evenly, then one fault of each: a call with many arguments weighs no more than a comparison."""
    named = [clean / "mdsmix" / room for room in options.rooms]
    files = [f for path in named for f in ([path] if path.is_file() else path.rglob("*.py"))]
    population = [p for f in sorted(files) for p in places(clean, str(f.relative_to(clean)))]
    order = random.Random(options.seed)
    print(f"{len(population)} places in {len(files)} files", flush=True)
    order.shuffle(population)
    faults = ((place, sources) for place in population if (sources := mutants(clean, place)))
    for (place, sources), _ in zip(faults, range(options.sample), strict=False):
        yield place, order.choice(sources)


class _Copy:
    """A copy of the tree, for one mutant at a time, and its warm processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = copy_tree(ROOT, folder)
        self.warm = {with_torch: Warm(folder, with_torch) for with_torch in (False, True)}

    @contextmanager
    def planted(self, file: str, source: str) -> Iterator[None]:
        path = self.folder / file
        original = path.read_text()
        path.write_text(source)
        try:
            yield
        finally:
            path.write_text(original)

    def close(self) -> None:
        for warm in self.warm.values():
            warm.close()


@dataclass
class _Trial:
    """One fault in one copy of the tree."""

    copy: _Copy
    file: str
    source: str
    seconds: float = 0
    unbelieved: list[str] = field(default_factory=list)

    def noticed(self, with_torch: bool, arguments: Sequence[str]) -> Outcome:
        """The first failure that is believed; a test that fails without the fault too, or only sometimes, is left out."""
        while True:
            left_out = [f"--deselect={test}" for test in self.unbelieved]
            outcome = self._run(with_torch, [*arguments, *left_out])
            if outcome.verdict == "passed" or "::" not in outcome.by:
                return outcome
            if self._is_the_faults(with_torch, outcome.by):
                return outcome
            self.unbelieved.append(outcome.by)

    def _is_the_faults(self, with_torch: bool, test: str) -> bool:
        """Whether the test alone passes without the fault and not with it: neither load nor an earlier test is to blame."""
        clean = self.copy.warm[with_torch].run([test])
        if clean.verdict != "passed":
            return False
        return self._run(with_torch, [test], 60 + 10 * clean.seconds).verdict != "passed"

    def _run(self, with_torch: bool, arguments: Sequence[str], limit: float = SILENCE) -> Outcome:
        with self.copy.planted(self.file, self.source):
            outcome = self.copy.warm[with_torch].run(arguments, limit)
        self.seconds += outcome.seconds
        return outcome


def _try(
    copies: list[_Copy], tests: Sequence[TestFile], patience: float, place: Place, source: str
) -> Mutant:
    """The module's own test file first, then the rest of those that reach the place, then others."""
    own = copies.pop()
    original = (own.folder / place.file).read_text()
    diff = "".join(difflib.unified_diff(original.splitlines(True), source.splitlines(True), n=0))
    trial = _Trial(own, place.file, source)
    outcome, is_second = Outcome("unreached", "", 0), False
    try:
        for look, with_torch, arguments in _looks(tests, place, patience, own.folder):
            is_second, outcome = look, trial.noticed(with_torch, arguments)
            if outcome.verdict != "passed":
                break
    finally:
        copies.append(own)
    by = outcome.by + "".join(f" (not {test})" for test in trial.unbelieved)
    shown = "".join(diff.splitlines(True)[2:])
    return Mutant(place, outcome.verdict, by, trial.seconds, shown, is_second)


def _looks(
    tests: Sequence[TestFile], place: Place, patience: float, root: Path
) -> Iterator[tuple[bool, bool, list[str]]]:
    """Whether it is the second look (at test files that are not known to reach the place: first those that name its
    module or function, then cheap ones), whether torch is needed, and pytest's arguments."""
    yield from ((False, *step) for step in _steps(tests, place, patience))
    where = set(_reached_as(tests, place))
    words = (Path(place.file).stem, place.function.rpartition(".")[2] or "*")
    others = [
        (not any(word in (root / test.path).read_text() for word in words), test.whole, test.path)
        for test in tests
        if not where & test.reached.keys()
    ]
    within = itertools.accumulate(cost for _, cost, _ in sorted(others))
    named = [
        path
        for (_, _, path), spent in zip(sorted(others), within, strict=True)
        if spent <= patience
    ]
    for with_torch in (False, True):
        if files := [path for path in named if _wants_torch(path) == with_torch]:
            yield True, with_torch, files


def _wants_torch(path: str) -> bool:
    return any(name in path for name in WITH_TORCH)


def _steps(
    tests: Sequence[TestFile], place: Place, patience: float
) -> Iterator[tuple[bool, list[str]]]:
    """Whether torch is needed, and pytest's arguments: the module's own tests, its room's, others, and of these those without
    torch and the cheap ones first; of others as many as patience allows."""
    where = _reached_as(tests, place)
    own = place.file.removeprefix("mdsmix/").removesuffix(".py").replace("/", "_")
    steps: dict[tuple[int, bool], list[str]] = defaultdict(list)
    spent = 0.0
    costs = [(sum(t.cost(w) for w in where), t) for t in tests if any(t.tests(w) for w in where)]
    for cost, test in sorted(costs, key=lambda pair: pair[0]):
        named = Path(test.path).stem.removeprefix("test_")
        distance = 0 if own.startswith(named) else 2 - (own.split("_")[0] == named.split("_")[0])
        if distance == 2 and steps and spent + cost > patience:
            continue
        spent += cost
        arguments = {argument for w in where for argument in test.tests(w)}
        arguments = {test.path} if test.path in arguments else arguments
        steps[distance, _wants_torch(test.path)] += sorted(arguments)
    for kind in sorted(steps):
        yield kind[1], steps[kind]


def _reached_as(tests: Sequence[TestFile], place: Place) -> list[str]:
    """The place's function, where a test reaches it; else (module level, new code) every function of its module."""
    exact = f"{place.file}::{place.function}"
    if any(exact in test.reached for test in tests):
        return [exact]
    return sorted({p for t in tests for p in t.reached if p.startswith(f"{place.file}::")})


def _told(mutant: Mutant) -> Mutant:
    where = f"{mutant.place.file}:{mutant.place.line}"
    look = "again " if mutant.is_second_look else ""
    print(f"{mutant.verdict:9} {mutant.seconds:4.0f} s  {where}  {look}{mutant.by}", flush=True)
    if not mutant.is_caught:
        print(mutant.diff, end="", flush=True)
    return mutant


def _report(done: Sequence[Mutant]) -> None:
    caught = [mutant for mutant in done if mutant.is_caught]
    low, high = wilson(len(caught), len(done))
    hung = sum(mutant.verdict == "hung" for mutant in done)
    second = sum(mutant.is_second_look for mutant in caught)
    print(
        f"\n{len(caught)} of {len(done)} caught ({hung} by the time limit, {second} at the second look): "
        f"{len(caught) / len(done):.0%}, 95 % interval {low:.0%} to {high:.0%}"
    )


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share: it stays within 0 and 1, and holds for few and for extreme ones."""
    share = hits / n
    middle = share + z * z / (2 * n)
    half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


if __name__ == "__main__":
    main()
