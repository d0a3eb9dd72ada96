"""A recipe read by the rules of its streams' kinds: what `mdsmix.recipe` alone cannot know, since it knows no kind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from mdsmix.errors import RecipeError
from mdsmix.kinds.encodings import (
    KINDS,
    kind_of_stream,
    kinds_of_word,
    options_given,
    shape_of_stream,
)
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, load_recipe
from mdsmix.recipe.spec import SOURCED, foreign_keys
from mdsmix.shapes import SHAPES, find_shape
from mdsmix.shapes.condition import BadCondition, parse_where
from mdsmix.shapes.fields import BadField, parse
from mdsmix.shapes.functions import fault, is_function
from mdsmix.shapes.sharegpt import KEY_TAGS, TAGS
from mdsmix.training.loader_keys import DATASET_KEYS
from mdsmix.typed import brief
from mdsmix.words import hint, listed


def open_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe with its overrides; RecipeError says in a sentence what is wrong in it, whatever the data."""
    recipe = load_recipe(path, overrides)
    if recipe.loader not in DATASET_KEYS:
        known = listed(list(DATASET_KEYS), len(DATASET_KEYS))
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
    return recipe


def _contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    source = stream.source
    assert source is not None
    if stream.kind and not kinds_of_word(stream.kind):
        yield f"kind is {stream.kind!r}; {hint(stream.kind, list(dict.fromkeys(kind.word for kind in KINDS)))}"
        return
    yield from _shape(stream, source)
    yield from _unreadable(stream, source)
    kind = kind_of_stream(stream)
    if kind is None:
        yield _no_kind(stream, source)
        return
    yield from _fields(stream, source)
    yield from foreign_keys(stream, {SOURCED, *kind.called})
    yield from _foreign_options(stream)
    yield from _tags(source)
    yield from kind.contradictions(recipe, stream)


def _shape(stream: StreamSpec, source: SourceSpec) -> Iterator[str]:
    if not source.shape or not is_function(source.shape):
        if source.shape and not find_shape(source.shape, ()):
            yield f"source.shape is {source.shape!r}; {hint(source.shape, list(SHAPES))}"
        if source.gives:
            yield f"source.gives is {source.gives}, which is for a function (shape: my_shapes.py:read); take it out, it would change nothing."
        return
    if sentence := fault(source.shape):
        yield sentence
    if source.fields:
        yield f"source.shape is a function, which reads the record itself: take {' and '.join(source.fields)} out."
    if stream.images:
        yield "source.shape is a function, whose records have no images: take images out, or write the records as one of the shapes."


def _unreadable(stream: StreamSpec, source: SourceSpec) -> Iterator[str]:
    """Fields and a condition that say nothing."""
    shape = shape_of_stream(stream)
    for key, name in {**source.fields, "id": source.id}.items():
        try:
            is_template = name is not None and parse(name).is_template
            if is_template and shape and key in shape.structured:
                yield f"source.{key} is {brief(name)}, a template, which makes a text: name the field that holds the list."
        except BadField as error:
            yield f"source.{key}: {error}."
    try:
        if source.where is not None:
            parse_where(source.where)
    except BadCondition as error:
        yield f"source.where: {error}."


def _no_kind(stream: StreamSpec, source: SourceSpec) -> str:
    gives = [kind.reads for kind in kinds_of_word(stream.kind)]
    shapes = [shape for shape in SHAPES.values() if shape.gives in gives and shape.fields]
    wanted = ", or ".join(dict.fromkeys(" and ".join(shape.fields) for shape in shapes))
    named = ", ".join(source.fields) or "none"
    told = f"source.shape is {source.shape}" if source.shape else f"source names the fields {named}"
    return f"{told}; {stream.kind} reads {wanted}."


def _fields(stream: StreamSpec, source: SourceSpec) -> Iterator[str]:
    """Fields that a shape lacks or does not read."""
    shape, given = shape_of_stream(stream), set(source.fields)
    if shape and given and not set(shape.fields) <= given <= {*shape.fields, *shape.optional}:
        yield (
            f"source.shape is {shape.name}, which reads {' and '.join(shape.fields)}, and may read {' and '.join(shape.optional) or 'no more'}; "
            f"the source names {' and '.join(source.fields)}: name those, or no field where they bear these names."
        )


def _foreign_options(stream: StreamSpec) -> Iterator[str]:
    """Settings of another shape, which would change nothing."""
    shape = shape_of_stream(stream)
    for key, _ in options_given(stream):
        if shape and key not in shape.options:
            of = " and ".join(other.name for other in SHAPES.values() if key in other.options)
            yield f"{key} is for records of the shape {of}, and these are {shape.name}; take it out, it would change nothing."


def _tags(source: SourceSpec) -> Iterator[str]:
    """Tags that are none, and two roles or two keys of one name."""
    for tag in source.tags:
        if tag not in TAGS:
            yield f"source.tags.{tag} is not a known tag; {hint(tag, list(TAGS), 'the tags are')}"
    words = {**TAGS, **source.tags}
    for group in (KEY_TAGS, [tag for tag in TAGS if tag not in KEY_TAGS]):
        for word, count in Counter(words[tag] for tag in group).items():
            if count > 1:
                yield f"source.tags gives two of {', '.join(group)} the name {word}: name them apart."
