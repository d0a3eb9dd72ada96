"""Which settings of a loader are tried on this machine, as one rank of a run would have them, and which of them is chosen.

A setting keeps up where a step waits for its batch no more than 2 % of itself. Of those that keep up the one with the fewest
workers is chosen, then the one that prefetches least: workers cost memory, and cores that the other ranks need. Where none
keeps up, the one whose steps wait least is chosen. The other ranks are not simulated: they would share the network and the disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mdsmix.kinds  # noqa: F401 - a kind of stream registers the loader that it brings
from mdsmix.errors import RecipeError
from mdsmix.table import Column, Table
from mdsmix.training.loader_keys import whole
from mdsmix.training.training_yaml import LoaderSection, StreamSection, TrainingYaml, read_yaml
from mdsmix.words import plural, spelled

PREFETCH = [2, 4]
"Batches that each worker makes in advance; 2 is torch's and Foundry's default."
TOLERATED = 0.02
"Of a step: below it the measurement itself is not sure."
BATCH = 8
"Rows of a step where neither the YAML nor --batch says it."
OF_STREAMS = frozenset({"streams", "remote", "local", "split"})
COLUMNS = (
    Column("workers"),
    Column("prefetch"),
    Column("cache", "text"),
    Column("first batch, s", "seconds", "first_batch_seconds"),
    Column("samples/s", key="samples_per_second"),
    Column("wait a step, ms", "seconds", "wait_ms"),
)


@dataclass(frozen=True, slots=True, order=True)
class LoaderSetting:
    """One way to set a loader: it changes the speed and no batch."""

    workers: int
    prefetch: int = 0
    "Batches of each worker in advance; 0 without workers."

    @property
    def loader_keys(self) -> dict[str, int | bool | None]:
        """As `train_loader` takes it: without workers torch wants neither prefetching nor persistence."""
        keys = {"num_workers": self.workers, "prefetch_factor": self.prefetch or None}
        return keys | {"persistent_workers": self.workers > 0}

    @property
    def overrides(self) -> list[str]:
        """As `key=value` of a recipe."""
        return [f"train_loader.{key}={spelled(value)}" for key, value in self.loader_keys.items()]

    @property
    def ready(self) -> int:
        """Batches that may lie ready, the one that is asked for among them."""
        return 1 + self.workers * self.prefetch

    def __str__(self) -> str:
        ahead = f", prefetch {self.prefetch}" if self.prefetch else ""
        return f"{plural(self.workers, 'worker')}{ahead}"


def settings(cores: int, workers: str | None, prefetch: str | None) -> list[LoaderSetting]:
    """The settings to try: workers from none to a core each by doubling, unless `workers` and `prefetch` list others.
    RecipeError where one is no number, or more workers are asked for than a rank has cores."""
    # Whether 5 or 6 workers are best is noise, whether 1 or 8 are is not.
    doubled = [0, *(1 << n for n in range((cores - 1).bit_length())), cores]
    counts = _numbers("--workers", workers, 0, doubled)
    if max(counts) > cores:
        raise RecipeError(
            f"--workers {max(counts)}: a rank has {plural(cores, 'core')} here, and workers that take turns on them measure the "
            f"machine instead of the loader; name at most {cores}, or measure on the training machine."
        )
    ahead = _numbers("--prefetch", prefetch, 1, PREFETCH)
    return [LoaderSetting(n, batches) for n in counts for batches in (ahead if n else [0])]


def _numbers(option: str, text: str | None, least: int, default: list[int]) -> list[int]:
    """`0,2,4` as numbers, in order."""
    if text is None:
        return default
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= least for part in parts):
        raise RecipeError(
            f"{option} {text}: these must be whole numbers of {least} or more with commas between them, such as 2,4."
        )
    return sorted({int(part) for part in parts})


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A loader of a training YAML as one rank reads it, and how long it is measured."""

    yaml: TrainingYaml
    section: LoaderSection
    batch: int
    "Rows that a device takes in a step."
    step: float
    "Seconds of a step of the model."
    seconds: float
    "For both passes of a setting together."
    tmp: str | None
    "Where cold caches lie; None: the system's folder."
    packing_ratio: float | None = None
    "What `packing_ratio: auto` comes to."

    @property
    def fetched(self) -> list[StreamSection]:
        """Streams of which a rank keeps copies: a cold cache has none of them."""
        streams = self.section.stream_sections
        return [s for s in streams if s.settings.get("remote")]

    def config(self, setting: LoaderSetting, caches: str) -> dict[str, Any]:
        """A config of this loader alone; `caches` is where copies go, a folder for each stream."""
        streams = {s.name: dict(s.settings) for s in self.section.stream_sections}
        for stream in self.fetched:
            streams[stream.name]["local"] = os.path.join(caches, stream.name)
        dataset = {k: v for k, v in self.section.dataset.items() if k not in OF_STREAMS}
        dataset["streams"] = streams
        if self.packing_ratio:
            dataset["packing_ratio"] = self.packing_ratio
        # Persistent workers would stay for a second epoch, and there is none.
        keys = setting.loader_keys | {"persistent_workers": False, "dataset": dataset}
        given = {k: v for k, v in self.section.section.items() if k != "label"}
        return {"tokenizer": self.yaml.config.get("tokenizer"), "train_loader": given | keys}


