"""The loader that `mdsmix bench` measures, and the settings that it tries.

The loader is read as one rank of a run would read it. Other ranks are not simulated, though they
would share the network and the disk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import as_whole_number
from mdsmix.foundry_yaml.training_yaml import (
    LoaderSection,
    StreamSection,
    TrainingYaml,
    read_training_yaml,
)
from mdsmix.frozen import frozen
from mdsmix.messages import format_yaml_value, plural

PREFETCH = [2, 4]
"Batches that each worker makes in advance; 2 is torch's and Foundry's default."
DEFAULT_BATCH = 8
"Rows of a step if neither the YAML nor --batch sets it."
STREAM_KEYS = frozenset({"streams", "remote", "local", "split"})
"Keys of `dataset` that name its streams."


@dataclass(frozen=True, order=True)
class LoaderSetting:
    """Workers and prefetching of a loader. They change its speed, but not its batches."""

    workers: int
    "Worker processes of a rank."
    prefetch: int = 0
    "Batches that each worker makes in advance; 0 without workers."

    @property
    def loader_keys(self) -> dict[str, int | bool | None]:
        """The setting as keys of `train_loader`: `{"num_workers": 2, "prefetch_factor": 4,
        "persistent_workers": True}`. Without workers the other two keys are None and False, since
        torch refuses other values.
        """
        keys = {"num_workers": self.workers, "prefetch_factor": self.prefetch or None}
        return keys | {"persistent_workers": self.workers > 0}

    @property
    def overrides(self) -> list[str]:
        """The setting as overrides of a recipe, such as `train_loader.num_workers=2`."""
        return [
            f"train_loader.{key}={format_yaml_value(value)}"
            for key, value in self.loader_keys.items()
        ]

    @property
    def ready(self) -> int:
        """The most batches that may be ready: all that the workers prefetch, and the one that the
        loop has requested.
        """
        return 1 + self.workers * self.prefetch

    def __str__(self) -> str:
        ahead = f", prefetch {self.prefetch}" if self.prefetch else ""
        return f"{plural(self.workers, 'worker')}{ahead}"


def list_settings(cores: int, workers: str | None, prefetch: str | None) -> list[LoaderSetting]:
    """List the settings to try: each number of workers with each prefetching.

    Raises RecipeError if an entry is not a number, or if there are more workers than cores.

    Args:
        cores: processor cores of a rank.
        workers: a list such as `0,2,4`; None: 0, 1, 2, 4, ... up to `cores`.
        prefetch: a list such as `2,4`; None: PREFETCH.
    """
    # Numbers are doubled, since a difference of one worker cannot be measured: 12 cores give 0, 1,
    # 2, 4, 8, 12.
    doubled = [0, *(1 << n for n in range((cores - 1).bit_length())), cores]
    counts = _parse_numbers("--workers", workers, 0, doubled)
    if max(counts) > cores:
        raise RecipeError(
            f"--workers {max(counts)}: a rank has only {plural(cores, 'core')} here, and workers "
            "that share a core would make the loader look slow; set --workers to at most "
            f"{cores}, or measure on the training machine."
        )
    batches_ahead = _parse_numbers("--prefetch", prefetch, 1, PREFETCH)
    settings = list[LoaderSetting]()
    for count in counts:
        if count:
            settings += [LoaderSetting(count, batches) for batches in batches_ahead]
        else:
            settings.append(LoaderSetting(0))
    return settings


def _parse_numbers(option: str, text: str | None, least: int, default: list[int]) -> list[int]:
    """Parse a list such as `4,0,2,2` to sorted, distinct numbers: 0, 2, 4.

    Raises RecipeError if an entry is not a whole number, or less than `least`.

    Args:
        option: the name of the option, for the message.
        text: the list; None if the option is not set.
        default: returned if the option is not set.
    """
    if text is None:
        return default
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entry.isdigit() and int(entry) >= least for entry in entries):
        raise RecipeError(
            f"{option} {text}: {option} must be whole numbers of at least {least}, with commas "
            "between them, such as 2,4."
        )
    return sorted({int(entry) for entry in entries})


@frozen(kw_only=True)
class Bench:
    """A loader of a training YAML, and how long it is measured."""

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
    "The number that `packing_ratio: auto` was computed to; None if the YAML does not say auto."

    @property
    def fetched(self) -> list[StreamSection]:
        """Streams with a remote, which a rank copies to its local folders. A cold cache has no
        copies.
        """
        return [s for s in self.section.stream_sections if s.settings.get("remote")]

    def make_config(self, setting: LoaderSetting, caches: str) -> dict[str, Any]:
        """Make a config that has only the measured loader, under `train_loader`.

        Args:
            caches: the folder for local copies. Each stream gets a folder in it.
        """
        streams = {s.name: dict(s.settings) for s in self.section.stream_sections}
        for stream in self.fetched:
            streams[stream.name]["local"] = os.path.join(caches, stream.name)
        dataset = {k: v for k, v in self.section.dataset.items() if k not in STREAM_KEYS}
        dataset["streams"] = streams
        if self.packing_ratio:
            dataset["packing_ratio"] = self.packing_ratio
        loader = {key: value for key, value in self.section.section.items() if key != "label"}
        loader |= setting.loader_keys
        # Persistent workers are kept for a second epoch, but a pass reads only one.
        loader["persistent_workers"] = False
        loader["dataset"] = dataset
        return {"tokenizer": self.yaml.config.get("tokenizer"), "train_loader": loader}


def count_device_rows(yaml: TrainingYaml, section: LoaderSection, ranks: int) -> int | None:
    """Return the rows of one device in a step, or None if the YAML does not set a batch size.

    Raises RecipeError if the YAML's batch cannot be divided by the number of ranks.

    Args:
        ranks: the devices of the run.
    """
    if not section.trains:
        return as_whole_number(yaml.config.get("device_eval_batch_size"))
    batch = yaml.batch_size
    if batch is None:
        return None
    if batch % ranks or batch < ranks:
        raise RecipeError(
            f"global_train_batch_size {batch} of {yaml.origin} cannot be divided by --gpus "
            f"{ranks}; set --batch ROWS, the rows of one device, or another number of GPUs."
        )
    return batch // ranks


class DescribedBench(NamedTuple):
    """A bench, and a sentence that describes its loader."""

    bench: Bench
    description: str


def read_bench(
    path: str, loader: str, batch: int | None, ranks: int, **measured: Any
) -> DescribedBench:
    """Read a loader of a training YAML. Return the Bench that measures it, and a sentence that says
    what is measured: the loader, its streams, the rows of a batch and the simulated step.

    Raises RecipeError if the YAML cannot be read, is a recipe, or has no loader of that name; or if
    the global batch of the YAML cannot be divided by `ranks`.

    Args:
        path: the training YAML.
        loader: `train_loader`, or `eval_loader.<label>`.
        batch: rows of one device in a step; None: as the YAML sets them, or DEFAULT_BATCH.
        ranks: the number of devices of the run, which share the YAML's batch.
        measured: the other fields of the Bench: `step` (seconds that a step of the model takes),
            `seconds` (of measurement for each setting) and `tmp` (the folder for local copies of
            shards; None: the system's folder for temporary files).
    """
    yaml = read_training_yaml(path, loader)
    section = yaml.loader(loader)
    rows = batch or count_device_rows(yaml, section, ranks)
    bench = Bench(yaml=yaml, section=section, batch=rows or DEFAULT_BATCH, **measured)
    assumption = ""
    if not rows:
        assumption = " (assumed: the YAML has no global_train_batch_size; set --batch)"
    description = (
        f"{section.label} of {yaml.origin}: {plural(len(section.stream_sections), 'stream')}, "
        f"{len(bench.fetched)} of them with a remote; {plural(bench.batch, 'row')}{assumption} a "
        f"step of {1000 * bench.step:,.0f} ms, which is simulated"
    )
    return DescribedBench(bench, description)
