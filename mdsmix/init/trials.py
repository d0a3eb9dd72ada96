"""Encodes the first records of each stream by its own shape, template and encoder: what a conversion would write of them, and one sample
to show. Nothing is published."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from mdsmix.encode.backends import open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.init.drafts import Draft
from mdsmix.init.recipe_text import text_of
from mdsmix.kinds import kind_of_stream, open_recipe
from mdsmix.kinds.encodings import fields_parsed, make_encoding
from mdsmix.kinds.read_records import open_reading
from mdsmix.reasons import FILTERED
from mdsmix.recipe import Recipe
from mdsmix.record import detail_of
from mdsmix.shards.counts import Records
from mdsmix.sources import size_of
from mdsmix.words import counted, plural, printable

REWRITTEN = (
    "the chat template rewrites earlier turns: a row for the last answer of each conversation"
)
TENTH = "convert publishes nothing where more than a tenth is bad"
MEND = "mend the source, or set max_bad"
NO_TOOLS = "tools_not_printed"
OTHER_TEMPLATE = "name a tokenizer whose chat template prints tools, calls and results, as those of Qwen2.5 and Llama 3.1 do"


def try_all(
    keys: Mapping[str, Any], drafts: Sequence[Draft], tokenizer: Tokenizer, folder: Path
) -> None:
    """Tries the first records of every stream; a stream whose template rewrites history is tried again with `rewritten_history: last`.

    Args:
        keys: those at the top of the recipe.
        folder: of the recipe.

    Raises:
        RecipeError: the tokenizer lacks what a stream wants.
    """
    for draft in drafts:
        says = _try(_recipe_of(keys, drafts, folder), draft, tokenizer)
        if _is_much(draft.tried.quarantined.get("not_prefix_stable", 0), draft):
            draft.set("rewritten_history", "last", REWRITTEN)
            says = _try(_recipe_of(keys, drafts, folder), draft, tokenizer)
        _decide(draft, says)


def _is_much(bad: int, draft: Draft) -> bool:
    """Whether so many are more than a tenth, the default of max_bad."""
    return bad * 10 > draft.tried.read


def _recipe_of(keys: Mapping[str, Any], drafts: Sequence[Draft], folder: Path) -> Recipe:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "recipe.yaml"
        path.write_text(text_of(keys, drafts), encoding="utf-8")
        return open_recipe(path, folder=folder)


def _try(recipe: Recipe, draft: Draft, tokenizer: Tokenizer) -> str:
    """Encodes the first records, and returns why the chat template refuses the first one that it refuses."""
    stream, head = recipe.streams[draft.name], draft.guess.head
    kind = kind_of_stream(stream)
    assert kind is not None
    encoding = make_encoding(recipe, stream, tokenizer)
    reading = open_reading(encoding, tokenizer, open_backend(tokenizer, "reference"))
    encoded = reading.encode(head.parsed(fields_parsed(encoding)))
    rejected = encoded.rejected
    draft.tried = Records(
        read=len(head),
        written=len(head.records) - len(rejected),
        filtered=Counter(str(why) for why in rejected.values() if why in FILTERED),
        quarantined=head.bad
        + Counter(str(why) for why in rejected.values() if why not in FILTERED),
        unread=reading.oddities.counts.get("unread", {}),
    )
    if draft.tried.written:
        draft.pieces = list(kind(encoding).pieces(_first_row(encoded, encoding.columns)))
    details = map(detail_of, rejected.values())
    said = (detail["template"] for detail in details if "template" in detail)
    return printable(str(next(said, "")))


def _first_row(encoded: Encoded, encodings: Mapping[str, str]) -> dict[str, Any]:
    """The first row, decoded. `encodings`: of its columns."""
    row = {name: np.asarray(column[0]) for name, column in encoded.columns.items()}
    decoded = {"json": lambda v: orjson.loads(v.tobytes()), "bytes": np.ndarray.tobytes}
    return {name: decoded.get(encodings.get(name, ""), np.asarray)(v) for name, v in row.items()}


def _decide(draft: Draft, says: str) -> None:
    """Notes what was tried, and the reason if convert would refuse the stream. `says`: the chat template."""
    tried, lost = draft.tried, ""
    for what, reasons in (("filtered", tried.filtered), ("quarantined", tried.quarantined)):
        lost += f"; {what}: {counted(reasons)}" if reasons else ""
    files = f"{plural(len(draft.files), 'file')}, {size_of(draft.files):,} bytes"
    looked = f"records looked at: {tried.read:,}, written: {tried.written:,}{lost}"
    draft.notes.append(f"{files}; {looked}")
    if _is_much(tried.bad, draft) or not tried.written:
        told = f"; the chat template: {says}" if says else ""
        mend = OTHER_TEMPLATE if NO_TOOLS in tried.quarantined else MEND
        draft.refused = f"{looked}{told}; {TENTH}: {mend}"
