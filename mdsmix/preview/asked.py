"""What a preview is asked: the machines of the run, the steps, and where a run that goes on stands.

All that can be wrong here is told before Streaming is imported, which takes 4-15 s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.mix.draws import World
from mdsmix.typed import brief
from mdsmix.words import plural

MOST_ROWS = 1 << 17
"131,072 rows of all steps asked for: more is the work of a training run."


@dataclass(frozen=True, kw_only=True)
class EpochState:
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

    world: World
    steps: int = 3
    state: EpochState = field(default_factory=EpochState)
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

    def __post_init__(self) -> None:
        if self.steps * self.world.batch > MOST_ROWS:
            raise RecipeError(
                f"{plural(self.steps, 'step')} of {plural(self.world.batch, 'row')} are more than the {MOST_ROWS:,} rows that "
                f"a preview looks at: ask for at most {max(1, MOST_ROWS // self.world.batch)}, and for others by --from-step."
            )


def read_state(path: Path) -> EpochState:
    """What `loader.state_dict()` gave, as JSON; RecipeError where it is not that."""
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is no JSON"
        raise RecipeError(
            f"--state {path} {why}; write there what loader.state_dict() gives, by json.dump."
        ) from None
    for key in ("state", "dataset_state", "train"):  # where a checkpoint of Composer keeps it
        if isinstance(tree, dict) and key in tree:
            tree = tree[key]
    tree = tree if isinstance(tree, dict) else {}
    given: dict[str, Any] = {f.name: tree.get(f.name) for f in fields(EpochState)}
    for name, value in given.items():
        if value is None and name not in ("epoch", "sample_in_epoch"):
            continue
        if type(value) is not int or value < ("nodes" in name):
            raise RecipeError(
                f"--state {path} is no state of a loader: its {name} is {brief(value)}; it must hold epoch and "
                "sample_in_epoch as loader.state_dict() gives them."
            )
    return EpochState(**given)
