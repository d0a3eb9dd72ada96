"""Settings of a loader timed, each pass in a process of its own: as a model would read it, a step after each batch, then as fast as it goes.

Batches that lie ready when a clock starts were made before it, so they are not counted: workers of a small epoch would else look
as if they made them in no time. The step is a sleep: a model on an accelerator leaves the processor to the loader.

A dataset holds files and shared memory until its process ends, and each new one looks at all before it: forty in one process
would meet the limit of open files. A fork of a process that has imported torch costs 50 ms where a new one takes 6 s. Nothing is
left behind: no cache, no shared memory, no worker.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mdsmix.bench.choice import LoaderSetting, Pass, RankLoader, Timing
from mdsmix.errors import MdsmixError, RecipeError

T = TypeVar("T")
LEAST = 3
"Steps, and batches read as fast as it goes, that make a measurement."
ENDS_WITHIN = 5.0
"Seconds that a process has to clean up before it is ended."
OF_A_RUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
"Variables of a run that this process may be a part of: one rank is measured, and it waits for no other."


class TooSmall(RecipeError):
    """The epoch ends before anything is measured."""


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What is measured, and for how long."""

    rank: RankLoader
    settings: Sequence[LoaderSetting]
    step: float
    "Seconds of a step of the model."
    seconds: float
    "For both passes of a setting together."
    tmp: str | None = None
    "Where cold caches lie; None: the system's folder."


def run(plan: BenchPlan, say: Callable[[str], None]) -> list[Timing]:
    """What each setting gave, said as soon as it is known; RecipeError where the epoch is too small for all of them."""
    # Once, for all that are forked from here.
    from mdsmix.load.loader import ids_of
    from mdsmix.load.loader_settings import read_settings

    ids = ids_of(read_settings(plan.rank.config(plan.settings[0], "")))
    plan, measured = _with_ratio(plan, ids), list[Timing]()
    for number, setting in enumerate(plan.settings, 1):
        told = f"{number} of {len(plan.settings)}"
        try:
            measured.append(_tried(plan, setting, ids))
            say(f"{told}: {measured[-1]}")
        except TooSmall as small:
            say(f"{told}: left out, {small}")
    if not measured:
        raise RecipeError(
            f"{plan.rank.section.label} of {plan.rank.yaml.origin} is too small to measure: bench a larger mix, or say a smaller --batch."
        )
    return measured


def _with_ratio(plan: BenchPlan, ids: Any) -> BenchPlan:
    """`packing_ratio: auto` worked out once, by rows that a cold cache must not hold."""
    rank = plan.rank
    if rank.section.dataset.get("packing_ratio") != "auto":
        return plan
    with _caches(plan) as caches:
        rows = _of_loader(plan, LoaderSetting(0), ids, caches, lambda loader: loader.batch_size)
    return replace(plan, rank=replace(rank, packing_ratio=rows / rank.batch))


def _tried(plan: BenchPlan, setting: LoaderSetting, ids: Any) -> Timing:
    """The first pass fills the caches, or only the operating system's own; the second reads the same batches again."""
    with _caches(plan) as caches:

        def measure(most: int | None) -> Pass:
            def work(loader: Any) -> Pass:
                return timed(loader, setting, plan.step, plan.seconds / 2, most)

            return _of_loader(plan, setting, ids, caches, work)

        cold = measure(None)
        warm = measure(cold.batches)
    passes = {"cold": cold, "warm": warm} if plan.rank.fetched else {"warm": warm}
    return Timing(setting=setting, passes=passes)


def _caches(plan: BenchPlan) -> tempfile.TemporaryDirectory[str]:
    """An empty folder for copies, deleted in any case."""
    return tempfile.TemporaryDirectory(
        prefix="mdsmix-bench-", dir=plan.tmp, ignore_cleanup_errors=True
    )


def _of_loader(
    plan: BenchPlan, setting: LoaderSetting, ids: Any, caches: str, work: Callable[[Any], T]
) -> T:
    """What `work` makes of a new loader."""

    def opened() -> T:
        from mdsmix.load import build_loader

        loader = build_loader(plan.rank.config(setting, caches), plan.rank.batch, ids=ids)
        try:
            return work(loader)
        finally:
            loader.end()

    return _in_a_process(str(setting), opened)


def timed(
    loader: Any, setting: LoaderSetting, step: float, seconds: float, most: int | None
) -> Pass:
    """A pass over a loader; TooSmall where its epoch ends too soon."""
    total, now = min(len(loader), most or len(loader)), time.perf_counter
    # Half of what does not lie ready may be followed by a step, so that as many are left to be read as fast as it goes.
    paced = (total - 1 - setting.ready) // 2
    if paced < LEAST:
        raise TooSmall(f"an epoch gives {total} batches, and {setting} needs {1 + setting.ready + 2 * LEAST} to be measured")  # fmt: skip
    batches, began = iter(loader), now()
    next(batches)
    first, waits = now() - began, list[float]()
    while len(waits) < LEAST or (now() - began < first + seconds / 2 and len(waits) < paced):
        time.sleep(step)
        asked = now()
        next(batches)
        waits.append(now() - asked)
    for _ in range(setting.ready):
        next(batches)
    read, flat, asked = 1 + len(waits) + setting.ready, 0, now()
    while flat < LEAST or (now() - asked < seconds / 2 and read + flat < total):
        next(batches)
        flat += 1
    return Pass(
        first=first,
        wait=sum(waits) / len(waits),
        samples=flat * loader.batch_size / (now() - asked),
        batches=read + flat,
    )


def _in_a_process(what: str, work: Callable[[], T]) -> T:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(work, theirs))
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
        process.join(ENDS_WITHIN)  # it may be cleaning up after a Ctrl-C that both were sent
        for stop in (process.terminate, process.kill):
            stop()
            process.join(ENDS_WITHIN)
    if isinstance(answer, Exception):
        raise answer
    return answer  # type: ignore[no-any-return]


def _answer(work: Callable[[], Any], answers: Any) -> None:
    """The process's whole life. What Streaming frees at an interpreter's end is freed here, since a fork has none; what the
    process before has to free is not this one's to free."""
    atexit._clear()
    for name in OF_A_RUN:
        os.environ.pop(name, None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        answers.send(work())
    except KeyboardInterrupt:
        pass
    except Exception as error:
        answers.send(error)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # nobody comes in between
            signal.signal(number, signal.SIG_IGN)
        atexit._run_exitfuncs()
        os._exit(0)
