"""A stream with its shape, its kind and the fields that it reads. They are found once, and then
passed on.

`resolve_stream` in `encodings.py` makes a ResolvedStream from a recipe. `resolve_encoding` makes
one from the stored settings of a stream.
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
    "The shape of its records. If the stream has images, the shape reads them too."
    kind: Kind
    "The kind of the stream. It is not opened (`Kind.open`), so it cannot encode yet."

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the encoding, since the functions of some shapes cannot be pickled."""
        return resolve_encoding, (self.encoding,)

    def with_settings(self, **changes: Any) -> ResolvedStream:
        """Return the stream with changed settings. The caller makes sure that they change neither
        the shape nor the kind of its records.

        Args:
            changes: fields of Encoding with their new values.
        """
        encoding = replace(self.encoding, **changes)
        return replace(self, encoding=encoding, kind=type(self.kind)(encoding))

    @cached_property
    def fields_read(self) -> tuple[str, ...]:
        """The names of the top-level fields of a record that are read. Empty for a shape without
        fixed fields (a user's function), since it gets the whole record.
        """
        if not self.shape.fields:
            return ()
        return tuple(sorted(self._extras.union(*(reader.roots for reader in self._readers()))))

    @cached_property
    def fields_parsed(self) -> tuple[str, ...]:
        """The names of the top-level fields that contain lists or objects. In a format whose cells
        are strings, such as CSV, these cells are parsed as JSON.
        """
        fields = self.encoding.fields
        structured = {fields[key] for key in self.shape.structured if key in fields}
        entered = [reader.entered for reader in self._readers()]
        return tuple(sorted(self._extras.union(structured, *entered)))

    @property
    def image_fields(self) -> tuple[str, ...]:
        """The names of the fields that may contain the images of a record; empty if the stream has
        no images.
        """
        return find_image_fields(self.encoding) if self.kind.has_images else ()

    @property
    def rival_fields(self) -> tuple[str, ...]:
        """`images` and `image`, if the recipe does not name the image fields: only the first of
        them that is not empty is read. Empty if the recipe names the fields, or images are in the
        texts.
        """
        names_field = "field" in self.encoding.images
        return FIELDS if self._has_image_fields and not names_field else ()

    @property
    def _has_image_fields(self) -> bool:
        return bool(self.encoding.images) and self.shape.has_images != "inside"

    @property
    def _extras(self) -> frozenset[str]:
        """The names of the fields that are read although no key of `source:` names them for the
        shape: the shape's extras, such as `loss_mask`, and the field named by `train_mark`.
        """
        mark = self.encoding.shape_options.get(MARK)
        return frozenset([*self.shape.extras, mark] if mark else self.shape.extras)

    def _readers(self) -> Iterator[Field | Condition]:
        """Yield each object that reads fields of a record: the fields of the shape, the id, the
        image fields, and the condition `where`.
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
    """Return the names of the fields that may contain images, for a stream that has images."""
    return tuple(encoding.images.get("field", FIELDS))


def read_images_too(shape: Shape, encoding: Encoding) -> Shape:
    """Return a shape that also reads images if the stream has any, otherwise the same shape."""
    return with_images(shape, find_image_fields(encoding)) if encoding.images else shape


def resolve_encoding(encoding: Encoding) -> ResolvedStream:
    """Find the shape and the kind of a stream by its stored settings."""
    shape = find_shape(encoding.shape, encoding.fields)
    assert shape is not None, f"a stream of the unknown shape {encoding.shape}"
    shape = read_images_too(shape, encoding)
    return ResolvedStream(encoding=encoding, shape=shape, kind=kind_of(encoding))


def kind_of(encoding: Encoding) -> Kind:
    """Return the kind of a published stream, by its stored settings.

    A stream that `mdsmix mix` made of several streams has the fields of all of them, so several
    kinds may fit. The last one in `KINDS` is returned: conversations rather than pairs.
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
