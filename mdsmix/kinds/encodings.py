"""The kind of a stream, found from the recipe (`kind:` and the shape of its records) or from its
manifest; the Encoding of a stream; and `open_recipe`, which checks a recipe by the rules of kinds
and shapes, which `mdsmix.recipe` does not know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mdsmix.encode.answer_ends import find_stop_ids, is_ended_by_next
from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import DATASETS, register_loader
from mdsmix.kinds.conversations import Conversations
from mdsmix.kinds.finetuning import Pairs
from mdsmix.kinds.kind import Kind
from mdsmix.kinds.pictured import ConversationsWithImages
from mdsmix.kinds.preferences import Preferences
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.kinds.rules import raised_rules
from mdsmix.messages import join_names, suggest_key
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, load_recipe, read_share
from mdsmix.recipe.stream_spec import BY_BUDGET, SOURCED, foreign_keys
from mdsmix.schema import shorten
from mdsmix.shapes import SHAPES, Shape, find_shape, published_name
from mdsmix.shapes.condition import BadCondition, Condition, parse_where
from mdsmix.shapes.conversation_rules import MARK
from mdsmix.shapes.fields import BadField, Field, parse_field
from mdsmix.shapes.functions import (
    FunctionName,
    describe_bad_name,
    find_function,
    function_shape,
    is_function,
)
from mdsmix.shapes.image_parts import FIELDS, with_images
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.shards.manifest import Encoding
from mdsmix.sources.formats import FORMATS
from mdsmix.tokenizer.card import Tokenizer

KINDS: list[type[Kind]] = [Pretraining, Pairs, Conversations, ConversationsWithImages, Preferences]
for kind in KINDS:
    if kind.loader:
        register_loader(kind.loader)


def kinds_of_word(word: str | None) -> list[type[Kind]]:
    """The kinds that a value of the recipe's `kind:` may mean."""
    return [kind for kind in KINDS if kind.word == word]


def kind_of_stream(stream: StreamSpec) -> type[Kind] | None:
    """The kind of a stream with a source; None where no kind reads the stream's `kind:`
    and shape.
    """
    shape = stream.source and shape_of_stream(stream)
    if not shape:
        return None
    has_images = stream.images is not None or bool(shape.has_images)
    kinds = [kind for kind in kinds_of_word(stream.kind) if kind.reads is shape.gives]
    # The `contradictions` of a kind without images refuse them.
    return min(kinds, key=lambda kind: kind.has_images != has_images, default=None)


def shape_of_stream(stream: StreamSpec) -> Shape | None:
    """Return the shape of a stream's records; None if no shape fits its fields. A function's shape
    follows from `source.gives`; without it the function gives documents, pairs or preferences."""
    source = stream.source
    assert source is not None
    if is_function(source.shape):
        return function_shape(FunctionName.in_recipe(source.shape, _gives(stream)))
    return find_shape(source.shape, source.fields)


def _gives(stream: StreamSpec) -> str:
    usual = {Pretraining.word: "document", Preferences.word: "preference"}
    return (stream.source and stream.source.gives) or usual.get(stream.kind or "", "pair")


def options_given(stream: StreamSpec) -> Iterator[tuple[str, Any]]:
    """The settings of shapes that a stream does not leave at their defaults."""
    plain = StreamSpec(name=stream.name, source=SourceSpec(path=[]))
    for key in sorted({key for shape in SHAPES.values() for key in shape.options}):
        given, usual = (
            getattr(spec if hasattr(spec, key) else spec.source, key) for spec in (stream, plain)
        )
        if given != usual:
            yield key, given


def shape_of(encoding: Encoding) -> Shape:
    """The shape of the records of a converted stream."""
    shape = find_shape(encoding.shape, encoding.fields)
    assert shape is not None, f"a stream of the unknown shape {encoding.shape}"
    return with_images(shape, image_fields(encoding)) if encoding.images else shape


def kind_of(encoding: Encoding) -> Kind:
    """The kind of a stream that is published or about to be.

    A stream that `mdsmix mix` drew from several holds the fields of all of them. It counts as the
    kind with the most requirements, conversations before pairs.
    """
    named = encoding.fields.keys()
    gives = [s.gives for s in SHAPES.values() if s.fields and named >= {*s.fields}]
    gives += [shape_of(encoding).gives] if encoding.shape else []
    has_images = bool(encoding.images)
    known = [kind for kind in kinds_of_word(encoding.kind) if kind.has_images == has_images]
    return ([kind for kind in known if kind.reads in gives] or known)[-1](encoding)


