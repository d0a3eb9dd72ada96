"""Times the settings of a loader, each pass in a process of its own: at a model's pace with a step
after each batch, then at full speed.

Batches that are ready when a clock starts are not counted, since they were made before: the workers
of a small epoch would look infinitely fast. A step is a sleep, since a model on an accelerator
leaves the processor to the loader.

A dataset keeps files and shared memory until its process ends, and each new dataset searches all
earlier ones: forty in one process would reach the limit of open files. Forking a process that has
imported torch takes 50 ms, a new process 6 s. Nothing is left over: no cache, no shared memory, no
worker.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mdsmix.bench.choice import Pass
from mdsmix.bench.loader_bench import Bench, LoaderSetting
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.messages import Say

T = TypeVar("T")
LEAST = 3
"The fewest steps, and the fewest batches at full speed, that make a measurement."
ENDS_WITHIN = 5.0
"Seconds that a process has to clean up before it is stopped."
RUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
"""Environment variables of a distributed run. They are removed, so that the measured rank does not
wait for others.
"""


class TooSmall(RecipeError):
    """The epoch ends before anything is measured."""


def measure_settings(bench: Bench, settings: Sequence[LoaderSetting], say: Say) -> list[Pass]:
    """Measure all settings, and return their passes. Raises RecipeError if the epoch is too small
    for every setting.

    Args:
        say: receives a line on each pass at once.
    """
    # Imported once, for all processes that are forked from here.
    from mdsmix.load.loader import open_token_ids
    from mdsmix.load.loader_settings import read_settings

    ids = open_token_ids(read_settings(bench.make_config(settings[0], "")))
    if bench.section.dataset.get("packing_ratio") == "auto":
        bench = _with_packing_ratio(bench, settings[0], ids)
    passes = list[Pass]()
    for number, setting in enumerate(settings, 1):
        progress = f"{number} of {len(settings)}"
        try:
            for measured in _measure_setting(bench, setting, ids):
                say(f"{progress}: {measured}")
                passes.append(measured)
        except TooSmall as error:
            say(f"{progress}: left out, {error}")
    if not passes:
        raise RecipeError(
            f"{bench.section.label} of {bench.yaml.origin} is too small to measure: bench a larger "
            "mix, or set a smaller --batch."
        )
    return passes


def _with_packing_ratio(bench: Bench, setting: LoaderSetting, ids: Any) -> Bench:
    """Compute `packing_ratio: auto` once, in a cache of its own, since a cold cache must not
    contain the rows that it reads.
    """
    with _make_caches(bench) as caches:
        drawn = _run_with_loader(bench, setting, ids, caches, lambda loader: loader.batch_size)
    return replace(bench, packing_ratio=drawn / bench.batch)


def _measure_setting(bench: Bench, setting: LoaderSetting, ids: Any) -> list[Pass]:
    """Measure a setting with a cold cache, then warm with the same batches. Without a remote only
    the warm pass is returned.
    """
    passes = list[Pass]()
    most_batches = None
    with _make_caches(bench) as caches:
        for cache in ("cold", "warm"):
            work = partial(
                time_pass,
                setting=setting,
                cache=cache,
                step=bench.step,
                seconds=bench.seconds / 2,
                most_batches=most_batches,
            )
            passes.append(_run_with_loader(bench, setting, ids, caches, work))
            most_batches = passes[0].batches
    return passes if bench.fetched else passes[1:]


def _make_caches(bench: Bench) -> tempfile.TemporaryDirectory[str]:
    """Make an empty folder for local copies, which is deleted in any case."""
    return tempfile.TemporaryDirectory(
        prefix="mdsmix-bench-", dir=bench.tmp, ignore_cleanup_errors=True
    )


def _run_with_loader(
    bench: Bench, setting: LoaderSetting, ids: Any, caches: str, work: Callable[[Any], T]
) -> T:
    """Build a loader in a process of its own, and return the result of `work` on it."""

    def build_and_work() -> T:
        from mdsmix.load import build_loader

        loader = build_loader(bench.make_config(setting, caches), bench.batch, ids=ids)
        try:
            return work(loader)
        finally:
            loader.end()

    return _run_in_process(str(setting), build_and_work)


def time_pass(
    loader: Any,
    setting: LoaderSetting,
    cache: str,
    step: float,
    seconds: float,
    most_batches: int | None,
) -> Pass:
    """Time a pass over a loader. Raises TooSmall if its epoch ends too soon.

    Args:
        setting: the workers and prefetching that the loader was built with.
        cache: `cold` or `warm`, for the result.
        step: seconds of a step of the model.
        seconds: of the measurement; half for each pace.
        most_batches: the most batches that are read; None: all of the epoch.
    """
    # Half of the batches that are not ready are followed by a step; the other half is read at full
    # speed.
    total = min(len(loader), most_batches or len(loader))
    most_steps = (total - 1 - setting.ready) // 2
    if most_steps < LEAST:
        needed = 1 + setting.ready + 2 * LEAST
        raise TooSmall(
            f"an epoch gives {total} batches, and {setting} needs {needed} to be measured"
        )

    # The first batch, for which the workers start.
    started = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - started

    # At the model's pace.
    waits = list[float]()
    deadline = started + first + seconds / 2
    while len(waits) < LEAST or (time.perf_counter() < deadline and len(waits) < most_steps):
        time.sleep(step)
        waits.append(_time_next(batches))

    # Skip the batches that are ready, then read at full speed.
    for _ in range(setting.ready):
        next(batches)
    read_before = 1 + len(waits) + setting.ready
    fast_batches = 0
    fast_started = time.perf_counter()
    while fast_batches < LEAST or (
        time.perf_counter() - fast_started < seconds / 2 and read_before + fast_batches < total
    ):
        next(batches)
        fast_batches += 1
    fast_seconds = time.perf_counter() - fast_started
    return Pass(
        setting=setting,
        cache=cache,
        first=first,
        wait=sum(waits) / len(waits),
        samples=fast_batches * loader.batch_size / fast_seconds,
        batches=read_before + fast_batches,
    )


def _time_next(batches: Iterator[Any]) -> float:
    """Return the seconds until the next batch arrives."""
    requested = time.perf_counter()
    next(batches)
    return time.perf_counter() - requested


def _run_in_process(name: str, work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a forked process, or raise its error.

    Args:
        name: what is measured, for messages.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work_and_send, args=(work, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        process.join()
        raise MdsmixError(
            f"the process that measured {name} ended with exit code {process.exitcode} and "
            "without a result; it may have been out of memory."
        ) from None
    finally:
        # The process may be cleaning up after a Ctrl-C, which both processes get.
        process.join(ENDS_WITHIN)
        for stop in (process.terminate, process.kill):
            stop()
            process.join(ENDS_WITHIN)
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


def _work_and_send(work: Callable[[], Any], sender: Any) -> None:
    """Work, send the result or the error, and end this forked process.

    A fork ends without exit functions, so it runs Streaming's itself. Those of the parent are
    dropped first, since this process must not run them.
    """
    atexit._clear()
    for name in RUN_VARIABLES:
        os.environ.pop(name, None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sender.send(work())
    except KeyboardInterrupt:
        pass
    except Exception as error:
        sender.send(error)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # no signal may interrupt the cleaning up
            signal.signal(number, signal.SIG_IGN)
        atexit._run_exitfuncs()
        os._exit(0)
