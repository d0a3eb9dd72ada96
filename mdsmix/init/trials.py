"""Encodes the first records of each stream with its own shape, template and encoder, to count the
records that a conversion would write and to show one sample. Nothing is published.

For records with images it finds the token of an image, and the folder where paths of images begin:
the folder of the records' file, or one near it.
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

from mdsmix.encode.answer_parts import PARTS, UNREAD_REASONING
from mdsmix.encode.backends import open_backend
from mdsmix.encode.chat import OTHER_TEMPLATE
from mdsmix.encode.encoded import Encoded
from mdsmix.errors import MdsmixError
from mdsmix.images.fetching import is_http, locate_image
from mdsmix.images.judge import BadImage
from mdsmix.init.data_files import Notices
from mdsmix.init.drafts import Draft, format_recipe
from mdsmix.init.field_doubts import find_lost_choices
from mdsmix.init.foreign_forms import OR_READ
from mdsmix.kinds import Kind, open_recipe
from mdsmix.kinds.encodings import resolve_stream
from mdsmix.kinds.pictured import choose_image_token
from mdsmix.kinds.printed_texts import is_printed_by_template
from mdsmix.kinds.read_records import open_record_encoder
from mdsmix.kinds.row_faults import LEFT_OUT
from mdsmix.kinds.turn_rows import MESSAGES_AS_TEXT, describe_message_texts
from mdsmix.messages import format_field, join_counts, make_printable, plural
from mdsmix.recipe import ImagesSpec, Recipe
from mdsmix.record import FILTERED, detail_of
from mdsmix.shapes import SHAPES
from mdsmix.shapes.image_parts import FIELDS
from mdsmix.shapes.spans import WEIGHTS
from mdsmix.shards.counts import Records
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.shard_samples import Sample
from mdsmix.sources import estimate_size
from mdsmix.sources.formats import format_of
from mdsmix.storage import Location
from mdsmix.tokenizer.card import Tokenizer

REWRITTEN = {
    "last": (
        "the chat template rewrites earlier turns: a row for the last answer of each conversation"
    ),
    "each": "the chat template rewrites earlier turns: a row for each answer of a conversation",
}
"Value of `rewritten_history` -> the comment after it."
FILLED_IN = ("format.parquet", "format.arrow")
"""The rules of the formats that give all objects of a list the same keys, and fill in nulls. In
other formats a null is what its author wrote.
"""
NULLS_FAIL = "nulls inside objects are removed, since the chat template fails on records with them"
LIMIT = "convert publishes nothing if more than a tenth of the records is bad"
FIX = "correct the records, or set max_bad in the recipe"
TOOLS_NOT_PRINTED = "tools_not_printed"
UNSUPPORTED_MEDIA = ("<audio>", "<video>", "<sound>", "<speech>", "<video-audio>")
"Placeholders of media that mdsmix does not read."
IMAGE_TOKENS = ("<|image_pad|>", "<image>", "<|image|>", "<image_soft_token>", "[IMG]")
"Image tokens of known models, for tokenizers that declare no image_token."
MAX_ROOTS = 64
"The most folders that are searched for images."
MAX_SEARCHED = 5
"Images that are searched for in each folder."


def try_all(
    keys: Mapping[str, Any], drafts: Sequence[Draft], tokenizer: Tokenizer, folder: Path
) -> None:
    """Convert the first records of every stream as a trial, and note the results in its draft.

    Some templates print earlier messages differently when more follow (they rewrite history), and
    such records are bad. If more than a tenth of a stream's records are bad for this reason, it is
    tried again with `rewritten_history`: `each` if all answers are trained, otherwise `last`.

    If parquet or Arrow filled nulls into messages or tools, which the template would print, it is
    tried again with `nulls: drop`. So are records of any format with such nulls, if the template
    fails on more than a tenth of the records.

    Args:
        keys: keys at the top of the recipe.
        folder: the folder of the recipe.

    Raises RecipeError if the tokenizer lacks a token or template that a stream needs.
    """
    for draft in drafts:
        template_error = _try_draft(_open_drafts(keys, drafts, folder), draft, tokenizer)
        can_drop_nulls = "nulls" in draft.guess.shape.options
        is_filled_in = format_of(draft.files[0]).rule in FILLED_IN
        failures = draft.tried.quarantined.get("template_error", 0)
        if draft.tried.nulls and can_drop_nulls and (is_filled_in or _is_too_many(failures, draft)):
            draft.source["nulls"] = "drop"
            if not is_filled_in:
                draft.why["nulls"] = NULLS_FAIL
            template_error = _try_draft(_open_drafts(keys, drafts, folder), draft, tokenizer)
        if _is_too_many(draft.tried.quarantined.get("not_prefix_stable", 0), draft):
            rule = "each" if keys.get("target_responses") == "all" else "last"
            draft.set("rewritten_history", rule, REWRITTEN[rule])
            template_error = _try_draft(_open_drafts(keys, drafts, folder), draft, tokenizer)
        _note_trial(draft, template_error)


def _is_too_many(records: int, draft: Draft) -> bool:
    """Check whether `records` is more than a tenth of the stream's tried records. A tenth is the
    default of max_bad.
    """
    return records * 10 > draft.tried.read


def _open_drafts(keys: Mapping[str, Any], drafts: Sequence[Draft], folder: Path) -> Recipe:
    """Write the recipe of these streams to a temporary file and read it, as if it were in this
    folder.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "recipe.yaml"
        path.write_text(format_recipe(keys, drafts), encoding="utf-8")
        return open_recipe(path, folder=folder)