def rows_of(yaml: TrainingYaml, section: LoaderSection, ranks: int) -> int | None:
    """Rows of a device's step as the YAML says it; RecipeError where LLM-Foundry cannot divide its batch among the ranks."""
    if not section.trains:
        return whole(yaml.config.get("device_eval_batch_size"))
    batch = yaml.batch_size
    if batch is not None and (batch % ranks or batch < ranks):
        raise RecipeError(
            f"global_train_batch_size {batch} of {yaml.origin} cannot be divided by --gpus {ranks}; say --batch ROWS, those "
            "of one device, or another number of GPUs."
        )
    return batch and batch // ranks


def read_bench(
    path: str, loader: str, batch: int | None, ranks: int, **measured: Any
) -> tuple[Bench, str]:
    """What is measured, and on which loader in a sentence; RecipeError where the YAML cannot be read, is a recipe, or has no such loader."""
    yaml = read_yaml(path, judged=(loader.partition(".")[0], "tokenizer"))
    section = yaml.loader(loader)
    rows = batch or rows_of(yaml, section, ranks)
    bench = Bench(yaml=yaml, section=section, batch=rows or BATCH, **measured)
    said = (
        "" if rows else " (supposed, as the YAML says no global_train_batch_size: --batch says it)"
    )
    return bench, (
        f"{section.label} of {yaml.origin}: {plural(len(section.stream_sections), 'stream')}, {len(bench.fetched)} of them with a remote; "
        f"{plural(bench.batch, 'row')}{said} a step of {1000 * bench.step:,.0f} ms, which is simulated"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over the beginning of an epoch."""

    setting: LoaderSetting
    cache: str
    "`cold`: with an empty cache folder, where a stream has a remote; then `warm`: the same batches again."
    first: float
    "Seconds from the request of the first batch until it was there; starting the workers is part of it."
    wait: float
    "Seconds that a step waited for its batch, the mean of all but the first."
    samples: float
    "A second, read as fast as it goes."
    batches: int
    "Batches that were read in all."

    def __str__(self) -> str:
        wait = 1000 * self.wait
        return f"{self.setting}, {self.cache}: {self.samples:,.0f} samples/s, a step waits {wait:,.1f} ms"

    def keeps_up(self, step: float) -> bool:
        return self.wait <= TOLERATED * step


def chosen(measured: Sequence[Pass], step: float) -> Pass:
    """The setting to render, by its slower pass. `step`: seconds of a step of the model."""
    slower = {each.setting: each for each in sorted(measured, key=lambda each: each.wait)}
    return min(
        slower.values(), key=lambda each: (not each.keeps_up(step) and each.wait, each.setting)
    )


def verdict(best: Pass, step: float, batch: int) -> str:
    """Who waits for whom, in a sentence. `batch`: rows that a step of a device takes."""
    paced = f"a step of {1000 * step:,.0f} ms waits {1000 * best.wait:,.1f} ms for its batch"
    who = f"the loader waits for the model: with {best.setting} {paced}"
    if not best.keeps_up(step):
        lost = best.wait / (best.wait + step)
        who = f"the model waits for the loader: at best, with {best.setting}, {paced}, {lost:.0%} of the time"
    return f"{who}; flat out it gives {best.samples:,.0f} samples/s, and a step asks for {batch / step:,.0f}."


def table(measured: Sequence[Pass]) -> Table:
    """A row for each pass."""
    rows = [
        (p.setting.workers, p.setting.prefetch, p.cache, p.first, p.samples, 1000 * p.wait)
        for p in measured
    ]
    return Table(columns=COLUMNS, rows=rows)
