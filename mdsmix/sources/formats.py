"""Which reader a file gets, by its suffix.

A new format is one more small file and one more entry here: how its blocks are made and decoded.
Units, batches, counting and quarantine are the same for all.
"""

from __future__ import annotations

from mdsmix.errors import RecipeError
from mdsmix.sources.blocks import Format
from mdsmix.sources.inflate import PACKINGS
from mdsmix.sources.jsonl import Jsonl

_LINES = (".jsonl", ".ndjson", ".json")

FORMATS: dict[str, Format] = {
    **{suffix: Jsonl() for suffix in _LINES},
    **{suffix + packing: Jsonl(packing) for suffix in _LINES for packing in PACKINGS},
}


def suffix_of(name: str) -> str:
    """The longest suffix of `name` that a reader knows, in lower case."""
    lowered = name.lower()
    known = [suffix for suffix in FORMATS if lowered.endswith(suffix)]
    if not known:
        raise RecipeError(
            f"the source file {name} has no suffix that mdsmix reads ({', '.join(FORMATS)}): "
            "rename or convert it, or narrow the pattern that found it"
        )
    return max(known, key=len)


def format_of(name: str) -> Format:
    return FORMATS[suffix_of(name)]
