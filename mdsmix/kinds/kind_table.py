"""The table of all kinds of stream. A new kind is a file with a class. The function for its `kind:`
in `KINDS` imports and returns it.

A kind is imported when a recipe or a stream has it. To import all takes 7 of the 140 ms of a
command that finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdsmix.kinds.kind import Kind


def _import_pretraining() -> list[type[Kind]]:
    from mdsmix.kinds.pretraining import Pretraining

    return [Pretraining]


def _import_finetuning() -> list[type[Kind]]:
    from mdsmix.kinds.conversations import Conversations
    from mdsmix.kinds.finetuning import Pairs
    from mdsmix.kinds.pictured import ConversationsWithImages

    return [Pairs, Conversations, ConversationsWithImages]


def _import_preference() -> list[type[Kind]]:
    from mdsmix.kinds.pictured_preferences import PreferencesWithImages
    from mdsmix.kinds.preferences import Preferences
    from mdsmix.kinds.unpaired_preferences import UnpairedPreferences

    return [Preferences, PreferencesWithImages, UnpairedPreferences]


def _import_prompt() -> list[type[Kind]]:
    from mdsmix.kinds.prompts import Prompts

    return [Prompts]


KINDS: dict[str, Callable[[], list[type[Kind]]]] = {
    "pretraining": _import_pretraining,
    "finetuning": _import_finetuning,
    "preference": _import_preference,
    "prompt": _import_prompt,
}
"The recipe's `kind:` -> function that imports and returns the kinds that it may mean."


def find_kinds(word: str | None) -> list[type[Kind]]:
    """Return the kinds that a recipe may mean by `kind: WORD`: for `finetuning` these are pairs,
    conversations, and conversations with images. The records' shape decides between them.
    """
    return KINDS[word]() if word in KINDS else []


def list_kinds() -> list[type[Kind]]:
    """Return all kinds."""
    return [kind for word in KINDS for kind in find_kinds(word)]
