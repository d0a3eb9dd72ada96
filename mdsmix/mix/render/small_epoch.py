"""Keys of train_loader for an epoch with few samples, such as the one record of a first try.

LLM-Foundry's usual values suit much data. With `drop_last: true`, an epoch that is smaller than a
batch gives no batch. Eight workers have less than a batch each to read, and are started again for
each epoch: an epoch of one sample took 2.5 s with them, and 0.04 s without.

Such keys are only set in a config whose batch size is known, and never in place of the user's. The
head of the YAML names them, so that the next rendering, perhaps of more data, does not take them
for the user's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mdsmix.foundry_yaml.training_yaml import TRAIN, Settings
from mdsmix.frozen import frozen
from mdsmix.messages import plural
from mdsmix.mix.epoch.draws import count_loader_draws, get_batching_method
from mdsmix.mix.render.foundry_config import NUM_WORKERS, WITHOUT_WORKERS, WORKER_KEYS
from mdsmix.mix.render.set_into import MARK
from mdsmix.mix.streams.mix import Mix
from mdsmix.recipe import Recipe

KEEP_LAST: Settings = {"drop_last": False}
HEAD = "set for an epoch with few samples:"
HEAD_LINE = re.compile(rf"^{MARK} {HEAD} (.*)$", re.MULTILINE)
"The line of the head; the group is the keys of train_loader, with commas."


@frozen
class SmallEpoch:
    """An epoch with few samples, and the keys of train_loader that suit it."""

    samples: int
    batch: int
    "Rows of a step, over all devices."
    defaults: Settings

    @property
    def head_line(self) -> str:
        """The line of the YAML's head on these keys."""
        return f"{HEAD} {', '.join(self.defaults)}"

    def add_to(self, config: Settings) -> Settings:
        """Return the config with these keys in its train_loader."""
        loader = config.get(TRAIN)
        user_keys = loader if isinstance(loader, Mapping) else {}
        return {**config, TRAIN: {**self.defaults, **user_keys}}

    def explain(self, change: str) -> str:
        """Return the line of a changed key, such as `train_loader.num_workers: 4 -> 0`. The line of
        the first of these keys gets the reason added, so that the reason is printed once.
        """
        first = next(iter(self.defaults))
        if not change.startswith(f"{TRAIN}.{first}:"):
            return change
        return f"{change} (an epoch has {plural(self.samples, 'sample')}, a batch {self.batch:,})"


def find_small_epoch(mix: Mix, recipe: Recipe, config: Settings) -> SmallEpoch | None:
    """Return the keys of train_loader for an epoch with few samples. Keys that the config or the
    recipe sets are left out.

    None if no key remains, or if it is unknown how many samples a batch needs: without a batch
    size, with packed rows, or if batches are not drawn at random (batching_method).

    Args:
        mix: the mix as it is rendered without such keys.
        config: the config that the mix is set into, without the keys of an earlier rendering.
    """
    batch = mix.yaml.batch_size
    is_plain = get_batching_method(mix.train) == "random"
    if not batch or not is_plain or mix.train.unopened or mix.train.dataset.get("packing_ratio"):
        return None
    samples = sum(count_loader_draws(mix.train) or [])
    config_loader = config.get(TRAIN)
    set_keys = set(recipe.train_loader)
    if isinstance(config_loader, Mapping):
        set_keys |= config_loader.keys()
    defaults: dict[str, Any] = {}
    # An epoch without a full batch: train on the incomplete one.
    if 0 < samples < batch and "drop_last" not in set_keys:
        defaults |= KEEP_LAST
    # Each worker would have less than a batch to read.
    # Without workers torch refuses a timeout too.
    has_worker_keys = bool(set_keys.intersection((*WORKER_KEYS, "timeout")))
    if 0 < samples < batch * NUM_WORKERS and not has_worker_keys:
        defaults |= WITHOUT_WORKERS
    return SmallEpoch(samples, batch, defaults) if defaults else None


def forget_small_epoch(text: str, config: Settings) -> Settings:
    """Return the config without the keys that an earlier rendering set for few samples, unless
    somebody has changed their values since.

    Args:
        text: the text of the config, with its head.
    """
    line = HEAD_LINE.search(text)
    loader = config.get(TRAIN)
    if not line or not isinstance(loader, Mapping):
        return config
    # A key is left out only if the head names it and it still has the value that was set.
    small = {**KEEP_LAST, **WITHOUT_WORKERS}
    names = set(line[1].split(", "))
    user_keys = {}
    for key, value in loader.items():
        if key not in names or key not in small or value != small[key]:
            user_keys[key] = value
    return {**config, TRAIN: user_keys}