def _try_draft(recipe: Recipe, draft: Draft, tokenizer: Tokenizer) -> str:
    """Convert the first records of a stream as a trial, and store counts, messages and the first
    row in its draft.

    Return the first error of the chat template; an empty string if it has failed nowhere.
    """
    # Encode the records.
    head = draft.guess.head
    stream = resolve_stream(recipe, recipe.streams[draft.name], tokenizer)
    reader = open_record_encoder(stream, tokenizer, open_backend(tokenizer, "reference"))
    records = head.parse_records(stream.fields_parsed, stream.fields_with_text_or_messages)
    encoded = reader.encode(records)
    # Count them.
    reasons = Counter(str(reason) for reason in encoded.rejected.values())
    filtered = Counter({code: count for code, count in reasons.items() if code in FILTERED})
    draft.tried = Records(
        read=len(head),
        written=len(head.records) - len(encoded.rejected),
        filtered=filtered,
        quarantined=head.bad + (reasons - filtered),
        unread=reader.diagnostics.counts.get("unread", {}),
        placeholders=reader.diagnostics.counts.get("placeholders", {}),
        nulls=reader.diagnostics.counts.get("nulls", {}),
    )
    draft.is_printed = is_printed_by_template(stream.kind, encoded.totals.specials, len(head))
    # Note messages on the ends of answers, and the first row.
    draft.ends = _describe_ends(stream.kind, draft.name, tokenizer)
    if draft.tried.written:
        row = _decode_first_row(encoded, stream.encoding)
        draft.pieces = list(stream.kind.pieces(row))
        draft.eos = stream.kind.appended_eos(row, tokenizer.eos_id)
    for reason in encoded.rejected.values():
        detail = detail_of(reason)
        if "template" in detail:
            return make_printable(str(detail["template"]))
    return ""


def _describe_ends(kind: Kind, name: str, tokenizer: Tokenizer) -> list[str]:
    """Return messages on the ends of a stream's answers, such as whether a model stops there."""
    notes = kind.end_notes(tokenizer)
    messages = [str(replace(note, sentence=f"{name}: {note.sentence}")) for note in notes]
    doubled = kind.doubled_eos(tokenizer)
    if doubled:
        messages.append(f"{name}: {doubled}")
    return messages


def _decode_first_row(encoded: Encoded, encoding: Encoding) -> Sample:
    """Return the first sample as a loader would read it: column -> decoded value."""
    row = dict[str, Any]()
    for name, column in encoded.columns.items():
        values = np.asarray(column[0])
        mds_encoding = encoding.columns.get(name, "")
        if mds_encoding == "json":
            row[name] = orjson.loads(values.tobytes())
        elif mds_encoding == "bytes":
            row[name] = values.tobytes()
        elif mds_encoding == "str":
            row[name] = values.tobytes().decode()
        else:
            row[name] = values
    return row


def _note_trial(draft: Draft, template_error: str) -> None:
    """Note the counts of a trial, and the reason if `convert` would refuse the stream."""
    tried = draft.tried
    counts = f"records tried: {tried.read:,}, written: {tried.written:,}"
    if tried.filtered:
        counts += f"; filtered: {join_counts(tried.filtered)}"
    if tried.quarantined:
        counts += f"; quarantined: {join_counts(tried.quarantined)}"
    size = f"{plural(len(draft.files), 'file')}, {estimate_size(draft.files):,} bytes"
    draft.notes.append(f"{size}; {counts}")
    draft.notes += _describe_training(draft)
    reason = _find_refusal(draft, template_error)
    if reason:
        draft.refused = f"{counts}{reason}"


def _describe_training(draft: Draft) -> Iterator[str]:
    """Yield notes on what the records say about which of their tokens are trained."""
    guess = draft.guess
    if guess.marked:
        yield (
            f"{plural(guess.marked, 'record')} of these mark which answers are trained: "
            "`target_responses: all` trains every marked answer, `last` only the last marked answer"
        )
    if guess.with_spans and guess.options.get(WEIGHTS):
        yield (
            f"{plural(guess.with_spans, 'record')} of these give loss weights to answers, or to "
            "characters of them"
        )
    elif guess.with_spans:
        yield (
            f"{plural(guess.with_spans, 'record')} of these mark the characters of answers "
            "that are trained"
        )
    parts = {name: guess.parts[name] for name in PARTS if name in guess.parts}
    unprinted = draft.tried.unread.keys() | draft.tried.placeholders.keys()
    if not unprinted.isdisjoint((*UNREAD_REASONING, LEFT_OUT)):
        parts.pop("reasoning", None)  # the template does not print it, so it is not trained anyway
    if parts:
        counts = [f"{plural(count, 'record')} with {name}" for name, count in parts.items()]
        untrained = [f"{name}: false" for name in parts]
        yield (
            f"{' and '.join(counts)} in the answers; to leave these parts untrained: "
            f"`train_parts: {{{', '.join(untrained)}}}`"
        )
    if guess.options.get(WEIGHTS):
        yield (
            "some records have loss weights, which only mdsmix.load and train_loader.name: mdsmix "
            "read"
        )


