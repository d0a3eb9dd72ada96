"""Tries settings, each in a process of its own, and leaves nothing behind: no cache, no shared memory, no worker.

A dataset holds files and shared memory until its process ends, and each new one looks at all before it: forty in one process
would meet the limit of open files. A fork of a process that has imported torch costs 50 ms where a new one takes 6 s.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mdsmix.bench.judge import Measured, Verdict, chosen, keeps_up, table
from mdsmix.bench.one_rank import OneRank, alone
from mdsmix.bench.settings import Setting, Share
from mdsmix.bench.speed import Job, TooSmall, found_ratio
from mdsmix.bench.speed import measured as measure
from mdsmix.bench.tuned import content
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.table import as_json
from mdsmix.words import plural, spelled

T = TypeVar("T")
MORE = 4
"Times the samples to download in advance, tried where steps wait with a cold cache."
ENDS_WITHIN = 5.0
"Seconds that a process has to clean up before it is ended."


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and for how long."""

    rank: OneRank
    share: Share
    settings: Sequence[Setting]
    step: float
    seconds: float
    tmp: str | None = None
    with_bare: bool = False

    @property
    def predownload(self) -> int:
        """Samples that a worker downloads in advance where nothing is said."""
        return self.rank.predownload or 8 * self.rank.batch

    @property
    def about(self) -> str:
        """On what it is measured."""
        load = os.getloadavg()[0]
        rows = plural(self.rank.batch, "row")
        if self.rank.is_batch_supposed:
            rows += " (supposed, as the YAML says no global_train_batch_size: --batch says it)"
        minutes = len(self.settings) * (self.seconds + 3) / 60
        return (
            f"{self.rank.about}; {self.share}, load {load:.1f}; {rows} a step of {1000 * self.step:,.0f} ms, which is simulated; "
            f"{plural(len(self.settings), 'setting')} of {self.seconds:g} s: about {max(1, round(minutes))} min"
        )

    def keys(self, verdict: Verdict) -> str:
        """The settings to render, as YAML has them."""
        setting = verdict.chosen.setting
        keys = dict(setting.loader_keys)
        own = {"dataset.predownload": setting.predownload} if setting.predownload else {}
        return ", ".join(f"{key}: {spelled(value)}" for key, value in (keys | own).items())

    def report(self, found: Sequence[Measured]) -> dict[str, Any]:
        """Everything, for programs."""
        verdict = self.verdict(found)
        measured_on = {
            "cores": self.share.cores,
            "ranks": self.share.ranks,
            "load": os.getloadavg()[0],
            "rows_of_a_step": self.rank.batch,
            "step_ms": 1000 * self.step,
            "seconds_a_setting": self.seconds,
        }
        return {
            "yaml": self.rank.yaml.origin,
            "loader": self.rank.section.label,
            "measured_on": measured_on,
            **as_json(table(found)),
            "waits": verdict.waits,
            "verdict": str(verdict),
            "train_loader": verdict.chosen.setting.loader_keys,
            "predownload": verdict.chosen.setting.predownload,
        }

    def tuned(self, verdict: Verdict, report: Mapping[str, Any]) -> str:
        """The file for a rendering."""
        setting = verdict.chosen.setting
        return content(setting.loader_keys, setting.predownload, report).decode()

    def verdict(self, found: Sequence[Measured]) -> Verdict:
        return Verdict(chosen=chosen(found, self.step), step=self.step, batch=self.rank.batch)


def run(plan: Plan, say: Callable[[str], None]) -> Iterator[Measured]:
    """What each setting gave, as soon as it is known; RecipeError where the epoch is too small for all of them."""
    # Once, for all that are forked from here.
    from mdsmix.load.config import read_settings
    from mdsmix.load.loader import ids_of

    ids = ids_of(read_settings(plan.rank.config(plan.settings[0], None)))
    plan = _with_ratio(plan, ids)
    found = list[Measured]()
    left_out = list[str]()
    for number, setting in enumerate(plan.settings, 1):
        try:
            found.append(_tried(plan, setting, ids, is_first=not found))
        except TooSmall as small:
            left_out.append(str(small))
            say(f"{number} of {len(plan.settings)}: left out, {small}")
            continue
        say(f"{number} of {len(plan.settings)}: {_told(found[-1])}")
        yield found[-1]
    if not found:
        raise RecipeError(
            f"{plan.rank.section.label} of {plan.rank.yaml.origin} is too small to measure: {left_out[0]}; bench a larger mix, or "
            "say a smaller --batch."
        )
    if further := _further(plan, found):
        found.append(_tried(plan, further, ids, is_first=False))
        say(f"and {_told(found[-1])}")
        yield found[-1]


def _with_ratio(plan: Plan, ids: Any) -> Plan:
    """`packing_ratio: auto` found once, by rows that a cold cache must not hold."""
    if plan.rank.packing != "auto":
        return plan
    with _caches(plan) as caches:
        ratio = _in_a_process("the packing ratio", partial(found_ratio, plan.rank, ids, caches))
    return replace(plan, rank=replace(plan.rank, ratio=ratio))


def _further(plan: Plan, found: Sequence[Measured]) -> Setting | None:
    """More downloaded in advance, where even the best setting waits with a cold cache."""
    best = chosen(found, plan.step)
    if best.cold is None or keeps_up(best, plan.step):
        return None
    return replace(best.setting, predownload=MORE * plan.predownload)


def _told(found: Measured) -> str:
    each = found.cold or found.warm
    return (
        f"{found.setting}: {each.samples:,.0f} samples/s, a step waits {1000 * found.wait:,.1f} ms"
    )


def _tried(plan: Plan, setting: Setting, ids: Any, is_first: bool) -> Measured:
    with _caches(plan) as caches:
        job = Job(
            rank=plan.rank,
            setting=setting,
            ids=ids,
            step=plan.step,
            seconds=plan.seconds,
            caches=caches,
            is_first=is_first,
            with_bare=plan.with_bare,
        )
        return _in_a_process(str(setting), partial(measure, job))


@contextmanager
def _caches(plan: Plan) -> Iterator[Path | None]:
    """An empty folder for copies, deleted in any case; None where there are none to make."""
    if not plan.rank.fetched:
        yield None
        return
    folder = tempfile.mkdtemp(prefix="mdsmix-bench-", dir=plan.tmp)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_a_process(what: str, work: Callable[[], T]) -> T:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(what, work, theirs))
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        raise MdsmixError(
            f"the process that measured {what} ended with {process.exitcode} and said nothing; it may have been out of memory."
        ) from None
    finally:
        _end(process)
    if isinstance(answer, Exception):
        raise answer
    return answer  # type: ignore[no-any-return]


def _end(process: Any) -> None:
    """It may be cleaning up after a Ctrl-C that both were sent; who does not end by itself is told, then ended."""
    process.join(ENDS_WITHIN)
    for stop in (process.terminate, process.kill):
        if process.is_alive():
            stop()
            process.join(ENDS_WITHIN)


def _answer(what: str, work: Callable[[], Any], answers: Any) -> None:
    """The process's whole life. What Streaming frees at an interpreter's end is freed here, since a fork has none; what the
    process before has to free is not this one's to free."""
    atexit._clear()
    alone()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        answers.send(work())
    except KeyboardInterrupt:
        pass
    except MdsmixError as error:
        answers.send(error)
    except Exception as error:
        answers.send(
            MdsmixError(f"{what} could not be measured ({type(error).__name__}: {error}).")
        )
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # nobody comes in between
            signal.signal(number, signal.SIG_IGN)
        atexit._run_exitfuncs()
        os._exit(0)
