"""The options of a preview: the machines of the run, the steps, and the state of a run that is
resumed.

This module does not import Streaming, which takes 4-15 s, so wrong options are refused at once.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from mdsmix import schema
from mdsmix.errors import RecipeError
from mdsmix.frozen import frozen
from mdsmix.mix.epoch.draws import Machines


@frozen(kw_only=True)
class EpochState:
    """The position from which an epoch is previewed, under the names of Streaming's `state_dict`.

    A field that is None has the value that Streaming sets when a run starts.
    """

    epoch: int
    sample_in_epoch: int
    "Samples of this epoch that all devices together have drawn."
    num_canonical_nodes: int | None = None
    shuffle_seed: int | None = None
    initial_physical_nodes: int | None = None


@frozen(kw_only=True)
class PreviewOptions:
    """The options of one preview."""

    world: Machines
    "The machines of the run."
    steps: int = 3
    "Steps to show."
    state: EpochState = EpochState(epoch=0, sample_in_epoch=0)
    "Where the preview begins: the state of a stopped run, or the beginning of an epoch."
    from_step: int = 0
    "The number of steps of the epoch to skip; ignored if `state` is in the middle of an epoch."
    seed: int | None = None
    "Replaces the YAML's shuffle_seed; None keeps it."
    samples: int = 3
    "Samples to show of each step."
    windows: int = 10
    "The most windows into which the epoch is cut; a window is a run of steps."
    read: int = 256 << 20
    "The most bytes of shards to read: 256 MiB."


def read_state(path: Path) -> EpochState:
    """Read the state of a loader from a JSON file, which has the result of `loader.state_dict()` or
    the state of a Composer checkpoint.

    Raises RecipeError if the file contains no state of a loader.
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
            f"--state {path} is not a loader's state ({error}): write the result of "
            "loader.state_dict() to this file with json.dump."
        ) from None
