"""The table of formats. A new format is a file with one class, and a line here."""

from __future__ import annotations

from mdsmix.errors import RecipeError
from mdsmix.exporting.litdata import LitData
from mdsmix.exporting.megatron import Megatron
from mdsmix.exporting.megatron_bridge import MegatronBridge
from mdsmix.exporting.parquet import Parquet
from mdsmix.exporting.writer import Writer
from mdsmix.messages import suggest_key

WRITERS: dict[str, type[Writer]] = {
    writer.name: writer for writer in (MegatronBridge, Megatron, Parquet, LitData)
}
"Name of a format, as `--to` takes it -> its writer."


def find_writer(name: str) -> type[Writer]:
    """Return the writer of a format.

    Raises RecipeError if mdsmix does not write this format.
    """
    if name not in WRITERS:
        hint = suggest_key(name, WRITERS, "the formats are")
        raise RecipeError(f"--to {name} is not a format that mdsmix writes; {hint}")
    return WRITERS[name]
