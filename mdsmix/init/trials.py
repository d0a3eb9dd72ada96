"""Encodes the first records of each stream by its own shape, template and encoder: what a conversion would write of them, and one sample
to show. Nothing is published."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from mdsmix.encode.backends import open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.errors import RecipeError
from mdsmix.init.data_files import with_cells_parsed
from mdsmix.init.drafts import Draft, Trial
from mdsmix.init.recipe_text import Top, text_of
from mdsmix.kinds import kind_of_stream, open_recipe
from mdsmix.kinds.encodings import fields_parsed, make_encoding
from mdsmix.kinds.read_records import Reading, open_reading
from mdsmix.reasons import FILTERED
from mdsmix.recipe import Recipe
from mdsmix.record import detail_of
from mdsmix.shards.manifest import Encoding
from mdsmix.sources import size_of
from mdsmix.words import plural, printable

JUDGED = (
    "its field {field} judges its answers, and these are trained by a loss of their own; without the comment signs those alone are "
    "trained that it calls good (where: {where})"
)
REWRITTEN = (
    "the chat template rewrites earlier turns: a row for the last answer of each conversation"
)
TENTH = "convert publishes nothing where more than a tenth is bad"
MEND = "mend the source, or set max_bad"
NO_TOOLS = "tools_not_printed"
OTHER_TEMPLATE = "name a tokenizer whose chat template prints tools, calls and results, as those of Qwen2.5 and Llama 3.1 do"


def try_all(top: Top, drafts: Sequence[Draft], tokenizer: Tokenizer, folder: Path) -> None:
    """Tries the first records of every stream; a stream whose template rewrites history is tried again with `rewritten_history: last`."""
    _try(top, drafts, tokenizer, folder)
    again = [
        draft
        for draft in drafts
        if _is_much(draft.trial.quarantined.get("not_prefix_stable", 0), draft.trial)
    ]
    for draft in again:
        draft.set("rewritten_history", "last", REWRITTEN)
    if again:
        _try(top, drafts, tokenizer, folder)
    for draft in drafts:
        _decide(draft)


def _is_much(bad: int, trial: Trial) -> bool:
    """Whether so many are more than a tenth, the default of max_bad."""
    return bad * 10 > trial.read


def _try(top: Top, drafts: Sequence[Draft], tokenizer: Tokenizer, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "recipe.yaml"
        path.write_text(text_of(top, drafts), encoding="utf-8")
        recipe = open_recipe(path, folder=folder)
    for draft in drafts:
        draft.trial = try_stream(recipe, draft, tokenizer)


def try_stream(recipe: Recipe, draft: Draft, tokenizer: Tokenizer) -> Trial:
    """Encodes the first records; RecipeError where the tokenizer lacks what the stream wants."""
    stream = recipe.streams[draft.name]
    kind = kind_of_stream(stream)
    assert kind is not None
    for sentence in kind.lacking(recipe, stream, tokenizer):
        raise RecipeError(sentence)
    encoding = make_encoding(recipe, stream, tokenizer)
    reading = open_reading(encoding, tokenizer, open_backend(tokenizer, "reference"))
    records = with_cells_parsed(draft.files[0], draft.records, fields_parsed(encoding))
    rejected = reading.encode([*records]).rejected
    kept = next((record for i, record in enumerate(records) if i not in rejected), None)
    details = map(detail_of, rejected.values())
    said = (detail["template"] for detail in details if "template" in detail)
    return Trial(
        read=len(records),
        filtered=Counter(str(why) for why in rejected.values() if why in FILTERED),
        quarantined=Counter(str(why) for why in rejected.values() if why not in FILTERED),
        template_says=printable(str(next(said, ""))),
        unread=dict(reading.oddities.counts.get("unread", {})),
        pieces=None
        if kept is None
        else list(kind(encoding).pieces(_sample(reading, encoding, kept))),
    )


def _sample(reading: Reading, encoding: Encoding, record: Any) -> dict[str, Any]:
    """The first row of a record, decoded."""
    encoded: Encoded = reading.encode([record])
    row = {name: np.asarray(column[0]) for name, column in encoded.columns.items()}
    decoded = {"json": lambda v: orjson.loads(v.tobytes()), "bytes": np.ndarray.tobytes}
    return {n: decoded.get(encoding.columns.get(n, ""), np.asarray)(v) for n, v in row.items()}


def _decide(draft: Draft) -> None:
    """Notes what the trial showed, and the reason if convert would refuse the stream."""
    trial, lost = draft.trial, ""
    for what, reasons in (("filtered", trial.filtered), ("quarantined", trial.quarantined)):
        if reasons:
            lost += f"; {what}: {', '.join(f'{n} {reason}' for reason, n in reasons.items())}"
    files = f"{plural(len(draft.files), 'file')}, {size_of(draft.files):,} bytes"
    looked = f"records looked at: {trial.read:,}, written: {trial.written:,}{lost}"
    draft.notes.append(f"{files}; {looked}")
    if where := draft.source.get("where"):
        draft.refused = JUDGED.format(field=where.partition(" ")[0], where=where)
    elif _is_much(trial.bad, trial) or not trial.written:
        says = f"; the chat template: {trial.template_says}" if trial.template_says else ""
        mend = OTHER_TEMPLATE if NO_TOOLS in trial.quarantined else MEND
        draft.refused = f"{looked}{says}; {TENTH}: {mend}"
