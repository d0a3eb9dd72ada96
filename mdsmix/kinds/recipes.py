"""Reads a recipe and checks it by the rules of loaders, kinds and shapes (`open_recipe`). The
package `mdsmix.recipe` does not know these rules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.extra_loaders import DATASET_KEYS_OF
from mdsmix.kinds.encodings import RecordType, find_record_type, set_options
from mdsmix.kinds.kind_table import KINDS, find_kinds
from mdsmix.messages import join_names, suggest_key
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, load_recipe
from mdsmix.recipe.read import RecipeInput, name_origin, name_recipe
from mdsmix.recipe.stream_spec import SOURCED, find_foreign_keys
from mdsmix.schema import describe_value, shorten_value
from mdsmix.shapes import SHAPES, Shape, find_shape
from mdsmix.shapes.condition import BadCondition, parse_where
from mdsmix.shapes.fields import BadField, parse_field
from mdsmix.shapes.functions import describe_bad_name, is_function
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.sources.formats import FORMATS


def open_recipe(
    recipe: RecipeInput, overrides: Sequence[str] = (), folder: Path | None = None
) -> Recipe:
    """Read a recipe, and check its keys, also those that depend on the loader and on how a stream's
    records are written. No data is read.

    Args:
        recipe: the YAML file; or the keys and values of one, as a mapping, an OmegaConf config or a
            `Recipe` that was built in Python. A `Recipe` that was opened already is returned as it
            is.
        overrides: `key=value` each.
        folder: the base of relative paths. The default is the recipe's own folder, for a recipe
            that is not a file the working directory.

    Raises RecipeError if a key is wrong, or overrides are given for an opened recipe.
    """
    path = name_recipe(recipe)
    if isinstance(recipe, Recipe) and recipe.is_opened:
        if overrides:
            raise RecipeError(
                "overrides change a recipe that is a file or a mapping, and this Recipe was opened "
                "already: pass the overrides to open_recipe."
            )
        return recipe
    try:
        opened = load_recipe(recipe, overrides, folder)
    except RecipeError:
        # A data file in place of a recipe is a likely mistake: name the command that it needs.
        if not is_data(path):
            raise
        raise RecipeError(
            f"{path} is a data file, not a recipe: `mdsmix init {path} --tokenizer NAME -o "
            "recipe.yaml` writes a recipe for it."
        ) from None
    fault = next(_find_faults(opened), None)
    if fault:
        raise RecipeError(f"{name_origin(path, fault, overrides)}: {fault}")
    return opened


def _find_faults(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each wrong setting: of the recipe's loader, and for each stream of the
    keys that depend on its shape (how records are written) or its kind (how they become samples).
    """
    if recipe.loader not in DATASET_KEYS_OF:
        names = join_names(list(DATASET_KEYS_OF), len(DATASET_KEYS_OF))
        yield (
            f"train_loader.name is {describe_value(recipe.train_loader['name'])}, but must be the "
            f"name of a loader: {names}."
        )
        return
    unknown = [
        stream
        for stream in recipe.streams.values()
        if stream.kind is not None and not find_kinds(stream.kind)
    ]
    for stream in unknown:
        similar = suggest_key(str(stream.kind), list(KINDS), "the kinds are")
        yield f"streams.{stream.name}: kind is {stream.kind!r}; {similar}"
    if unknown:
        return
    has_templates = False
    for stream in recipe.sourced:
        record_type = find_record_type(stream)
        for sentence in _find_shape_contradictions(recipe, stream, record_type):
            yield f"streams.{stream.name}: {sentence}"
        has_templates |= record_type.kind is not None and record_type.kind.has_template
    yield from _find_unused_tokenizer_keys(recipe, has_templates)


def is_data(path: str | os.PathLike[str]) -> bool:
    """Check whether a path is a data file, by its suffix. A `.json` file does not count, since it
    may be a recipe: JSON is YAML too.
    """
    return str(path).endswith(tuple(FORMATS.keys() - {".json"})) and os.path.isfile(path)


def _find_unused_tokenizer_keys(recipe: Recipe, has_templates: bool) -> Iterator[str]:
    """Yield a sentence for each key of `tokenizer` that would change nothing.

    Args:
        has_templates: whether a chat template renders the records of any stream.
    """
    if has_templates:
        return
    if recipe.tokenizer.template:
        yield (
            "tokenizer.template sets variables of the chat template, but no stream has messages "
            "for a chat template: remove tokenizer.template, which would change nothing."
        )
    if recipe.tokenizer.stop_tokens:
        yield (
            "tokenizer.stop_tokens is for the answers of chats, but no stream has messages: remove "
            "tokenizer.stop_tokens, which would change nothing."
        )


