"""Which settings of a loader are tried on this machine, as one rank of a run would have them, and which of them is chosen.

A setting keeps up where a step waits for its batch no more than 2 % of itself. Of those that keep up the one with the fewest
workers is chosen, then the one that prefetches least: workers cost memory, and cores that the other ranks need. Where none
keeps up, the one whose steps wait least is chosen. The other ranks are not simulated: they would share the network and the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mdsmix.kinds  # noqa: F401 - a kind of stream registers the loader that it brings
from mdsmix.errors import RecipeError
from mdsmix.table import Column, Table
from mdsmix.training.loader_keys import whole
from mdsmix.training.sections import LoaderSection, StreamSection, TrainingYaml
from mdsmix.training.training_yaml import read_yaml
from mdsmix.words import plural, spelled

PREFETCH = (2, 4)
"Batches that each worker makes in advance; 2 is torch's and Foundry's default."
TOLERATED = 0.02
"Of a step: below it the measurement itself is not sure."
BATCH = 8
"Rows of a step where neither the YAML nor --batch says it."
OF_STREAMS = frozenset({"streams", "remote", "local", "split"})


@dataclass(frozen=True, slots=True, order=True)
class LoaderSetting:
    """One way to set a loader: it changes the speed and no batch."""

    workers: int
    prefetch: int | None
    "Batches of each worker in advance; None without workers."

    @property
    def loader_keys(self) -> dict[str, int | bool | None]:
        """As `train_loader` takes it: without workers torch wants neither prefetching nor persistence."""
        keys = {"num_workers": self.workers, "prefetch_factor": self.prefetch}
        return keys | {"persistent_workers": self.workers > 0}

    @property
    def overrides(self) -> list[str]:
        """As `key=value` of a recipe."""
        return [f"train_loader.{key}={spelled(value)}" for key, value in self.loader_keys.items()]

    @property
    def ready(self) -> int:
        """Batches that may lie ready, the one that is asked for among them."""
        return 1 + self.workers * (self.prefetch or 0)

    def __str__(self) -> str:
        ahead = f", prefetch {self.prefetch}" if self.prefetch else ""
        return f"{plural(self.workers, 'worker')}{ahead}"


@dataclass(frozen=True, slots=True)
class Cores:
    """The processors that one rank has of this machine."""

    count: int
    ranks: int

    @property
    def each(self) -> int:
        """Cores for a rank and its workers; a rank that has less than one has to do with one worker."""
        return max(1, self.count // self.ranks)

    def __str__(self) -> str:
        if self.ranks == 1:
            return f"one rank on {plural(self.count, 'core')}"
        return f"one rank of {self.ranks} on {plural(self.count, 'core')}, {self.count / self.ranks:g} each"


def settings(cores: Cores, workers: str | None, prefetch: str | None) -> list[LoaderSetting]:
    """The settings to try: workers from none to a core each by doubling, unless `workers` and `prefetch` list others.
    RecipeError where one is no number, or more workers are asked for than a rank has cores."""
    counts = _numbers("--workers", workers, 0) or _doubled(cores.each)
    if max(counts) > cores.each:
        raise RecipeError(
            f"--workers {max(counts)}: a rank has {plural(cores.each, 'core')} here ({cores}), and workers that take turns on "
            f"them measure the machine instead of the loader; name at most {cores.each}, or measure on the training machine."
        )
    ahead = _numbers("--prefetch", prefetch, 1) or PREFETCH
    return [LoaderSetting(n, batches) for n in counts for batches in (ahead if n else [None])]


def _numbers(option: str, text: str | None, least: int) -> list[int]:
    """`0,2,4` as numbers, in order."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(part.isdigit() and int(part) >= least for part in parts):
        raise RecipeError(
            f"{option} {text}: these must be whole numbers of {least} or more with commas between them, such as 2,4."
        )
    return sorted({int(part) for part in parts})


def _doubled(most: int) -> list[int]:
    """0, 1, 2, 4, ... and the most: whether 5 or 6 workers are best is noise, whether 1 or 8 are is not."""
    return [0, *(1 << n for n in range((most - 1).bit_length())), most]


@dataclass(frozen=True, kw_only=True)
class RankLoader:
    """A loader of a training YAML as one rank reads it."""

    yaml: TrainingYaml
    section: LoaderSection
    batch: int
    "Rows that a device takes in a step."
    is_batch_supposed: bool = False
    "Whether nobody said how many rows a step takes."
    packing_ratio: float | None = None
    "What `packing_ratio: auto` comes to."

    @property
    def fetched(self) -> list[StreamSection]:
        """Streams of which a rank keeps copies: a cold cache has none of them."""
        streams = self.section.stream_sections
        return [s for s in streams if s.settings.get("remote") and not s.is_only_copy]

    def __str__(self) -> str:
        far = len(self.fetched)
        remote = f"{far} of them with a remote" if far else "all of them local"
        streams = plural(len(self.section.stream_sections), "stream")
        return f"{self.section.label} of {self.yaml.origin}: {streams}, {remote}"

    def config(self, setting: LoaderSetting, caches: Path | None) -> dict[str, Any]:
        """A config of this loader alone; `caches` is where copies go, a folder for each stream."""
        dataset = {k: v for k, v in self.section.dataset.items() if k not in OF_STREAMS}
        dataset["streams"] = {s.name: s.settings for s in self.section.stream_sections}
        if caches:
            for stream in self.fetched:
                local = str(caches / stream.name)
                dataset["streams"][stream.name] = {**stream.settings, "local": local}
        if self.packing_ratio:
            dataset["packing_ratio"] = self.packing_ratio
        # Persistent workers would stay for a second epoch, and there is none.
        keys = setting.loader_keys | {"persistent_workers": False, "dataset": dataset}
        given = {k: v for k, v in self.section.section.items() if k != "label"}
        return {"tokenizer": self.yaml.config.get("tokenizer"), "train_loader": given | keys}