def _find_refusal(draft: Draft, template_error: str) -> str:
    """Return why `convert` would refuse the stream, or train what it should not, as the end of a
    sentence; an empty string if it would do neither.
    """
    tried = draft.tried
    if not tried.written and not tried.bad:
        return ": no record becomes a sample"
    if _is_too_many(tried.bad, draft) or not tried.written:
        error = f"; the chat template: {template_error}" if template_error else ""
        fix = OTHER_TEMPLATE if TOOLS_NOT_PRINTED in tried.quarantined else FIX
        return f"{error}; {LIMIT}: {fix}"
    message_texts = tried.placeholders.get(MESSAGES_AS_TEXT, 0)
    if _is_too_many(message_texts, draft):
        return f"; {describe_message_texts(message_texts)}"
    for name in UNSUPPORTED_MEDIA:
        records = tried.placeholders.get(name, 0)
        if _is_too_many(records, draft):
            return (
                f"; {records:,} of these contain {name}, which would be trained as text: "
                "audio and video are not supported"
            )
    choices = find_lost_choices(draft.guess)
    if choices:
        return (
            "; the questions do not contain their choices, which are in the field "
            f"{format_field(choices)}: write these into the questions, {OR_READ}"
        )
    return ""


def set_images(draft: Draft, tokenizer: Tokenizer, folder: Path, notices: Notices) -> bool:
    """Set the stream's key `images`. Return False, and set nothing, if the tokenizer has no image
    token.

    Args:
        folder: the folder of the recipe.
        notices: a list that messages on a missing token or missing images are appended to.
    """
    keys = dict[str, Any]()
    why = list[str]()
    fields = draft.guess.shape.image_fields
    if fields and fields != FIELDS:
        keys["field"] = fields[0] if len(fields) == 1 else list(fields)
    if draft.guess.shape.images_first and not SHAPES[draft.guess.shape.name].images_first:
        keys["unplaced"] = "first"
        why.append("texts without a placeholder: images come before the first question")
    # The token of an image.
    if not choose_image_token(ImagesSpec(), tokenizer):
        known_tokens = [token for token in IMAGE_TOKENS if token in tokenizer.special_tokens]
        if not known_tokens:
            notices.append(
                f"{draft.name} is left out: its records contain images, but this tokenizer has no "
                "image token; name a vision-language model's tokenizer by --tokenizer"
            )
            return False
        keys["token"] = known_tokens[0]
        why.append("the tokenizer declares no image_token")
    # The folder where the paths of images begin.
    pictures = draft.guess.pictures
    paths = [image for image in pictures if isinstance(image, str) and not is_http(image)]
    records_folder = draft.files[0].location.parent
    root = _find_root(records_folder, paths)
    if root.url != records_folder.url:
        keys["root"] = root.url if root.is_store else os.path.relpath(root.url, folder)
        why.append("where the paths were found")
    draft.set("images", keys, "; ".join(why) or "paths begin in the folder of the records")
    # The counts.
    lost = [path for path in paths if not _exists(path, root)]
    draft.notes.append(
        f"images of these records: {len(pictures):,}; {len(paths):,} by a path, {len(lost):,} of "
        "these not found; the others are in the records or at http(s) URLs (`images.http: fetch` "
        "fetches URLs)"
    )
    if lost:
        notices.append(
            f"WARNING: {draft.name}: {len(lost):,} of {plural(len(paths), 'image')} not found, "
            f"such as {make_printable(lost[0][:200])}: set images.root to the folder where their "
            "paths begin"
        )
    return True


def _find_root(records_folder: Location, paths: Sequence[str]) -> Location:
    """Return the folder near the records that contains most of the first images."""
    if not paths:
        return records_folder
    searched = paths[:MAX_SEARCHED]

    def count_found(root: Location) -> int:
        return [_exists(path, root) for path in searched].count(True)

    roots = islice(_list_nearby_folders(records_folder), MAX_ROOTS)
    return max(roots, key=count_found)  # the first of equals, so the records' folder if it has them


def _list_nearby_folders(folder: Location) -> Iterator[Location]:
    """Yield the folder, the folders in it, the folder that contains it, and all folders in that."""
    yield folder
    try:
        yield from (folder / name for name in folder.folders())
        yield folder.parent
        yield from (folder.parent / name for name in folder.parent.folders())
    except MdsmixError:
        return


def _exists(path: str, root: Location) -> bool:
    """Check whether the image at this path, which begins in the folder `root`, can be found."""
    try:
        location = locate_image(path, root)
        return isinstance(location, Location) and location.stat() is not None
    except (BadImage, MdsmixError):
        return False