def _find_shape_contradictions(
    recipe: Recipe, stream: StreamSpec, record_type: RecordType
) -> Iterator[str]:
    """Yield a sentence for each wrong setting of a stream that depends on its shape (how records
    are written) or its kind (how they become samples), such as a field that the shape does not
    read.

    Args:
        recipe: the recipe.
        stream: one of its streams, with a source.
        record_type: the shape and the kind of the stream.
    """
    source = stream.source
    assert source is not None
    yield from _find_shape_faults(stream, source)
    shape = record_type.shape
    kind = record_type.kind
    yield from _find_unreadable_fields(source, shape)
    if shape is None or kind is None:
        yield _describe_misfit_shape(stream, source)
        return
    yield from _find_foreign_fields(source, shape)
    yield from find_foreign_keys(stream, {SOURCED, *kind.key_groups})
    yield from _find_foreign_options(stream, shape)
    for tag in source.tags:
        if tag not in TAGS:
            similar = suggest_key(tag, list(TAGS), "the tags are")
            yield f"source.tags.{tag} is not a known tag; {similar}"
    yield from kind.contradictions(recipe, stream)


def _find_shape_faults(stream: StreamSpec, source: SourceSpec) -> Iterator[str]:
    """Yield a sentence if `shape:` names neither a known shape (a way to write records, such as
    `alpaca`) nor a user's function, and a sentence on keys that have no effect with this `shape:`.
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
                "source.shape is a function, which gets the whole record and cannot return images: "
                f"remove {' and '.join(unused)} from this stream."
            )
    elif source.gives:
        yield (
            f"source.gives is {source.gives}, but source.shape is not a function such as "
            "my_shapes.py:read: remove source.gives, which would change nothing."
        )
    elif source.shape and not find_shape(source.shape, ()):
        similar = suggest_key(source.shape, list(SHAPES), "the shapes are")
        yield f"source.shape is {source.shape!r}; {similar}"


def _find_unreadable_fields(source: SourceSpec, shape: Shape | None) -> Iterator[str]:
    """Yield a sentence on each template, such as `"{title}: {body}"`, that names a field which must
    be a list: the value of a template is always text. Then yield a sentence on the first field or
    condition that cannot be parsed.

    Args:
        source: the stream's source.
        shape: how the stream's records are written; None if no shape fits.
    """
    structured = shape.structured if shape else ()
    key = ""  # the key that is being parsed, for the message on an error
    try:
        for key, name in {**source.fields, "id": source.id}.items():
            if name and parse_field(name).is_template and key in structured:
                yield (
                    f"source.{key} is the template {shorten_value(name)}, whose value is always "
                    f"text, but must be a list: set source.{key} to the field that contains the "
                    "list."
                )
        key = "where"
        if source.where is not None:
            parse_where(source.where)
    except (BadField, BadCondition) as error:
        yield f"source.{key}: {error}."


def _describe_misfit_shape(stream: StreamSpec, source: SourceSpec) -> str:
    """Return the message for a stream whose `shape:` or fields make other records than its `kind`
    reads, such as documents for `finetuning`.
    """
    types = {kind.reads for kind in find_kinds(stream.kind)}
    shapes = [shape for shape in SHAPES.values() if shape.gives in types and shape.fields]
    # Several shapes may have the same fields: `dict.fromkeys` keeps one of each.
    choices = dict.fromkeys(" and ".join(shape.fields) for shape in shapes)
    remedy = "name the fields of one of these under source"
    if source.shape:
        setting = f"source.shape is {source.shape}"
        remedy = "correct the shape or the kind"
    elif source.fields:
        setting = f"source names the fields {', '.join(source.fields)}"
    else:
        setting = "source names no fields"
    return (
        f"{setting}; {stream.kind} reads {', or '.join(choices)}: {remedy}; `mdsmix init FILE` "
        "shows which ones fit."
    )


def _find_foreign_fields(source: SourceSpec, shape: Shape) -> Iterator[str]:
    """Yield a sentence if the source names other fields than its shape (how its records are
    written) reads.
    """
    keys = source.fields.keys()
    optional = ""
    if shape.optional:
        optional = f", and may have {' and '.join(shape.optional)}"
    has_fitting_keys = set(shape.fields) <= keys <= shape.own_fields.keys()
    if keys and not has_fitting_keys:
        yield (
            f"source.shape is {shape.name}, which needs {' and '.join(shape.fields)}{optional}; "
            f"but the source names {' and '.join(keys)}: name the fields of the shape, or no field "
            "if the fields of the records have these names."
        )


def _find_foreign_options(stream: StreamSpec, shape: Shape) -> Iterator[str]:
    """Yield a sentence for each option that the stream sets although its records' shape (how they
    are written) does not use it, such as `consecutive_roles` for plain texts.
    """
    for key in set_options(stream):
        if key not in shape.options:
            shapes = [candidate.name for candidate in SHAPES.values() if key in candidate.options]
            yield (
                f"{key} is for records of the shape {' and '.join(shapes)}, but the records of "
                f"this stream have the shape {shape.name}: remove {key}, which would change "
                "nothing."
            )