def read_rank(path: str, loader: str, batch: int | None, ranks: int) -> RankLoader:
    """RecipeError where the YAML cannot be read, is a recipe, has no such loader, or its batch cannot be divided by the ranks."""
    yaml = read_yaml(path, judged=(loader.partition(".")[0], "tokenizer"))
    section = yaml.loader(loader)
    if section.trains:
        rows = batch or _share(yaml, ranks)
    else:
        rows = batch or whole(yaml.config.get("device_eval_batch_size")) or BATCH
    return RankLoader(
        yaml=yaml, section=section, batch=rows or BATCH, is_batch_supposed=rows is None
    )


def _share(yaml: TrainingYaml, ranks: int) -> int | None:
    """A device's part of the global batch, as LLM-Foundry divides it."""
    batch = yaml.batch_size
    if batch is not None and (batch % ranks or batch < ranks):
        raise RecipeError(
            f"global_train_batch_size {batch} of {yaml.origin} cannot be divided by --gpus {ranks}; say --batch ROWS, those "
            "of one device, or another number of GPUs."
        )
    return batch and batch // ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over the beginning of an epoch."""

    first: float
    "Seconds from the request of the first batch until it was there; starting the workers is part of it."
    wait: float
    "Seconds that a step waited for its batch, the mean of all but the first."
    longest: float
    "The longest of these."
    samples: float
    "A second, read as fast as it goes."
    tokens: float
    "A second, without padding."
    batches: int
    "Batches that were read in all."


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One setting."""

    setting: LoaderSetting
    warm: Pass
    cold: Pass | None = None
    "With an empty cache folder; None where nothing is fetched, since no stream has a remote."

    @property
    def wait(self) -> float:
        """Seconds that a step waits where it waits longer: with a cold cache, as a rule."""
        return max(self.warm.wait, self.cold.wait if self.cold else 0.0)

    @property
    def samples(self) -> float:
        return (self.cold or self.warm).samples

    def keeps_up(self, step: float) -> bool:
        return self.wait <= TOLERATED * step

    def __str__(self) -> str:
        wait = 1000 * self.wait
        return f"{self.setting}: {self.samples:,.0f} samples/s, a step waits {wait:,.1f} ms"


def chosen(measured: Sequence[Timing], step: float) -> Timing:
    """The setting to render. `step`: seconds of a step of the model."""

    def cost(timing: Timing) -> tuple[float, int, int]:
        """Waiting, where it matters, then what the setting takes."""
        s, wait = timing.setting, 0.0 if timing.keeps_up(step) else timing.wait
        return wait, s.workers, s.prefetch or 0

    return min(measured, key=cost)


def verdict(best: Timing, step: float, batch: int) -> str:
    """Who waits for whom, in a sentence. `batch`: rows that a step of a device takes."""
    asked = (
        f"flat out it gives {best.samples:,.0f} samples/s, and a step asks for {batch / step:,.0f}"
    )
    paced = f"a step of {1000 * step:,.0f} ms waits {1000 * best.wait:,.1f} ms"
    if best.keeps_up(step):
        return (
            f"the loader waits for the model: with {best.setting} {paced} for its batch; {asked}."
        )
    lost = best.wait / (best.wait + step)
    return f"the model waits for the loader: at best, with {best.setting}, {paced} more for its batch, {lost:.0%} of the time; {asked}."


COLUMNS = (
    Column("workers"),
    Column("prefetch"),
    Column("cache", "text"),
    Column("first batch, s", "seconds", "first_batch_seconds"),
    Column("samples/s", key="samples_per_second"),
    Column("tokens/s", key="tokens_per_second"),
    Column("wait a step, ms", "seconds", "wait_ms"),
    Column("longest, ms", "seconds", "longest_wait_ms"),
)


def table(measured: Sequence[Timing]) -> Table:
    """A row for each pass, cold and warm."""
    rows = [
        (m.setting.workers, m.setting.prefetch or 0, cache, p.first, p.samples, p.tokens, 1000 * p.wait, 1000 * p.longest)
        for m in measured
        for cache, p in (("cold", m.cold), ("warm", m.warm))
        if p
    ]  # fmt: skip
    return Table(columns=COLUMNS, rows=rows)
