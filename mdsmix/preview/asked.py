"""What a preview is asked: the machines of the run, the steps, and where a run that goes on stands.

A wrong question is told before Streaming is imported, which takes 4-15 s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mdsmix import typed
from mdsmix.errors import RecipeError
from mdsmix.mix.draws import World


@dataclass(frozen=True, kw_only=True)
class EpochState:
    """Where an epoch is entered: the keys of Streaming's `state_dict`; None is what a first start finds out by itself."""

    epoch: int
    sample_in_epoch: int
    "Samples that all devices have drawn of this epoch."
    num_canonical_nodes: int | None = None
    shuffle_seed: int | None = None
    initial_physical_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be shown."""

    world: World
    steps: int = 3
    state: EpochState = EpochState(epoch=0, sample_in_epoch=0)
    "Where the epoch is entered: that of a run that stopped, or the beginning of one."
    from_step: int = 0
    "Steps of the epoch that are behind, where no state says so."
    seed: int | None = None
    "Instead of the shuffle_seed of the YAML."
    samples: int = 3
    "Samples shown of each step."
    windows: int = 10
    read: int = 256 << 20
    "Bytes that are read at most."


def read_state(path: Path) -> EpochState:
    """What `loader.state_dict()` gave, as JSON; RecipeError where it is not that."""
    try:
        tree: Any = json.loads(path.read_bytes())
        for key in ("state", "dataset_state", "train"):  # where a checkpoint of Composer keeps it
            tree = tree.get(key, tree)
        known = {f.name: tree[f.name] for f in fields(EpochState) if f.name in tree}
        return typed.read(EpochState, known)
    except (OSError, ValueError, AttributeError, typed.Misfit) as error:
        raise RecipeError(
            f"--state {path} is no state of a loader ({error}); write there what loader.state_dict() gives, by json.dump."
        ) from None
