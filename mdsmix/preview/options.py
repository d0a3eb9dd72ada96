"""The options of a preview: the machines of the run, the steps, and the state of a run that is
resumed.

Wrong options are refused before Streaming is imported, which takes 4-15 s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mdsmix import schema
from mdsmix.errors import RecipeError
from mdsmix.mix.epoch.draws import World


@dataclass(frozen=True, kw_only=True)
class EpochState:
    """The place at which an epoch is entered, by the keys of Streaming's `state_dict`. None:
    Streaming's value for a first start.
    """

    epoch: int
    sample_in_epoch: int
    "Samples that all devices together have drawn of this epoch."
    num_canonical_nodes: int | None = None
    shuffle_seed: int | None = None
    initial_physical_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of one preview."""

    world: World
    steps: int = 3
    state: EpochState = EpochState(epoch=0, sample_in_epoch=0)
    """The place at which the epoch is entered: the state of a stopped run, or the beginning of an
    epoch.
    """
    from_step: int = 0
    "Steps of the epoch that are passed over; ignored where `state` is in mid-epoch."
    seed: int | None = None
    "Replaces the shuffle_seed of the YAML; None keeps it."
    samples: int = 3
    "Samples shown of each step."
    windows: int = 10
    "Windows of steps that the epoch is cut into, at most."
    read: int = 256 << 20
    "The most bytes of shards that are read."


def read_state(path: Path) -> EpochState:
    """The state in a JSON file that `loader.state_dict()` was written to; RecipeError where the
    file holds no such state.
    """
    try:
        tree: Any = json.loads(path.read_bytes())
        # The keys above the state in a checkpoint of Composer.
        for key in ("state", "dataset_state", "train"):
            tree = tree.get(key, tree)
        known = {f.name: tree[f.name] for f in fields(EpochState) if f.name in tree}
        return schema.read(EpochState, known)
    except (OSError, ValueError, AttributeError, schema.Misfit) as error:
        raise RecipeError(
            f"--state {path} is no state of a loader ({error}); write there what loader.state_dict() gives, by json.dump."
        ) from None
