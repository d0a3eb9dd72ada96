"""The table of all kinds of stream. A new kind is one more file and one more class in `KINDS`."""

from __future__ import annotations

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


def find_kinds(word: str | None) -> list[type[Kind]]:
    """Return the kinds that a recipe may mean by `kind: WORD`: for `finetuning` these are pairs,
    conversations, and conversations with images. The records' shape decides between them.
    """
    return [kind for kind in KINDS if kind.word == word]
