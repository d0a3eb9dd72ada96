"""Times the settings of a loader, each pass in its own process: at a model's pace with a step after
each batch, then at full speed.

Batches that lie ready when a clock starts are not counted, since they were made before: the workers
of a small epoch would look infinitely fast. A step is a sleep, since a model on an accelerator
leaves the processor to the loader.

A dataset holds files and shared memory until its process ends, and each new dataset looks at all
earlier ones: forty in one process would reach the limit of open files. A fork of a process that has
imported torch takes 50 ms, a new process 6 s. Nothing stays behind: no cache, no shared memory, no
worker.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mdsmix.bench import Bench, LoaderSetting, Pass
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.messages import Say

T = TypeVar("T")
LEAST = 3
"The fewest steps, and the fewest batches at full speed, that make a measurement."
ENDS_WITHIN = 5.0
"Seconds that a process has to clean up before it is stopped."
OF_A_RUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
"""Environment variables of a distributed run. They are removed, so that the measured rank waits for
no other.
"""


class TooSmall(RecipeError):
    """The epoch ends before anything is measured."""


def run(bench: Bench, settings: Sequence[LoaderSetting], say: Say) -> list[Pass]:
    """The passes of all settings; `say` gets a line on each at once. RecipeError where the epoch is
    too small for every setting.
    """
    # Imported once, for all processes that are forked from here.
    from mdsmix.load.loader import open_token_ids
    from mdsmix.load.loader_settings import read_settings

    ids, measured = open_token_ids(read_settings(bench.config(settings[0], ""))), list[Pass]()
    if bench.section.dataset.get("packing_ratio") == "auto":
        # Worked out once, in a cache of its own, since a cold cache must not hold these rows.
        with _caches(bench) as caches:
            drawn = _of_loader(bench, settings[0], ids, caches, lambda loader: loader.batch_size)
        bench = replace(bench, packing_ratio=drawn / bench.batch)
    for number, setting in enumerate(settings, 1):
        told = f"{number} of {len(settings)}"
        try:
            for each in _passes(bench, setting, ids):
                say(f"{told}: {each}")
                measured.append(each)
        except TooSmall as small:
            say(f"{told}: left out, {small}")
    if not measured:
        raise RecipeError(
            f"{bench.section.label} of {bench.yaml.origin} is too small to measure: bench a larger mix, or say a smaller --batch."
        )
    return measured


def _passes(bench: Bench, setting: LoaderSetting, ids: Any) -> list[Pass]:
    """The passes of a setting: cold, then warm with the same batches. Without a remote only the
    warm pass is given.
    """
    most, found = None, list[Pass]()
    with _caches(bench) as caches:
        for cache in ("cold", "warm"):
            work = partial(
                timed,
                setting=setting,
                cache=cache,
                step=bench.step,
                seconds=bench.seconds / 2,
                most=most,
            )
            found.append(_of_loader(bench, setting, ids, caches, work))
            most = found[0].batches
    return found if bench.fetched else found[1:]


def _caches(bench: Bench) -> tempfile.TemporaryDirectory[str]:
    """An empty folder for local copies, which is deleted in any case."""
    return tempfile.TemporaryDirectory(
        prefix="mdsmix-bench-", dir=bench.tmp, ignore_cleanup_errors=True
    )


def _of_loader(
    bench: Bench, setting: LoaderSetting, ids: Any, caches: str, work: Callable[[Any], T]
) -> T:
    """The answer of `work` on a new loader, in a process of its own."""

    def opened() -> T:
        from mdsmix.load import build_loader

        loader = build_loader(bench.config(setting, caches), bench.batch, ids=ids)
        try:
            return work(loader)
        finally:
            loader.end()

    return _in_a_process(str(setting), opened)


def timed(
    loader: Any, setting: LoaderSetting, cache: str, step: float, seconds: float, most: int | None
) -> Pass:
    """A pass over a loader; TooSmall where its epoch ends too soon."""
    total, now = min(len(loader), most or len(loader)), time.perf_counter
    # Half of the batches that do not lie ready are followed by a step; the other half is read at
    # full speed.
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
        setting=setting,
        cache=cache,
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
        # The process may be cleaning up after a Ctrl-C, which both processes get.
        process.join(ENDS_WITHIN)
        for stop in (process.terminate, process.kill):
            stop()
            process.join(ENDS_WITHIN)
    if isinstance(answer, Exception):
        raise answer
    return answer  # type: ignore[no-any-return]


def _answer(work: Callable[[], Any], answers: Any) -> None:
    """The whole life of a forked process. It runs Streaming's exit functions itself, since a fork
    ends without them. Exit functions of the parent are dropped first: they are not for this process
    to run.
    """
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
        for number in (signal.SIGINT, signal.SIGTERM):  # no signal may interrupt the cleaning up
            signal.signal(number, signal.SIG_IGN)
        atexit._run_exitfuncs()
        os._exit(0)
