"""What a preview is asked: the machines of the run, the steps, and where a run that goes on stands.

All that can be wrong here is told before Streaming is imported, which takes 4-15 s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from mdsmix.errors import RecipeError
from mdsmix.mix.draws import World
from mdsmix.typed import brief
from mdsmix.words import plural

STEPS, SAMPLES, WINDOWS = 3, 3, 10
MUST = ("epoch", "sample_in_epoch")
"Of a state."
READ = 256 << 20
"Bytes that a preview reads at most."
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
    steps: int = STEPS
    epoch: int = 0
    from_step: int = 0
    "Steps of the epoch that are behind, as after a resume."
    state: EpochState | None = None
    "Of a run that stopped, instead of these two."
    seed: int | None = None
    "Instead of the shuffle_seed of the YAML."
    samples: int = SAMPLES
    "Samples shown of each step."
    windows: int = WINDOWS
    read: int = READ

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
    except OSError as error:
        raise RecipeError(f"--state {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise RecipeError(
            f"--state {path} is no JSON: write there what loader.state_dict() gives, by json.dump."
        ) from None
    for key in ("state", "dataset_state", "train"):  # where a checkpoint of Composer keeps it
        if isinstance(tree, Mapping) and key in tree:
            tree = tree[key]
    known = tree if isinstance(tree, Mapping) else {}
    given = {f.name: known[f.name] for f in fields(EpochState) if known.get(f.name) is not None}
    wrong = [
        name
        for name in (*MUST, *given)
        if type(given.get(name)) is not int or given[name] < ("nodes" in name)
    ]
    if wrong:
        raise RecipeError(
            f"--state {path} is no state of a loader: its {wrong[0]} is {brief(given.get(wrong[0]))}; it must hold epoch and "
            "sample_in_epoch as loader.state_dict() gives them."
        )
    return EpochState(**given)