def fields_read(encoding: Encoding) -> frozenset[str]:
    """The names of the top-level fields that are read. Empty for a shape without fixed fields,
    which is given the whole record.
    """
    if not shape_of(encoding).fields:
        return frozenset()
    return _extras(encoding).union(*(read.roots for read in _reads(encoding)))


def fields_parsed(encoding: Encoding) -> frozenset[str]:
    """The names of the fields read that hold lists or objects. In a format whose cells are texts,
    such as CSV, these cells are JSON.
    """
    keys = shape_of(encoding).structured
    structured = {encoding.fields[key] for key in keys if key in encoding.fields}
    return _extras(encoding).union(structured, *(read.entered for read in _reads(encoding)))


def _extras(encoding: Encoding) -> frozenset[str]:
    """The names of the fields that the shape reads without a key in the recipe, among them a list
    of marks (`train_mark`).
    """
    named = encoding.shape_options.get(MARK)
    return frozenset((*shape_of(encoding).extras, *filter(None, [named])))


def _reads(encoding: Encoding) -> Iterator[Field | Condition]:
    """The parsed fields, id, image fields and condition (`where`) of a stream: all that reads a
    record by the names of its fields.
    """
    yield from map(parse_field, filter(None, (*encoding.fields.values(), encoding.id)))
    if encoding.images and _is_beside(encoding):
        yield from map(parse_field, image_fields(encoding))
    if encoding.where:
        yield parse_where(encoding.where)


def image_fields(encoding: Encoding) -> tuple[str, ...]:
    """The names of the fields that may hold the images of a record."""
    return tuple(encoding.images.get("field", FIELDS))


def fields_rivalling(encoding: Encoding) -> tuple[str, ...]:
    """Image fields of which only the first with an image is read; empty where the recipe names the
    field, or images stand in the texts.
    """
    usual = encoding.images and "field" not in encoding.images and _is_beside(encoding)
    return FIELDS if usual else ()


def _is_beside(encoding: Encoding) -> bool:
    return shape_of(encoding).has_images != "inside"


