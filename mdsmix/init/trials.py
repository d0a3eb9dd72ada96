"""Encodes the first records of each stream by its own shape, template and encoder, to count what a
conversion would write and to show one sample. Nothing is published. For records with images it
finds the token that stands for an image, and the folder where the images lie: where the records
say, or in a folder near by.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from mdsmix.encode.backends import open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.errors import MdsmixError
from mdsmix.images.fetching import is_http, locate_image
from mdsmix.images.judge import BadImage
from mdsmix.init.data_files import Said
from mdsmix.init.drafts import Draft, text_of
from mdsmix.kinds import open_recipe
from mdsmix.kinds.encodings import resolve_stream
from mdsmix.kinds.pictured import choose_image_token
from mdsmix.kinds.read_records import open_record_encoder
from mdsmix.messages import join_counts, make_printable, plural
from mdsmix.recipe import ImagesSpec, Recipe
from mdsmix.record import FILTERED, detail_of
from mdsmix.shapes.image_parts import FIELDS
from mdsmix.shards.counts import Records
from mdsmix.shards.shard_samples import Sample
from mdsmix.sources import estimate_size
from mdsmix.storage import Location
from mdsmix.tokenizer.card import Tokenizer

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
    """Tries the first records of every stream; a stream whose template rewrites history is tried
    again with `rewritten_history: last`.

    Args:
        keys: keys at the top of the recipe.
        folder: the folder of the recipe.

    Raises:
        RecipeError: the tokenizer lacks a token or template that a stream needs.
    """
    for draft in drafts:
        says = _try(_recipe_of(keys, drafts, folder), draft, tokenizer)
        if _is_much(draft.tried.quarantined.get("not_prefix_stable", 0), draft):
            draft.set("rewritten_history", "last", REWRITTEN)
            says = _try(_recipe_of(keys, drafts, folder), draft, tokenizer)
        _decide(draft, says)


def _is_much(bad: int, draft: Draft) -> bool:
    """Whether `bad` records are more than a tenth, the default of max_bad."""
    return bad * 10 > draft.tried.read


def _recipe_of(keys: Mapping[str, Any], drafts: Sequence[Draft], folder: Path) -> Recipe:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "recipe.yaml"
        path.write_text(text_of(keys, drafts), encoding="utf-8")
        return open_recipe(path, folder=folder)


def _try(recipe: Recipe, draft: Draft, tokenizer: Tokenizer) -> str:
    """Encodes the first records, and returns the chat template's reason for its first refusal;
    empty without one.
    """
    head = draft.guess.head
    stream = resolve_stream(recipe, recipe.streams[draft.name], tokenizer)
    reader = open_record_encoder(stream, tokenizer, open_backend(tokenizer, "reference"))
    encoded = reader.encode(head.parsed(stream.fields_parsed))
    rejected = encoded.rejected
    draft.tried = Records(
        read=len(head),
        written=len(head.records) - len(rejected),
        filtered=Counter(str(why) for why in rejected.values() if why in FILTERED),
        quarantined=head.bad
        + Counter(str(why) for why in rejected.values() if why not in FILTERED),
        unread=reader.diagnostics.counts.get("unread", {}),
        placeholders=reader.diagnostics.counts.get("placeholders", {}),
    )
    notes = stream.kind.end_notes(tokenizer)
    draft.ends = [str(replace(note, sentence=f"{draft.name}: {note.sentence}")) for note in notes]
    if doubled := stream.kind.doubled_eos(tokenizer):
        draft.ends.append(f"{draft.name}: {doubled}")
    if draft.tried.written:
        first = _first_row(encoded, stream.encoding.columns)
        draft.pieces = list(stream.kind.pieces(first))
        draft.eos = stream.kind.appended_eos(first, tokenizer.eos_id)
    details = map(detail_of, rejected.values())
    said = (detail["template"] for detail in details if "template" in detail)
    return make_printable(str(next(said, "")))


def _first_row(encoded: Encoded, encodings: Mapping[str, str]) -> Sample:
    """The first row, decoded. `encodings`: column -> its MDS encoding."""
    row = {name: np.asarray(column[0]) for name, column in encoded.columns.items()}
    decoded = {"json": lambda v: orjson.loads(v.tobytes()), "bytes": np.ndarray.tobytes}
    return {name: decoded.get(encodings.get(name, ""), np.asarray)(v) for name, v in row.items()}


def _decide(draft: Draft, says: str) -> None:
    """Notes the counts of a trial, and the reason if `convert` would refuse the stream. `says`: the
    chat template's refusal.
    """
    tried, lost = draft.tried, ""
    for what, reasons in (("filtered", tried.filtered), ("quarantined", tried.quarantined)):
        lost += f"; {what}: {join_counts(reasons)}" if reasons else ""
    files = f"{plural(len(draft.files), 'file')}, {estimate_size(draft.files):,} bytes"
    looked = f"records looked at: {tried.read:,}, written: {tried.written:,}{lost}"
    draft.notes.append(f"{files}; {looked}")
    if marked := draft.guess.marked:
        draft.notes.append(
            f"{plural(marked, 'record')} of these say which answers are trained: target_responses: all trains every one of those, and last "
            "only the last of them"
        )
    if _is_much(tried.bad, draft) or not tried.written:
        told = f"; the chat template: {says}" if says else ""
        mend = OTHER_TEMPLATE if NO_TOOLS in tried.quarantined else MEND
        draft.refused = f"{looked}{told}; {TENTH}: {mend}"
    unsupported = {name: tried.placeholders.get(name, 0) for name in UNSUPPORTED_MEDIA}
    for name, many in unsupported.items():
        if _is_much(many, draft) and not draft.refused:
            draft.refused = f"{looked}; {many:,} of these contain {name}, which would be trained as text: audio and video are not supported"


UNSUPPORTED_MEDIA = ("<audio>", "<video>")
"Placeholders of media that mdsmix does not read."
TOKENS = ("<|image_pad|>", "<image>", "<|image|>", "<image_soft_token>", "[IMG]")
"Image tokens of known models, for tokenizers that declare no image_token."
MOST_ROOTS = 64
"The most folders that are searched for images."
FIRST = 5
"Images that are looked for in each folder."


def set_images(draft: Draft, tokenizer: Tokenizer, folder: Path, said: Said) -> bool:
    """Sets the keys for the images of a stream; False if the tokenizer has no token for an image.

    Args:
        folder: the folder of the recipe.
        said: takes sentences on a missing token or missing images.
    """
    keys, why = dict[str, Any](), list[str]()
    if (fields := draft.guess.shape.image_fields) and fields != FIELDS:
        keys["field"] = fields[0] if len(fields) == 1 else list(fields)
    if not choose_image_token(ImagesSpec(), tokenizer):
        keys["token"] = next((t for t in TOKENS if t in tokenizer.special_tokens), None)
        why.append("the tokenizer declares no image_token")
    if keys.get("token", "") is None:
        said.append(
            f"{draft.name} is left out: its records have images, and the tokenizer knows no token for one: name that of a model that sees"
        )
        return False
    pictures, beside = draft.guess.pictures, draft.files[0].location.parent
    paths = [each for each in pictures if isinstance(each, str) and not is_http(each)]
    first = paths[:FIRST]
    roots = islice(_roots(beside), MOST_ROOTS if paths else 1)
    base = max(roots, key=lambda root: sum(_is_there(path, root) for path in first))
    if base.url != beside.url:
        keys["root"] = base.url if base.is_store else os.path.relpath(base.url, folder)
        why.append("where the paths were found")
    draft.set("images", keys, "; ".join(why) or "paths begin beside the records")
    lost = [path for path in paths if not _is_there(path, base)]
    draft.notes.append(
        f"images of these records: {len(pictures):,}; {len(paths):,} by a path, {len(lost):,} of these not found; others in the records, or "
        "at http(s) URLs, which images.http: fetch fetches"
    )
    if lost:
        said.append(
            f"WARNING: {draft.name}: of {plural(len(paths), 'image')} looked for {len(lost):,} not there, such as "
            f"{make_printable(lost[0][:200])}: write images.root, the folder that their paths begin at"
        )
    return True


def _roots(beside: Location) -> Iterator[Location]:
    """The folder of the records' file, the folders in it, the folder above it, and the folders in
    that.
    """
    yield beside
    try:
        yield from (beside / name for name in beside.folders())
        yield beside.parent
        yield from (beside.parent / name for name in beside.parent.folders())
    except MdsmixError:
        return


def _is_there(path: str, base: Location) -> bool:
    try:
        place = locate_image(path, base)
        return isinstance(place, Location) and place.stat() is not None
    except (BadImage, MdsmixError):
        return False
