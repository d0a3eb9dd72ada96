"""What a preview is asked: the devices of the run, the steps, and where a run that goes on stands.

All that can be wrong here is told before Streaming is imported, which takes 4-15 s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.training.keys import whole
from mdsmix.typed import brief
from mdsmix.words import plural

STEPS, SAMPLES, WINDOWS = 3, 3, 10
READ = 256 << 20
"Bytes that a preview reads at most."
MOST_ROWS = 1 << 17
"131,072 rows of all steps asked for: more is the work of a training run."


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The devices that share a global batch."""

    nodes: int
    gpus: int
    "Of each node."
    workers: int
    "Processes that read for each device; 0: it reads itself."
    batch: int
    "Rows of a global batch."
    replication: int = 1
    "Neighbouring devices that get the same rows."

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus

    @property
    def ranks(self) -> int:
        """Devices that get rows of their own."""
        return self.devices // self.replication

    @property
    def rows(self) -> int:
        """Rows of a global batch that one device gets."""
        return self.batch // self.ranks

    def __post_init__(self) -> None:
        if self.devices % self.replication:
            raise RecipeError(
                f"replication is {self.replication}, which does not divide {plural(self.devices, 'GPU')}; Streaming refuses "
                "it: set --nodes and --gpus to those of the run, or another replication."
            )
        if self.batch < 1:
            raise RecipeError(f"A global batch of {self.batch} rows has none: give --batch N.")
        if self.batch % self.ranks:
            less = self.batch // self.ranks * self.ranks
            near = f"{less:,} or " if less else ""
            raise RecipeError(
                f"A global batch of {plural(self.batch, 'row')} is not divisible by {plural(self.ranks, 'device')}, and "
                f"LLM-Foundry refuses it: make it {near}{less + self.ranks:,}, or set --nodes and --gpus to those of the run."
            )


@dataclass(frozen=True, kw_only=True)
class State:
    """Where an epoch is entered: the keys of Streaming's `state_dict`; None is what a first start finds out by itself."""

    epoch: int = 0
    sample_in_epoch: int = 0
    "Samples that all devices have drawn of this epoch."
    num_canonical_nodes: int | None = None
    shuffle_seed: int | None = None
    initial_physical_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be shown."""

    cluster: Cluster
    steps: int = STEPS
    epoch: int = 0
    from_step: int = 0
    "Steps of the epoch that are behind, as after a resume."
    state: State | None = None
    "Of a run that stopped, instead of these two."
    seed: int | None = None
    "Instead of the shuffle_seed of the YAML."
    samples: int = SAMPLES
    "Samples shown of each step."
    windows: int = WINDOWS
    read: int = READ

    def __post_init__(self) -> None:
        if self.steps * self.cluster.batch > MOST_ROWS:
            raise RecipeError(
                f"{plural(self.steps, 'step')} of {plural(self.cluster.batch, 'row')} are more than the {MOST_ROWS:,} rows that "
                f"a preview looks at: ask for at most {max(1, MOST_ROWS // self.cluster.batch)}, and for others by --from-step."
            )


def batch_of(given: int | None, found: Any, origin: str) -> int:
    """--batch, or the global_train_batch_size of the YAML."""
    batch = given if given is not None else whole(found)
    if batch is None:
        said = (
            "no global_train_batch_size"
            if found is None
            else f"global_train_batch_size: {brief(found)}"
        )
        raise RecipeError(
            f"{origin} has {said}, so nothing says how many rows a step takes: give --batch N, the rows of all devices together."
        )
    return batch


def read_state(path: Path) -> State:
    """What `loader.state_dict()` gave, as JSON; RecipeError where it is not that."""
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise RecipeError(f"--state {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise RecipeError(
            f"--state {path} is no JSON: write there what loader.state_dict() gives, by json.dump."
        ) from None
    found = _dataset_state(tree)
    values: dict[str, Any] = {f.name: found.get(f.name) for f in fields(State)}
    wrong = next((n for n, v in values.items() if _is_wrong(n, v)), None)
    if wrong:
        raise RecipeError(
            f"--state {path} is no state of a loader: its {wrong} is {brief(values[wrong])}; it must hold epoch and "
            "sample_in_epoch as loader.state_dict() gives them."
        )
    return State(**{name: whole(value) for name, value in values.items()})  # type: ignore[arg-type]


def _is_wrong(name: str, value: Any) -> bool:
    must = name in ("epoch", "sample_in_epoch")
    least = 1 if "nodes" in name else 0
    return must if value is None else whole(value) is None or value < least


def _dataset_state(tree: Any) -> Mapping[str, Any]:
    """The state itself, or where a checkpoint of Composer keeps it: `dataset_state.train`."""
    for key in ("state", "dataset_state", "train"):
        if isinstance(tree, Mapping) and isinstance(tree.get(key), Mapping):
            tree = tree[key]
    return tree if isinstance(tree, Mapping) else {}
