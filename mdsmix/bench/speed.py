"""Times the settings of a loader. A pass first reads batches at a model's pace, with a simulated
step after each batch, then at full speed.

Batches that are ready when a clock starts are not counted, since they were made earlier: with them
the workers of a small epoch would look infinitely fast. A step is simulated by a sleep, since a
model on an accelerator leaves the processor to the loader.

Each pass runs in a process of its own. A dataset keeps files and shared memory until its process
ends, and each new dataset searches all earlier ones: forty in one process would reach the limit of
open files. The processes are forked from a process that has imported torch, which takes 50 ms; a
new process would take 6 s. Nothing is left over: no cache, no shared memory, no worker.
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
"A measurement needs at least this many steps, and this many batches at full speed."
ENDS_WITHIN = 5.0
"Seconds that a process has to clean up before it is stopped."
RUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
"""Environment variables of a distributed run. They are removed, so that the measured rank does not
wait for others.
"""


class TooSmall(RecipeError):
    """Raised if an epoch has too few batches for a setting to be measured."""


def measure_settings(bench: Bench, settings: Sequence[LoaderSetting], say: Say) -> list[Pass]:
    """Measure all settings, and return their passes. A setting for which the epoch is too small is
    left out.

    Raises RecipeError if the epoch is too small for every setting.

    Args:
        say: is called with a line on each pass, as soon as it is measured.
    """
    # Imported once, for all processes that are forked from here.
    from mdsmix.load.loader import open_token_ids
    from mdsmix.load.loader_settings import read_settings

    # Settings change only the speed of a loader, not its batches: take any of them.
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
    """Return the bench with `packing_ratio: auto` replaced by the number that the loader computes.

    The loader reads rows for this, so it gets a cache of its own: a cold cache must not contain
    them.
    """
    with _make_caches(bench) as caches:
        drawn = _run_with_loader(bench, setting, ids, caches, lambda loader: loader.batch_size)
    return replace(bench, packing_ratio=drawn / bench.batch)


def _measure_setting(bench: Bench, setting: LoaderSetting, ids: Any) -> list[Pass]:
    """Measure a setting with a cold cache, then the same batches with a warm cache. Return both
    passes, or only the warm pass if no stream has a remote.
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
                seconds=bench.seconds / 2,  # half of the time for each pass
                most_batches=most_batches,
            )
            passes.append(_run_with_loader(bench, setting, ids, caches, work))
            most_batches = passes[0].batches
    return passes if bench.fetched else passes[1:]


def _make_caches(bench: Bench) -> tempfile.TemporaryDirectory[str]:
    """Make an empty folder for local copies. A `with` block deletes it at its end, also after an
    error.
    """
    return tempfile.TemporaryDirectory(
        prefix="mdsmix-bench-", dir=bench.tmp, ignore_cleanup_errors=True
    )


def _run_with_loader(
    bench: Bench, setting: LoaderSetting, ids: Any, caches: str, work: Callable[[Any], T]
) -> T:
    """Build a loader in a process of its own, and return the result of `work` on it."""

    def build_and_work() -> T:
        """Do both in the forked process."""
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
    """Time a pass over a loader. Raises TooSmall if its epoch has too few batches.

    Args:
        setting: the workers and prefetching that the loader was built with.
        cache: `cold` or `warm`, for the result.
        step: seconds of a step of the model.
        seconds: how long to measure: half of it at the model's pace, half at full speed.
        most_batches: the most batches that are read; None: all batches of the epoch.
    """
    # The first batch and the batches that are ready are not measured. Of the others, the first half
    # is read with a step after each batch, the second half at full speed.
    total = min(len(loader), most_batches or len(loader))
    most_steps = (total - 1 - setting.ready) // 2
    if most_steps < LEAST:
        needed = 1 + setting.ready + 2 * LEAST
        raise TooSmall(
            f"{setting} needs {needed} batches to be measured, and an epoch gives {total}"
        )

    # Time the first batch, for which the workers start.
    started = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - started

    # Time batches at the model's pace.
    # At least LEAST steps, then until half of the time, or of the batches, is used up.
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
    """Take the next batch, and return the seconds until it arrived."""
    requested = time.perf_counter()
    next(batches)
    return time.perf_counter() - requested


def _run_in_process(name: str, work: Callable[[], T]) -> T:
    """Run `work` in a forked process. Return its result, or raise its error here.

    Raises MdsmixError if the process ends without a result.

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
            "without a result, perhaps because the machine is out of memory; set fewer --workers, "
            "or free some memory."
        ) from None
    finally:
        # The process may be cleaning up after a Ctrl-C, which both processes get.
        process.join(ENDS_WITHIN)
        # A process that does not end by itself is stopped, first by SIGTERM, then by SIGKILL.
        for stop in (process.terminate, process.kill):
            stop()
            process.join(ENDS_WITHIN)
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


def _work_and_send(work: Callable[[], Any], sender: Any) -> None:
    """Call `work`, send its result or its error to the parent, and end this forked process.

    A forked process ends without running exit functions, so the functions that Streaming registers
    here are called at the end. The parent's exit functions must not run here, so they are dropped
    at the beginning.
    """
    atexit._clear()
    for name in RUN_VARIABLES:  # otherwise this process would wait for other ranks of a run
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
