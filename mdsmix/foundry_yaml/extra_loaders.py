"""The table of loaders that read only one kind of stream, and the keys of every loader's `dataset`.

A new loader of this sort is one more file like `preference_loader.py`, and a line in
`EXTRA_LOADERS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mdsmix.foundry_yaml.loader_keys import DATASETS, ExtraLoader, Types
from mdsmix.foundry_yaml.preference_loader import PREFERENCE_LOADER
from mdsmix.foundry_yaml.prompt_loader import PROMPT_LOADER
from mdsmix.foundry_yaml.unpaired_loader import UNPAIRED_LOADER

EXTRA_LOADERS: Mapping[str, ExtraLoader] = {
    loader.name: loader for loader in (PREFERENCE_LOADER, PROMPT_LOADER, UNPAIRED_LOADER)
}
"Name -> loader, for each loader that reads only one kind of stream (`Kind.loader`)."
DATASET_KEYS_OF: Mapping[str, Types] = {
    **DATASETS,
    **{name: loader.keys for name, loader in EXTRA_LOADERS.items()},
}
"Name of each loader that mdsmix knows -> the keys of its `dataset` that have an effect."
