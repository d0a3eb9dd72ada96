"""A stream with its shape, its kind and the fields that it reads: found once, then passed on.

`resolve_stream` in `encodings.py` makes one from a recipe, `resolve_encoding` from the settings
of a stream that a recipe made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mdsmix.kinds.kind import Kind
from mdsmix.kinds.kind_table import find_kinds
from mdsmix.shapes import SHAPES, Shape, find_shape
from mdsmix.shapes.condition import Condition, parse_where
from mdsmix.shapes.conversation_rules import MARK
from mdsmix.shapes.fields import Field, parse_field
from mdsmix.shapes.image_parts import FIELDS, with_images
from mdsmix.shards.manifest import Encoding


@dataclass(frozen=True, kw_only=True)
class ResolvedStream:
    """The settings of a stream with a source, and all that follows from them."""

    encoding: Encoding
    shape: Shape
    "The shape of its records; with images it reads these too."
    kind: Kind
    "Made of the encoding, not opened: it cannot encode yet."

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the encoding: functions of a shape may be impossible to pickle."""
        return resolve_encoding, (self.encoding,)

    def with_settings(self, **changes: Any) -> ResolvedStream:
        """Return the stream with other values of its encoding. They must change neither the shape
        nor the kind of its records.
        """
        encoding = replace(self.encoding, **changes)
        return replace(self, encoding=encoding, kind=type(self.kind)(encoding))

    @cached_property
    def fields_read(self) -> tuple[str, ...]:
        """The names of the top-level fields that are read. Empty for a shape without fixed fields,
        which is given the whole record.
        """
        if not self.shape.fields:
            return ()
        return tuple(sorted(self._extras.union(*(reader.roots for reader in self._readers()))))

    @cached_property
    def fields_parsed(self) -> tuple[str, ...]:
        """The names of the fields read that contain lists or objects. In a format whose cells are
        texts, such as CSV, these cells are JSON.
        """
        fields = self.encoding.fields
        structured = {fields[key] for key in self.shape.structured if key in fields}
        entered = [reader.entered for reader in self._readers()]
        return tuple(sorted(self._extras.union(structured, *entered)))

    @property
    def image_fields(self) -> tuple[str, ...]:
        """The names of the fields that may contain the images of a record; empty without images."""
        return find_image_fields(self.encoding) if self.kind.has_images else ()

    @property
    def rival_fields(self) -> tuple[str, ...]:
        """The image fields, if only the first of them with an image is read; empty if the recipe
        names the field, or images are in the texts.
        """
        names_field = "field" in self.encoding.images
        return FIELDS if self._has_image_fields and not names_field else ()

    @property
    def _has_image_fields(self) -> bool:
        return bool(self.encoding.images) and self.shape.has_images != "inside"

    @property
    def _extras(self) -> frozenset[str]:
        """The names of the fields that the shape reads without a key in the recipe, among them a
        list of marks (`train_mark`).
        """
        mark = self.encoding.shape_options.get(MARK)
        return frozenset([*self.shape.extras, mark] if mark else self.shape.extras)

    def _readers(self) -> Iterator[Field | Condition]:
        """Yield everything that reads a record by the names of its fields: fields, id, image fields
        and condition (`where`).
        """
        encoding = self.encoding
        names = [*encoding.fields.values(), encoding.id]
        if self._has_image_fields:
            names += find_image_fields(encoding)
        for name in names:
            if name:
                yield parse_field(name)
        if encoding.where:
            yield parse_where(encoding.where)


def find_image_fields(encoding: Encoding) -> tuple[str, ...]:
    """Return the names of the fields that may contain images, if the stream has images."""
    return tuple(encoding.images.get("field", FIELDS))


def read_images_too(shape: Shape, encoding: Encoding) -> Shape:
    """Return the shape of a stream's records, which reads their images if the stream has any."""
    return with_images(shape, find_image_fields(encoding)) if encoding.images else shape


def resolve_encoding(encoding: Encoding) -> ResolvedStream:
    """Find the shape and the kind of a stream that was made from a recipe, by its settings."""
    shape = find_shape(encoding.shape, encoding.fields)
    assert shape is not None, f"a stream of the unknown shape {encoding.shape}"
    shape = read_images_too(shape, encoding)
    return ResolvedStream(encoding=encoding, shape=shape, kind=kind_of(encoding))


def kind_of(encoding: Encoding) -> Kind:
    """Return the kind of a published stream.

    A stream that `mdsmix mix` drew from several has the fields of all of them. It counts as the
    kind with the most requirements, conversations before pairs.
    """
    names = encoding.fields.keys()
    types = {shape.gives for shape in SHAPES.values() if shape.fields and names >= {*shape.fields}}
    if encoding.shape:
        shape = find_shape(encoding.shape, names)
        assert shape is not None, f"a stream of the unknown shape {encoding.shape}"
        types.add(shape.gives)
    has_images = bool(encoding.images)
    kinds = [kind for kind in find_kinds(encoding.kind) if kind.has_images == has_images]
    fitting = [kind for kind in kinds if kind.reads in types]
    return (fitting or kinds)[-1](encoding)
