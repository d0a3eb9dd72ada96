"""`open_recipe` reads a recipe and checks it by the rules of loaders, kinds and shapes, which
`mdsmix.recipe` does not know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mdsmix.errors import RecipeError
from mdsmix.kinds.encodings import RecordType, find_record_type, set_options
from mdsmix.kinds.kind_table import DATASET_KEYS_OF, KINDS, find_kinds
from mdsmix.messages import join_names, suggest_key
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, load_recipe
from mdsmix.recipe.stream_spec import SOURCED, find_foreign_keys
from mdsmix.schema import shorten_value
from mdsmix.shapes import SHAPES, Shape, find_shape
from mdsmix.shapes.condition import BadCondition, parse_where
from mdsmix.shapes.fields import BadField, parse_field
from mdsmix.shapes.functions import describe_bad_name, is_function
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.sources.formats import FORMATS


def open_recipe(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), folder: Path | None = None
) -> Recipe:
    """Read a recipe as `load_recipe` does, and check it by the rules of loaders, kinds and shapes.
    No data is read.

    Args:
        path: the YAML file.
        overrides: `key=value` each.
        folder: the base of relative paths, if that is not the recipe's own folder.

    Raises RecipeError if a rule is broken.
    """
    try:
        recipe = load_recipe(path, overrides, folder)
    except RecipeError:
        if not is_data(path):
            raise
        raise RecipeError(
            f"{path} is a data file, not a recipe: `mdsmix init {path} --tokenizer NAME -o "
            "recipe.yaml` writes a recipe for it."
        ) from None
    if recipe.loader not in DATASET_KEYS_OF:
        names = join_names(list(DATASET_KEYS_OF), len(DATASET_KEYS_OF))
        raise RecipeError(
            f"{path}: train_loader.name is {recipe.loader!r}; the loaders are {names}."
        )
    has_templates = False
    for stream in recipe.sourced:
        record_type = find_record_type(stream)
        for sentence in _contradictions(recipe, stream, record_type):
            raise RecipeError(f"{path}: streams.{stream.name}: {sentence}")
        has_templates |= record_type.kind is not None and record_type.kind.has_template
    for sentence in _unused_tokenizer_keys(recipe, has_templates):
        raise RecipeError(f"{path}: {sentence}")
    return recipe


def is_data(path: str | os.PathLike[str]) -> bool:
    """Check by its name whether a path is a data file. A `.json` may be YAML too."""
    return str(path).endswith(tuple(FORMATS.keys() - {".json"})) and os.path.isfile(path)


def _unused_tokenizer_keys(recipe: Recipe, has_templates: bool) -> Iterator[str]:
    """Yield a sentence for each key of `tokenizer` that would change nothing.

    Args:
        has_templates: whether a chat template renders the records of any stream.
    """
    if has_templates:
        return
    if recipe.tokenizer.template:
        yield (
            "tokenizer.template is for chat templates, but no stream has messages; it would change "
            "nothing, so take it out."
        )
    if recipe.tokenizer.stop_tokens:
        yield (
            "tokenizer.stop_tokens is for the answers of chats, but no stream has messages; it "
            "would change nothing, so take it out."
        )


def _contradictions(recipe: Recipe, stream: StreamSpec, record_type: RecordType) -> Iterator[str]:
    """Yield a sentence for each rule of shapes and kinds that a stream with a source breaks."""
    source = stream.source
    assert source is not None
    if stream.kind and not find_kinds(stream.kind):
        words = list(dict.fromkeys(kind.word for kind in KINDS))
        yield f"kind is {stream.kind!r}; {suggest_key(stream.kind, words)}"
        return
    yield from _shape_faults(stream, source)
    shape, kind = record_type.shape, record_type.kind
    yield from _unreadable_fields(source, shape)
    if shape is None or kind is None:
        yield _no_shape_fits(stream, source)
        return
    yield from _foreign_fields(source, shape)
    yield from find_foreign_keys(stream, {SOURCED, *kind.key_groups})
    yield from _foreign_options(stream, shape)
    for tag in source.tags:
        if tag not in TAGS:
            similar = suggest_key(tag, list(TAGS), "the tags are")
            yield f"source.tags.{tag} is not a known tag; {similar}"
    yield from kind.contradictions(recipe, stream)


def _shape_faults(stream: StreamSpec, source: SourceSpec) -> Iterator[str]:
    """Yield sentences on a `shape:` that names neither a shape nor a function, and on keys that
    have no effect with it.
    """
    if is_function(source.shape):
        sentence = describe_bad_name(source.shape)
        if sentence:
            yield sentence
        unused = [*source.fields]
        if stream.images is not None:
            unused.append("images")
        if unused:
            yield (
                "source.shape is a function, which gets the whole record and returns no images: "
                f"remove {' and '.join(unused)}."
            )
    elif source.gives:
        yield (
            f"source.gives is {source.gives}, but source.shape is not a function such as "
            "my_shapes.py:read; it would change nothing, so take it out."
        )
    elif source.shape and not find_shape(source.shape, ()):
        yield f"source.shape is {source.shape!r}; {suggest_key(source.shape, list(SHAPES))}"


def _unreadable_fields(source: SourceSpec, shape: Shape | None) -> Iterator[str]:
    """Yield sentences on fields and a condition that cannot be parsed."""
    key = ""
    try:
        for key, name in {**source.fields, "id": source.id}.items():
            if name and parse_field(name).is_template and shape and key in shape.structured:
                yield (
                    f"source.{key} is {shorten_value(name)}, a template, whose value is always "
                    "text: name the field that contains the list."
                )
        key = "where"
        if source.where is not None:
            parse_where(source.where)
    except (BadField, BadCondition) as error:
        yield f"source.{key}: {error}."


def _no_shape_fits(stream: StreamSpec, source: SourceSpec) -> str:
    types = {kind.reads for kind in find_kinds(stream.kind)}
    shapes = [shape for shape in SHAPES.values() if shape.gives in types and shape.fields]
    choices = ", or ".join(dict.fromkeys(" and ".join(shape.fields) for shape in shapes))
    if source.shape:
        setting = f"source.shape is {source.shape}"
    else:
        setting = f"source names the fields {', '.join(source.fields) or 'none'}"
    return f"{setting}; {stream.kind} reads {choices}."


def _foreign_fields(source: SourceSpec, shape: Shape) -> Iterator[str]:
    """Yield a sentence if the source names other fields than its shape reads."""
    keys = source.fields.keys()
    if keys and not set(shape.fields) <= keys <= shape.own_fields.keys():
        yield (
            f"source.shape is {shape.name}, which needs {' and '.join(shape.fields)}, and may have "
            f"{' and '.join(shape.optional) or 'no more'}; but the source names "
            f"{' and '.join(keys)}: name the fields of the shape, or no field if the record's "
            "fields have the shape's names."
        )


def _foreign_options(stream: StreamSpec, shape: Shape) -> Iterator[str]:
    """Yield a sentence for each option of other shapes that the stream sets."""
    for key in set_options(stream):
        if key not in shape.options:
            shapes = [candidate.name for candidate in SHAPES.values() if key in candidate.options]
            yield (
                f"{key} is for records of the shape {' and '.join(shapes)}, but these are "
                f"{shape.name}; it would change nothing, so take it out."
            )
