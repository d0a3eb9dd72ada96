"""The table of all kinds of stream, and the table of their loaders. A new kind is one more file and
one more class in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mdsmix.foundry_yaml.loader_keys import DATASETS, ExtraLoader, Types
from mdsmix.kinds.conversations import Conversations
from mdsmix.kinds.finetuning import Pairs
from mdsmix.kinds.kind import Kind
from mdsmix.kinds.pictured import ConversationsWithImages
from mdsmix.kinds.pictured_preferences import PreferencesWithImages
from mdsmix.kinds.preferences import Preferences
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.kinds.prompts import Prompts
from mdsmix.kinds.unpaired_preferences import UnpairedPreferences

KINDS: list[type[Kind]] = [
    Pretraining,
    Pairs,
    Conversations,
    ConversationsWithImages,
    Preferences,
    PreferencesWithImages,
    Prompts,
    UnpairedPreferences,
]
EXTRA_LOADERS: Mapping[str, ExtraLoader] = {
    kind.loader.name: kind.loader for kind in KINDS if kind.loader
}
"Name -> loader, for each loader that reads only one kind (`Kind.loader`)."
DATASET_KEYS_OF: Mapping[str, Types] = {
    **DATASETS,
    **{name: loader.keys for name, loader in EXTRA_LOADERS.items()},
}
"Name of each loader that mdsmix knows -> the keys of its `dataset` that have an effect."


def find_kinds(word: str | None) -> list[type[Kind]]:
    """Return the kinds that a recipe may mean by `kind: WORD`. For `finetuning` these are pairs,
    conversations and images.
    """
    return [kind for kind in KINDS if kind.word == word]
