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
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
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
    "For all passes of a setting together."
    tmp: str | None = None
    "Where cold caches lie; None: the system's folder."


def run(plan: BenchPlan, say: Callable[[str], None]) -> Iterator[Timing]:
    """What each setting gave, as soon as it is known; RecipeError where the epoch is too small for all of them."""
    # Once, for all that are forked from here.
    from mdsmix.load.loader import ids_of
    from mdsmix.load.loader_settings import read_settings

    ids = ids_of(read_settings(plan.rank.config(plan.settings[0], None)))
    plan = _with_ratio(plan, ids)
    is_first, too_small = True, ""
    for number, setting in enumerate(plan.settings, 1):
        told = f"{number} of {len(plan.settings)}"
        try:
            timing = _tried(plan, setting, ids, is_first)
        except TooSmall as small:
            too_small = too_small or str(small)
            say(f"{told}: left out, {small}")
        else:
            is_first = False
            say(f"{told}: {timing}")
            yield timing
    if is_first:
        raise RecipeError(
            f"{plan.rank.section.label} of {plan.rank.yaml.origin} is too small to measure: {too_small}; bench a larger mix, or say a smaller --batch."
        )


def _with_ratio(plan: BenchPlan, ids: Any) -> BenchPlan:
    """`packing_ratio: auto` worked out once, by rows that a cold cache must not hold."""
    rank = plan.rank
    if rank.section.dataset.get("packing_ratio") != "auto":
        return plan
    with _caches(plan) as caches:

        def ratio() -> float:
            with _opened(rank, LoaderSetting(0, None), ids, caches) as loader:
                return float(loader.batch_size / rank.batch)

        found = _in_a_process("the packing ratio", ratio)
    return replace(plan, rank=replace(rank, packing_ratio=found))


def _tried(plan: BenchPlan, setting: LoaderSetting, ids: Any, is_first: bool) -> Timing:
    """Cold where there are caches, then warm: the same batches again."""
    with _caches(plan) as caches:

        def measure(seconds: float, most: int | None = None) -> Pass:
            def work() -> Pass:
                with _opened(plan.rank, setting, ids, caches) as loader:
                    return timed(loader, setting, plan.step, seconds, most)

            return _in_a_process(str(setting), work)

        half = plan.seconds / 2
        cold = measure(half) if caches or is_first else None  # without caches it fills the operating system's own  # fmt: skip
        if caches and cold:
            return Timing(setting=setting, cold=cold, warm=measure(half, cold.batches))
        return Timing(setting=setting, warm=measure(plan.seconds))


@contextmanager
def _caches(plan: BenchPlan) -> Iterator[Path | None]:
    """An empty folder for copies, deleted in any case; None where there are none to make."""
    if not plan.rank.fetched:
        yield None
        return
    folder = tempfile.mkdtemp(prefix="mdsmix-bench-", dir=plan.tmp)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _opened(
    rank: RankLoader, setting: LoaderSetting, ids: Any, caches: Path | None
) -> Iterator[Any]:
    from mdsmix.load import build_loader

    loader = build_loader(rank.config(setting, caches), rank.batch, ids=ids)
    try:
        yield loader
    finally:
        loader.end()


def timed(
    loader: Any, setting: LoaderSetting, step: float, seconds: float, most: int | None
) -> Pass:
    """A pass over a loader that counts `num_samples_yielded`; TooSmall where its epoch ends too soon."""
    total = min(len(loader), most or len(loader))
    paced = _paced(total, setting)
    began = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first, waits = time.perf_counter() - began, list[float]()
    while len(waits) < LEAST or (
        time.perf_counter() - began < first + seconds / 2 and len(waits) < paced
    ):
        time.sleep(step)
        asked = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - asked)
    for _ in range(setting.ready):
        next(batches)
    read, spent, tokens = 1 + len(waits) + setting.ready, 0.0, list[int]()
    before, asked = loader.num_samples_yielded, time.perf_counter()
    while len(tokens) < LEAST or (spent < seconds / 2 and read + len(tokens) < total):
        tokens.append(_tokens(next(batches)))
        spent = time.perf_counter() - asked
    return Pass(
        first=first,
        wait=sum(waits) / len(waits),
        longest=max(waits),
        samples=(loader.num_samples_yielded - before) / spent,
        tokens=sum(tokens) / spent,
        batches=read + len(tokens),
    )


def _paced(total: int, setting: LoaderSetting) -> int:
    """How many of an epoch's batches may be followed by a step, so that as many are left to be read as fast as it goes."""
    needed = 1 + LEAST + setting.ready + LEAST
    if total < needed:
        raise TooSmall(
            f"an epoch gives {total} batches, and {setting} needs {needed} to be measured: those that it makes in advance say "
            "nothing of its speed"
        )
    return (total - 1 - setting.ready) // 2


def _tokens(batch: Any) -> int:
    """Without padding; encoder and decoder both."""
    masks = [batch[key] for key in ("attention_mask", "decoder_attention_mask") if key in batch]
    return sum(int(mask.sum()) for mask in masks)


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
    for name in OF_A_RUN:
        os.environ.pop(name, None)
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
