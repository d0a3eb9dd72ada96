"""One setting of one loader, timed: as a model would read it, a step after each batch, and then as fast as it goes.

Batches that lie ready when a clock starts were made before it, so they are not counted: workers of a small epoch would else look
as if they made them in no time. The step is a sleep: a model on an accelerator leaves the processor to the loader.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdsmix.bench.judge import Measured, Pass
from mdsmix.bench.one_rank import OneRank
from mdsmix.bench.settings import Setting
from mdsmix.errors import RecipeError

LEAST = 3
"Steps, and batches read as fast as it goes, that make a measurement."


class TooSmall(RecipeError):
    """The epoch ends before anything is measured."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process measures."""

    rank: OneRank
    setting: Setting
    ids: Any
    "The tokenizer's."
    step: float
    seconds: float
    "For all passes together."
    caches: Path | None
    "An empty folder, where streams have copies."
    is_first: bool = False
    with_bare: bool = False


def measured(job: Job) -> Measured:
    """Cold where there are caches, then warm: the same batches again."""
    cold = _pass(job, job.seconds / 2) if job.caches else None
    if job.is_first and not job.caches:  # the operating system's own cache
        _pass(job, job.seconds / 2)
    warm = _pass(job, job.seconds / 2 if cold else job.seconds, cold.batches if cold else None)
    bare = _bare(job, job.seconds / 2, warm.batches) if job.with_bare else None
    return Measured(setting=job.setting, cold=cold, warm=warm, bare=bare)


def _pass(job: Job, seconds: float, most: int | None = None) -> Pass:
    from mdsmix.load import build_loader

    config = job.rank.config(job.setting, job.caches)
    loader = build_loader(config, job.rank.batch, ids=job.ids)
    with _ending(loader):
        return timed(loader, job.setting, job.step, seconds, most)


def found_ratio(rank: OneRank, ids: Any, caches: Path | None) -> float:
    """What `packing_ratio: auto` comes to: samples that are drawn for a row."""
    from mdsmix.load import build_loader

    loader = build_loader(rank.config(Setting(0, None), caches), rank.batch, ids=ids)
    with _ending(loader):
        return float(loader.batch_size / rank.batch)


def timed(loader: Any, setting: Setting, step: float, seconds: float, most: int | None) -> Pass:
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
    read, (spent, samples, tokens) = 1 + len(waits) + setting.ready, (0.0, 0, 0)
    before, asked = loader.num_samples_yielded, time.perf_counter()
    flat = 0
    while flat < LEAST or (spent < seconds / 2 and read + flat < total):
        tokens += _tokens(next(batches))
        flat += 1
        samples, spent = loader.num_samples_yielded - before, time.perf_counter() - asked
    return Pass(
        first=first,
        wait=sum(waits) / len(waits),
        longest=max(waits),
        steps=len(waits),
        samples=samples / spent,
        tokens=tokens / spent,
        batches=read + flat,
    )


def _paced(total: int, setting: Setting) -> int:
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


def _bare(job: Job, seconds: float, most: int) -> float:
    """Samples a second of StreamingDataset itself, which makes no batch: decoded samples, a list of them at a time."""
    from mdsmix.load.bare import bare_loader

    loader, total = bare_loader(job.rank.config(job.setting, job.caches), job.rank.batch), 0
    with _ending(loader):
        batches = iter(loader)
        for _ in range(job.setting.ready):
            next(batches)
        asked, count = time.perf_counter(), 0
        while count < LEAST or (
            time.perf_counter() - asked < seconds and count + job.setting.ready < most
        ):
            total += len(next(batches))
            count += 1
        return total / (time.perf_counter() - asked)


@contextmanager
def _ending(loader: Any) -> Iterator[None]:
    """Ends what the loader has started, so that its folders can be used again at once."""
    try:
        yield
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()
            loader._iterator = None
        if hasattr(loader.dataset, "_iterator"):
            loader.dataset._iterator.exit()
            loader.dataset._executor.shutdown()
        loader.dataset.__del__()  # lets its folders go, whoever else holds it
        gc.collect()
