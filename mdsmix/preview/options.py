"""The options of a preview: the machines of the run, the steps, and the state of a run that is
resumed.

This module does not import Streaming, which takes 4-15 s, so wrong options are refused at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mdsmix import schema
from mdsmix.errors import RecipeError
from mdsmix.mix.epoch.draws import Machines


@dataclass(frozen=True, kw_only=True)
class EpochState:
    """The position from which an epoch is previewed, under the names of Streaming's `state_dict`.

    None means Streaming's value for a run that starts fresh.
    """

    epoch: int
    sample_in_epoch: int
    "Samples of this epoch that all devices together have drawn."
    num_canonical_nodes: int | None = None
    shuffle_seed: int | None = None
    initial_physical_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PreviewOptions:
    """The options of one preview."""

    world: Machines
    steps: int = 3
    state: EpochState = EpochState(epoch=0, sample_in_epoch=0)
    "The position from which the epoch is previewed: a stopped run's state, or an epoch's start."
    from_step: int = 0
    "Steps of the epoch to skip. Ignored if `state` is in the middle of an epoch."
    seed: int | None = None
    "Replaces the YAML's shuffle_seed; None keeps it."
    samples: int = 3
    "Samples to show of each step."
    windows: int = 10
    "The epoch is cut into at most this many windows of steps."
    read: int = 256 << 20
    "Bytes of shards to read at most."


def read_state(path: Path) -> EpochState:
    """Read a loader's state from a JSON file of `loader.state_dict()`, or from a checkpoint's.

    Raises RecipeError if the file contains no such state.
    """
    try:
        tree: Any = json.loads(path.read_bytes())
        # A checkpoint of Composer nests the loader's state under these keys.
        for key in ("state", "dataset_state", "train"):
            tree = tree.get(key, tree)
        values = {f.name: tree[f.name] for f in fields(EpochState) if f.name in tree}
        return schema.parse_mapping(EpochState, values)
    except (OSError, ValueError, AttributeError, schema.Misfit) as error:
        raise RecipeError(
            f"--state {path} is not a loader's state ({error}): write loader.state_dict() to it "
            "with json.dump."
        ) from None
