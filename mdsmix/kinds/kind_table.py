"""The table of all kinds of stream. A new kind is one more file, and one more class in the function
of its word in `KINDS`.

A kind is imported when a recipe or a stream names its word: all of them take 7 ms, of 140 ms for a
command that finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdsmix.kinds.kind import Kind


def _pretraining() -> list[type[Kind]]:
    from mdsmix.kinds.pretraining import Pretraining

    return [Pretraining]


def _finetuning() -> list[type[Kind]]:
    from mdsmix.kinds.conversations import Conversations
    from mdsmix.kinds.finetuning import Pairs
    from mdsmix.kinds.pictured import ConversationsWithImages

    return [Pairs, Conversations, ConversationsWithImages]


def _preference() -> list[type[Kind]]:
    from mdsmix.kinds.pictured_preferences import PreferencesWithImages
    from mdsmix.kinds.preferences import Preferences
    from mdsmix.kinds.unpaired_preferences import UnpairedPreferences

    return [Preferences, PreferencesWithImages, UnpairedPreferences]


def _prompt() -> list[type[Kind]]:
    from mdsmix.kinds.prompts import Prompts

    return [Prompts]


KINDS: dict[str, Callable[[], list[type[Kind]]]] = {
    "pretraining": _pretraining,
    "finetuning": _finetuning,
    "preference": _preference,
    "prompt": _prompt,
}
"The recipe's `kind:` -> function that returns the kinds of this word."


def find_kinds(word: str | None) -> list[type[Kind]]:
    """Return the kinds that a recipe may mean by `kind: WORD`: for `finetuning` these are pairs,
    conversations, and conversations with images. The records' shape decides between them.
    """
    return KINDS[word]() if word in KINDS else []


def list_kinds() -> list[type[Kind]]:
    """Return all kinds."""
    return [kind for word in KINDS for kind in find_kinds(word)]
