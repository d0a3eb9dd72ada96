"""The settings of a loader that are tried on this machine, as one rank of a run would use them, and
the choice among them.

A setting keeps up where a step waits for its batch at most 2 % of the step's time. Among settings
that keep up, the fewest workers win, then the least prefetching: workers cost memory, and cores
that other ranks need. Where no setting keeps up, the shortest wait wins. Other ranks are not
simulated, though they would share the network and the disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import as_whole_number
from mdsmix.foundry_yaml.training_yaml import (
    LoaderSection,
    StreamSection,
    TrainingYaml,
    read_training_yaml,
)
from mdsmix.messages import format_yaml_value, plural
from mdsmix.table import Column, Table

PREFETCH = [2, 4]
"Batches that each worker makes in advance; 2 is torch's and Foundry's default."
TOLERATED = 0.02
"The share of a step that may be spent waiting; smaller waits cannot be measured reliably."
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


@dataclass(frozen=True, order=True)
class LoaderSetting:
    """Workers and prefetching of a loader. They change its speed and no batch."""

    workers: int
    prefetch: int = 0
    "Batches that each worker makes in advance; 0 without workers."

    @property
    def loader_keys(self) -> dict[str, int | bool | None]:
        """The setting as keys of `train_loader`. Without workers torch takes neither prefetching
        nor persistence.
        """
        keys = {"num_workers": self.workers, "prefetch_factor": self.prefetch or None}
        return keys | {"persistent_workers": self.workers > 0}

    @property
    def overrides(self) -> list[str]:
        """The setting as `key=value` overrides of a recipe."""
        return [
            f"train_loader.{key}={format_yaml_value(value)}"
            for key, value in self.loader_keys.items()
        ]

    @property
    def ready(self) -> int:
        """The most batches that may lie ready, with the requested one."""
        return 1 + self.workers * self.prefetch

    def __str__(self) -> str:
        ahead = f", prefetch {self.prefetch}" if self.prefetch else ""
        return f"{plural(self.workers, 'worker')}{ahead}"


def settings(cores: int, workers: str | None, prefetch: str | None) -> list[LoaderSetting]:
    """The settings to try. `workers` and `prefetch`: lists such as `0,2,4`; by default 0, 1, 2, 4,
    ... workers up to `cores`, and PREFETCH. RecipeError where an entry is no number, or for more
    workers than `cores`.
    """
    # The difference of 5 and 6 workers is noise, that of 1 and 8 is not.
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
    """The numbers of a list such as `0,2,4`, sorted and distinct; `default` where it is None."""
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
    "Rows of one device in a step."
    step: float
    "Seconds of a step of the model."
    seconds: float
    "Seconds of measurement for both passes of a setting together."
    tmp: str | None
    "The folder for cold caches; None: the system's folder for temporary files."
    packing_ratio: float | None = None
    "The number that `packing_ratio: auto` comes to; None for other ratios."

    @property
    def fetched(self) -> list[StreamSection]:
        """Streams with a remote, of which a rank keeps local copies; a cold cache has none."""
        return [s for s in self.section.stream_sections if s.settings.get("remote")]

    def config(self, setting: LoaderSetting, caches: str) -> dict[str, Any]:
        """A config of this loader alone. `caches`: the folder for local copies, with a folder for
        each stream.
        """
        streams = {s.name: dict(s.settings) for s in self.section.stream_sections}
        for stream in self.fetched:
            streams[stream.name]["local"] = os.path.join(caches, stream.name)
        dataset = {k: v for k, v in self.section.dataset.items() if k not in OF_STREAMS}
        dataset["streams"] = streams
        if self.packing_ratio:
            dataset["packing_ratio"] = self.packing_ratio
        # Persistent workers serve a second epoch, and a pass has none.
        keys = setting.loader_keys | {"persistent_workers": False, "dataset": dataset}
        given = {k: v for k, v in self.section.section.items() if k != "label"}
        return {"tokenizer": self.yaml.config.get("tokenizer"), "train_loader": given | keys}


def rows_of(yaml: TrainingYaml, section: LoaderSection, ranks: int) -> int | None:
    """Rows of one device in a step, by the YAML; None where it does not say. RecipeError where the
    ranks do not divide its batch.
    """
    if not section.trains:
        return as_whole_number(yaml.config.get("device_eval_batch_size"))
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
    """The Bench of a YAML, and a sentence on its loader. RecipeError where the YAML cannot be read,
    is a recipe, or has no such loader.
    """
    yaml = read_training_yaml(path, loader)
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


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over the beginning of an epoch."""

    setting: LoaderSetting
    cache: str
    "`cold`: streams with a remote have an empty cache folder; `warm`: the same batches again."
    first: float
    "Seconds from the request of the first batch to its arrival, with the start of the workers."
    wait: float
    "Mean seconds that a step waited for its batch, without the first batch."
    samples: float
    "Samples a second, read as fast as the loader can."
    batches: int
    "All batches that were read."

    def __str__(self) -> str:
        wait = 1000 * self.wait
        return f"{self.setting}, {self.cache}: {self.samples:,.0f} samples/s, a step waits {wait:,.1f} ms"

    def keeps_up(self, step: float) -> bool:
        return self.wait <= TOLERATED * step


def chosen(measured: Sequence[Pass], step: float) -> Pass:
    """The slower pass of the setting to render. `step`: seconds of a step of the model."""
    slower = {each.setting: each for each in sorted(measured, key=lambda each: each.wait)}
    return min(
        slower.values(), key=lambda each: (not each.keeps_up(step) and each.wait, each.setting)
    )


def verdict(best: Pass, step: float, batch: int) -> str:
    """A sentence on whether the loader or the model waits. `step`: seconds; `batch`: rows of one
    device in a step.
    """
    paced = f"a step of {1000 * step:,.0f} ms waits {1000 * best.wait:,.1f} ms for its batch"
    who = f"the loader waits for the model: with {best.setting} {paced}"
    if not best.keeps_up(step):
        lost = best.wait / (best.wait + step)
        who = f"the model waits for the loader: at best, with {best.setting}, {paced}, {lost:.0%} of the time"
    return f"{who}; flat out it gives {best.samples:,.0f} samples/s, and a step asks for {batch / step:,.0f}."


def table(measured: Sequence[Pass]) -> Table:
    """A row for each pass."""
    return Table(
        columns=COLUMNS,
        rows=[
            (p.setting.workers, p.setting.prefetch, p.cache, p.first, p.samples, 1000 * p.wait)
            for p in measured
        ],
    )
