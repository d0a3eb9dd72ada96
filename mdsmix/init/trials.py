"""Encodes the first records of each stream by its own shape, template and encoder: what a conversion would write of them, and one sample
to show. Nothing is published."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from mdsmix.encode.backends import open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.errors import RecipeError
from mdsmix.init.drafts import Draft, Trial
from mdsmix.init.recipe_text import Top, text_of
from mdsmix.init.recognise import named, with_cells_parsed
from mdsmix.kinds import kind_of_stream, open_recipe
from mdsmix.kinds.encodings import fields_parsed, make_encoding
from mdsmix.kinds.read_records import Reading, open_reading
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.sources import size_of
from mdsmix.words import plural, printable

JUDGED = (
    "its field {field} judges its answers, and these are trained by a loss of their own; without the comment signs those alone are "
    "trained that it calls good (where: {where})"
)
REWRITTEN = (
    "last",
    "the chat template rewrites earlier turns: a row for the last answer of each conversation",
)
TENTH = "convert publishes nothing where more than a tenth is bad"
MEND = "mend the source, or set max_bad"
REMEDIES = {
    "tools_not_printed": "name a tokenizer whose chat template prints tools, calls and results, as those of Qwen2.5 and Llama 3.1 do"
}
"Reason -> what to do about it."


def try_stream(
    recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer, records: Sequence[Any]
) -> Trial:
    """Encodes the records; RecipeError where the tokenizer lacks what the stream wants."""
    kind = kind_of_stream(stream)
    assert kind is not None
    for sentence in kind.lacking(recipe, stream, tokenizer):
        raise RecipeError(sentence)
    encoding = make_encoding(recipe, stream, tokenizer)
    reading = open_reading(encoding, tokenizer, open_backend(tokenizer, "reference"))
    records = [with_cells_parsed(record, fields_parsed(encoding)) for record in records]
    encoded = reading.encode(records)
    rejected = encoded.rejected
    out = {each.position for each in rejected}
    kept = next((record for i, record in enumerate(records) if i not in out), None)
    return Trial(
        read=len(records),
        filtered=Counter(each.reason for each in rejected if each.filtered),
        quarantined=Counter(each.reason for each in rejected if not each.filtered),
        template_says={
            each.reason: printable(str(each.detail["template"]))
            for each in reversed(rejected)
            if each.detail and "template" in each.detail
        },
        unread=dict(reading.oddities.counts.get("unread", {})),
        pieces=None if kept is None else list(kind(encoding).pieces(_sample(reading, kept))),
    )


def _sample(reading: Reading, record: Any) -> dict[str, Any]:
    """The first row of a record, decoded."""
    encoded: Encoded = reading.encode([record])
    row = {name: np.asarray(column[0]) for name, column in encoded.columns.items()}
    decoded = {"json": lambda v: orjson.loads(v.tobytes()), "bytes": np.ndarray.tobytes}
    encodings = reading.kind.encoding.columns
    return {n: decoded.get(encodings.get(n, ""), np.asarray)(v) for n, v in row.items()}


def try_all(top: Top, drafts: Sequence[Draft], tokenizer: Tokenizer, folder: Path) -> list[Draft]:
    """Tries the first records of every stream; a stream whose template rewrites history is tried again with `rewritten_history: last`."""
    tried = _tried(top, drafts, tokenizer, folder)
    again = [
        replace(draft, settings={**draft.settings, "rewritten_history": REWRITTEN})
        if _is_much(draft.trial.quarantined.get("not_prefix_stable", 0), draft.trial)
        else draft
        for draft in tried
    ]
    tried = tried if again == tried else _tried(top, again, tokenizer, folder)
    return list(map(_decided, tried))


def _is_much(bad: int, trial: Trial) -> bool:
    """Whether so many are more than a tenth, the default of max_bad."""
    return bad * 10 > trial.read


def _tried(top: Top, drafts: Sequence[Draft], tokenizer: Tokenizer, folder: Path) -> list[Draft]:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "recipe.yaml"
        absolute = [replace(d, paths=[_from(folder, p) for p in d.paths]) for d in drafts]
        name = top.tokenizer if not top.tokenizer.startswith(".") else _from(folder, top.tokenizer)
        path.write_text(text_of(replace(top, tokenizer=name), absolute), encoding="utf-8")
        recipe = open_recipe(path)
    return [
        replace(d, trial=try_stream(recipe, recipe.streams[d.name], tokenizer, d.records))
        for d in drafts
    ]


def _from(folder: Path, path: str) -> str:
    return path if "://" in path else os.path.normpath(folder / path)


def _notes(draft: Draft) -> Iterator[str]:
    """Comments on what the trial showed."""
    trial = draft.trial
    files = f"{plural(len(draft.files), 'file')}, {size_of(draft.files):,} bytes"
    yield f"{files}; records looked at: {trial.read:,}, written: {trial.written:,}"
    for what, reasons in (("filtered", trial.filtered), ("quarantined", trial.quarantined)):
        if reasons:
            yield f"{what}: {', '.join(f'{n} {reason}' for reason, n in reasons.items())}"
    if trial.unread:
        yield f"not read: {named(trial.unread)}"


def _decided(draft: Draft) -> Draft:
    """The stream with comments, and with the reason if convert would refuse it."""
    refused, trial = "", draft.trial
    if where := draft.options.get("where"):
        refused = JUDGED.format(field=where.partition(" ")[0], where=where)
    elif _is_much(trial.bad, trial) or not trial.written:
        remedy = next((REMEDIES[reason] for reason in trial.quarantined if reason in REMEDIES), MEND)  # fmt: skip
        why_not = ", ".join(_why_not(trial))
        of = f"{trial.written:,} of {plural(trial.read, 'record')} looked at"
        refused = f"{of} would be written ({why_not}), and {TENTH}: {remedy}"
    return replace(draft, refused=refused, notes=[*draft.notes, *_notes(draft)])


def _why_not(trial: Trial) -> Iterator[str]:
    """Reasons and numbers of records that are not written, with the message of the chat template."""
    for reason, n in {**trial.filtered, **trial.quarantined}.items():
        says = trial.template_says.get(reason)
        yield f"{n} {reason}" + (f", the chat template: {says}" if says else "")
