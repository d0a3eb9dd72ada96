"""A recipe read by the rules of its streams' kinds: what `mdsmix.recipe` alone cannot know, since it knows no kind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from mdsmix.errors import RecipeError
from mdsmix.kinds.encodings import (
    KINDS,
    kind_of_stream,
    kinds_of_word,
    options_given,
    shape_of_source,
)
from mdsmix.kinds.kind import Kind
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, load_recipe
from mdsmix.shapes import SHAPES, Shape
from mdsmix.shapes.fields import BadField, parse
from mdsmix.shapes.sharegpt import KEY_TAGS, TAGS
from mdsmix.shapes.where import BadCondition, parse_where
from mdsmix.typed import brief
from mdsmix.words import hint


def open_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe with its overrides; RecipeError says in a sentence what is wrong in it, whatever the data."""
    recipe = load_recipe(path, overrides)
    for stream in recipe.sourced:
        for sentence in _contradictions(recipe, stream):
            raise RecipeError(f"{path}: streams.{stream.name}: {sentence}")
    has_template = any(kind.has_template for s in recipe.sourced if (kind := kind_of_stream(s)))
    if recipe.tokenizer.template and recipe.sourced and not has_template:
        raise RecipeError(
            f"{path}: tokenizer.template sets variables of the chat template, and no stream has messages that one renders; "
            "take it out, it would change nothing."
        )
    return recipe


def _contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    source = stream.source
    assert source is not None
    if source.shape and source.shape not in SHAPES:
        yield f"source.shape is {source.shape!r}; {hint(source.shape, list(SHAPES))}"
    yield from _unreadable(source)
    kind = kind_of_stream(stream)
    if kind is None:
        yield _no_kind(stream, source)
        return
    yield from _fields(source)
    yield from _foreign_keys(kind, stream)
    yield from _foreign_options(stream, source)
    yield from _tags(source)
    yield from kind.contradictions(recipe, stream)


def _unreadable(source: SourceSpec) -> Iterator[str]:
    """Fields and a condition that say nothing."""
    shape = shape_of_source(source)
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
    word = stream.kind
    shapes = [shape for kind in kinds_of_word(word) for shape in _shapes(kind)]
    wanted = dict.fromkeys(" and ".join(shape.fields) for shape in shapes)
    reads = f"{word} reads {', or '.join(wanted)}."
    if (shape := shape_of_source(source)) and source.shape:
        return f"source.shape is {shape.name}, which gives {shape.gives.__name__}s; {reads}"
    return f"source names the fields {', '.join(source.fields) or 'none'}; {reads}"


def _fields(source: SourceSpec) -> Iterator[str]:
    """Fields that a shape lacks or does not read."""
    shape, given = shape_of_source(source), set(source.fields)
    if shape is None or not given:
        return
    if missing := [key for key in shape.fields if key not in given]:
        yield (
            f"source.shape is {shape.name}, which reads {' and '.join(shape.fields)}, and the source does not name "
            f"{' and '.join(missing)}: name all of them, or no field where they bear these names."
        )
    for key in sorted(given - {*shape.fields, *shape.optional}):
        yield (
            f"source.{key} names a field that source.shape {shape.name} does not read; it reads "
            f"{', '.join((*shape.fields, *shape.optional))}: take it out."
        )


def _foreign_options(stream: StreamSpec, source: SourceSpec) -> Iterator[str]:
    """Settings of another shape, which would change nothing."""
    shape = shape_of_source(source)
    for key, _ in options_given(stream):
        if shape and key not in shape.options:
            of = " and ".join(other.name for other in SHAPES.values() if key in other.options)
            yield f"{key} is for records of the shape {of}, and these are {shape.name}; take it out, it would change nothing."


def _tags(source: SourceSpec) -> Iterator[str]:
    """Tags that are none, and roles of one name."""
    for tag in source.tags:
        if tag not in TAGS:
            yield f"source.tags.{tag} is not a known tag; {hint(tag, list(TAGS), 'the tags are')}"
    words = {**TAGS, **source.tags}
    roles = [words[tag] for tag in TAGS if tag not in KEY_TAGS]
    if twice := sorted({word for word in roles if roles.count(word) > 1}):
        yield f"source.tags gives two roles the name {twice[0]}, so a message of it could be either's: name them apart."
    if len({words[tag] for tag in KEY_TAGS}) == 1:
        yield f"source.tags gives role and content the key {words['role_tag']}: name them apart."


def _shapes(kind: type[Kind]) -> list[Shape]:
    return [shape for shape in SHAPES.values() if shape.gives is kind.reads and shape.fields]


def _foreign_keys(kind: type[Kind], stream: StreamSpec) -> Iterator[str]:
    """Keys of another kind of stream, which would change nothing."""
    plain = StreamSpec(name=stream.name)
    for other in KINDS:
        for key in set(other.keys) - set(kind.keys):
            if getattr(stream, key) != getattr(plain, key):
                yield f"{key} is for {other.called}; take it out, it would change nothing."
