"""Finds the shape and the kind of a stream in a recipe, and makes its Encoding: all settings that
its samples depend on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mdsmix.encode.answer_ends import find_stop_ids, is_ended_by_next
from mdsmix.kinds.kind import Kind
from mdsmix.kinds.kind_table import find_kinds
from mdsmix.kinds.preferences import Preferences
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.kinds.resolved_stream import ResolvedStream, kind_of, read_images_too
from mdsmix.kinds.rules import list_raised_rules
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, read_share
from mdsmix.recipe.stream_spec import BY_BUDGET
from mdsmix.shapes import SHAPES, Shape, find_shape, published_name
from mdsmix.shapes.functions import FunctionName, find_function, function_shape, is_function
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer


@dataclass(frozen=True, kw_only=True)
class RecordType:
    """The records of a recipe's stream with a source."""

    shape: Shape | None
    "How the records are written; None if no shape fits the fields of the source."
    kind: type[Kind] | None
    "The kind of the stream; None if no kind reads the stream's `kind:` and shape."


def find_record_type(stream: StreamSpec) -> RecordType:
    """Find the shape and the kind of a stream with a source. If `shape:` names a user's function,
    its type of record is `source.gives`, or follows from `kind`.
    """
    source = stream.source
    assert source is not None
    if is_function(source.shape):
        shape: Shape | None = function_shape(
            FunctionName.in_recipe(source.shape, _record_word(stream))
        )
    else:
        shape = find_shape(source.shape, source.fields)
    if shape is None:
        return RecordType(shape=None, kind=None)
    has_images = stream.images is not None or bool(shape.has_images)
    kinds = [kind for kind in find_kinds(stream.kind) if kind.reads is shape.gives]
    # Prefer the kind that has images if and only if the stream has. If there is none, take any:
    # its `contradictions` then refuse the images.
    kind = min(kinds, key=lambda kind: kind.has_images != has_images, default=None)
    return RecordType(shape=shape, kind=kind)


def _record_word(stream: StreamSpec) -> str:
    """Return the word for the type of record that the user's function of a stream returns, such as
    `pair`: `source.gives`, or the usual type for the stream's `kind`.
    """
    assert stream.source is not None
    if stream.source.gives:
        return stream.source.gives
    usual = {Pretraining.word: "document", Preferences.word: "preference"}
    return usual.get(stream.kind or "", "pair")


def set_options(stream: StreamSpec) -> dict[str, Any]:
    """Return the options of shapes that a stream sets to other values than their defaults. Some of
    these keys are the stream's own, the others are keys of its source.
    """
    assert stream.source is not None
    default_stream = StreamSpec()
    default_source = SourceSpec(path=[])
    stream_keys = {field.name for field in fields(StreamSpec)}
    options = dict[str, Any]()
    for key in sorted({key for shape in SHAPES.values() for key in shape.options}):
        if key in stream_keys:
            value = getattr(stream, key)
            default = getattr(default_stream, key)
        else:
            value = getattr(stream.source, key)
            default = getattr(default_source, key)
        if value != default:
            options[key] = value
    return options


def resolve_stream(recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> ResolvedStream:
    """Find the shape and the kind of a stream with a source, and all settings that its samples
    depend on.

    Raises RecipeError if the tokenizer lacks a token that the stream needs, or the file of a user's
    function is missing.
    """
    source = stream.source
    record_type = find_record_type(stream)
    shape, kind = record_type.shape, record_type.kind
    assert source is not None
    assert shape is not None
    assert kind is not None
    if is_function(source.shape):
        function = find_function(source.shape, _record_word(stream), Path(recipe.folder))
        shape = function_shape(function.name)
    field_names = source.fields or shape.own_fields
    follows_from_fields = find_shape(None, field_names) is shape
    options = set_options(stream)
    settings = kind.settings(recipe, stream, tokenizer)
    encoding = Encoding(
        kind=kind.word,
        loader=_loader_name(recipe, kind),
        columns=settings["columns"],
        max_seq_len=recipe.max_seq_len,
        decoder_only_format=recipe.decoder_only_format,
        target_prompts=recipe.target_prompts,
        target_responses=recipe.target_responses,
        special_tokens_in_text=recipe.special_tokens_in_text,
        compression=recipe.compression,
        duplicates=stream.duplicates,
        fields=field_names,
        shape=None if follows_from_fields else published_name(shape),
        shape_options={key: options[key] for key in options if key in shape.options},
        where=source.where,
        id=source.id,
    )
    encoding = replace(encoding, **settings, **_sampling_settings(stream))
    # Rules and stop tokens follow from the other settings.
    rules = list_raised_rules(kind(encoding), [shape], encoding, tokenizer)
    encoding = replace(encoding, rules=rules)
    names_stops = kind.has_template and tokenizer.are_stops_named
    if is_ended_by_next(encoding) or names_stops:
        encoding = replace(encoding, stop_ids=find_stop_ids(tokenizer))
    return ResolvedStream(
        encoding=encoding, shape=read_images_too(shape, encoding), kind=kind(encoding)
    )


def _loader_name(recipe: Recipe, kind: type[Kind]) -> str:
    """Return the name of the loader that reads the stream's columns."""
    if kind.loader:
        return kind.loader.name
    return "text" if recipe.has_plain_rows and not kind.has_targets else "finetuning"


def _sampling_settings(stream: StreamSpec) -> Mapping[str, Any]:
    """Return the settings that decide which records are in the stream."""
    settings = dict[str, Any]()
    if stream.sample not in (None, BY_BUDGET):  # a budget's share is not known yet
        sample = read_share(stream.sample or 0)
        if sample < 1:
            settings["sample"] = str(sample)
    if stream.holdout is not None:
        settings["holdout"] = str(read_share(stream.holdout))
        settings["held_out"] = stream.held_out_of is not None
    return settings


def find_raised_rules(encoding: Encoding, tokenizer: Tokenizer | None) -> dict[str, int]:
    """Return the current version of each rule, if above 1, that applies to a stream with this
    encoding: rule -> version. Rules of source formats are not included.

    A stream that `mdsmix mix` made of several streams may have records of several shapes.
    """
    kind = kind_of(encoding)
    names = encoding.fields.keys()
    shape = find_shape(encoding.shape, names)
    if shape:
        shapes = [shape]
    else:
        shapes = [
            shape
            for shape in SHAPES.values()
            if shape.fields and shape.gives is kind.reads and names >= {*shape.fields}
        ]
    return list_raised_rules(kind, shapes, encoding, tokenizer)