def make_encoding(recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> Encoding:
    """The Encoding of a stream with a source: all settings that shape its samples. RecipeError
    where the tokenizer lacks a token that the stream needs.
    """
    source, kind = stream.source, kind_of_stream(stream)
    assert source is not None
    assert kind is not None
    shape = shape_of_stream(stream)
    assert shape is not None
    if is_function(source.shape):
        found = find_function(source.shape, _gives(stream), Path(recipe.folder))
        shape = function_shape(found.name)
    is_plain = recipe.has_plain_rows and not kind.has_targets
    settings = kind.settings(recipe, stream, tokenizer)
    encoding = Encoding(
        kind=kind.word,
        loader=kind.loader.name if kind.loader else "text" if is_plain else "finetuning",
        columns=settings["columns"],
        max_seq_len=recipe.max_seq_len,
        decoder_only_format=recipe.decoder_only_format,
        target_prompts=recipe.target_prompts,
        target_responses=recipe.target_responses,
        special_tokens_in_text=recipe.special_tokens_in_text,
        compression=recipe.compression,
        duplicates=stream.duplicates,
        fields=(fields := source.fields or shape.own_fields),
        shape=published_name(shape) if find_shape(None, fields) is not shape else None,
        shape_options={key: value for key, value in options_given(stream) if key in shape.options},
        where=source.where,
        id=source.id,
    )
    by_share = stream.sample not in (None, BY_BUDGET)  # a budget's share is not known yet
    if by_share and (sample := read_share(stream.sample or 0)) < 1:
        settings["sample"] = str(sample)
    if stream.holdout is not None:
        settings["holdout"] = str(read_share(stream.holdout))
        settings["held_out"] = stream.held_out_of is not None
    encoding = replace(encoding, **settings)
    encoding = replace(encoding, rules=rules_of(encoding, tokenizer))
    if is_ended_by_next(encoding) or (kind.has_template and tokenizer.are_stops_named):
        return replace(encoding, stop_ids=find_stop_ids(tokenizer))
    return encoding


def rules_of(encoding: Encoding, tokenizer: Tokenizer | None) -> dict[str, int]:
    """Return the rules above version 1 that would shape a stream with this encoding today, its
    formats aside. A stream that `mdsmix mix` drew may have records of several shapes.
    """
    kind, named = kind_of(encoding), encoding.fields.keys()
    found = find_shape(encoding.shape, named)
    of_kind = (shape for shape in SHAPES.values() if shape.fields and shape.gives is kind.reads)
    shapes = [found] if found else [s for s in of_kind if named >= {*s.fields}]
    return raised_rules(kind, shapes, encoding, tokenizer)


def is_data(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a file of data by its name. A `.json` may be YAML too."""
    return str(path).endswith(tuple(FORMATS.keys() - {".json"})) and os.path.isfile(path)


def open_recipe(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), folder: Path | None = None
) -> Recipe:
    """Reads a recipe as `load_recipe` does, and checks it by the rules of loaders, kinds and
    shapes; no data is read. RecipeError says in a sentence what is wrong.
    """
    try:
        recipe = load_recipe(path, overrides, folder)
    except RecipeError:
        if not is_data(path):
            raise
        raise RecipeError(
            f"{path} is a file of data, not a recipe: `mdsmix init {path} --tokenizer NAME -o recipe.yaml` writes a recipe for it."
        ) from None
    if recipe.loader not in DATASETS:
        known = join_names(list(DATASETS), len(DATASETS))
        raise RecipeError(
            f"{path}: train_loader.name is {recipe.loader!r}; the loaders are {known}."
        )
    for stream in recipe.sourced:
        for sentence in _contradictions(recipe, stream):
            raise RecipeError(f"{path}: streams.{stream.name}: {sentence}")
    kinds = [kind_of_stream(stream) for stream in recipe.sourced]
    if recipe.tokenizer.template and not any(kind and kind.has_template for kind in kinds):
        raise RecipeError(
            f"{path}: tokenizer.template is for chat templates, and no stream has messages; take it out, it would change nothing."
        )
    if recipe.tokenizer.stop_tokens and not any(kind and kind.has_template for kind in kinds):
        raise RecipeError(
            f"{path}: tokenizer.stop_tokens is for the answers of chats, and no stream has messages; take it out, it would change nothing."
        )
    return recipe


def _contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    source = stream.source
    assert source is not None
    if stream.kind and not kinds_of_word(stream.kind):
        yield f"kind is {stream.kind!r}; {suggest_key(stream.kind, list(dict.fromkeys(kind.word for kind in KINDS)))}"
        return
    if is_function(source.shape):
        if sentence := describe_bad_name(source.shape):
            yield sentence
        if named := [*source.fields, *["images"][: stream.images is not None]]:
            yield f"source.shape is a function, which reads the record itself and gives no images: take {' and '.join(named)} out."
    elif source.gives:
        yield f"source.gives is {source.gives}, which is for a function (shape: my_shapes.py:read); take it out, it would change nothing."
    elif source.shape and not find_shape(source.shape, ()):
        yield f"source.shape is {source.shape!r}; {suggest_key(source.shape, list(SHAPES))}"
    shape, kind = shape_of_stream(stream), kind_of_stream(stream)
    yield from _unreadable(source, shape)
    if shape is None or kind is None:
        gives = [kind.reads for kind in kinds_of_word(stream.kind)]
        shapes = [shape for shape in SHAPES.values() if shape.gives in gives and shape.fields]
        wanted = ", or ".join(dict.fromkeys(" and ".join(shape.fields) for shape in shapes))
        told = f"source names the fields {', '.join(source.fields) or 'none'}"
        told = f"source.shape is {source.shape}" if source.shape else told
        yield f"{told}; {stream.kind} reads {wanted}."
        return
    given = source.fields.keys()
    if given and not set(shape.fields) <= given <= shape.own_fields.keys():
        yield (
            f"source.shape is {shape.name}, which reads {' and '.join(shape.fields)}, and may read {' and '.join(shape.optional) or 'no more'}; "
            f"the source names {' and '.join(given)}: name those, or no field where they bear these names."
        )
    yield from foreign_keys(stream, {SOURCED, *kind.called})
    for key, _ in options_given(stream):
        if key not in shape.options:
            of = " and ".join(other.name for other in SHAPES.values() if key in other.options)
            yield f"{key} is for records of the shape {of}, and these are {shape.name}; take it out, it would change nothing."
    for tag in source.tags:
        if tag not in TAGS:
            yield f"source.tags.{tag} is not a known tag; {suggest_key(tag, list(TAGS), 'the tags are')}"
    yield from kind.contradictions(recipe, stream)


def _unreadable(source: SourceSpec, shape: Shape | None) -> Iterator[str]:
    """Sentences on fields and a condition that cannot be read."""
    key = ""
    try:
        for key, name in {**source.fields, "id": source.id}.items():
            if name and parse_field(name).is_template and shape and key in shape.structured:
                yield f"source.{key} is {shorten(name)}, a template, which makes a text: name the field that holds the list."
        key = "where"
        if source.where is not None:
            parse_where(source.where)
    except (BadField, BadCondition) as error:
        yield f"source.{key}: {error}."
