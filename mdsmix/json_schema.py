"""Writes a JSON Schema (draft 2020-12) of a dataclass that `mdsmix.schema` reads, so that editors
know its keys, their values and their descriptions.

A field's type comes from its annotation, its default from the field, its bounds from the metadata
`json schema`, and its description from the string below it. A value that is an interpolation of
OmegaConf (`${...}`) is valid at any place.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from mdsmix import schema
from mdsmix.table import Tree

INTERPOLATION = "interpolation"
"The name of the definition that `${...}` fits."
_TYPES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
}
_SEE = re.compile(r" \(\[[^\]]*\]\([^)]*\)\)")
"A link of docs/recipe.md in parentheses, with the space before it: ` ([formats](data.md))`."
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@functools.cache
def read_field_texts(cls: Any) -> Mapping[str, str]:
    """Map each field of a dataclass to the string below it, on one line. A field without a string
    is left out; so are all fields where mdsmix is installed without its .py files.
    """
    try:
        source = inspect.getsource(cls)
    except OSError:
        return {}
    [tree] = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = following.value.value
            if isinstance(text, str):
                texts[statement.target.id] = " ".join(text.split())
    return texts


def describe_field(cls: Any, field: dataclasses.Field[Any]) -> str:
    """Return the text of a field, after the group of streams that it is only for: `Pretraining:
    start every document ...`. Return an empty string if the field has no text.
    """
    text = read_field_texts(cls).get(field.name, "")
    group = field.metadata.get("only of", "")
    if not group or not text or field.name == "images":
        return text
    return f"{group.capitalize()}: {text[0].lower()}{text[1:]}"


def match_whole(pattern: str) -> str:
    """Return a pattern of a JSON Schema, which may match anywhere, that matches a whole text."""
    return f"^(?:{pattern})$"


def allow_interpolation(described: Tree) -> Tree:
    """Return a schema that also takes `${...}`. A schema that takes any text is returned unchanged,
    since an interpolation is a text.
    """
    options = described["anyOf"] if described.keys() == {"anyOf"} else [described]
    if any(_takes_any_text(option) for option in options):
        return described
    return {"anyOf": [*options, {"$ref": f"#/$defs/{INTERPOLATION}"}]}


def _takes_any_text(described: Tree) -> bool:
    is_text = "string" in described.get("type", ())
    return not described or (is_text and not described.keys() & {"pattern", "enum", "not"})


class SchemaWriter:
    """Writes the schemas of a dataclass and of all dataclasses inside."""

    def __init__(self, added: Mapping[str, Tree]) -> None:
        """Begin without definitions.

        Args:
            added: further keywords, by the name of a class (`StreamSpec`) or of a field
                (`StreamSpec.kind`). They are for rules that the fields do not state.
        """
        self._added = added
        self.definitions: Tree = {
            INTERPOLATION: {
                # No description: an editor would show it at every key.
                "$comment": "An interpolation of OmegaConf: ${key} or ${oc.env:NAME}.",
                "type": "string",
                "pattern": r"(^|[^\\])\$\{",
            }
        }
        "Name of a class, without `Spec` and in lower case -> its schema."

    def write_class(self, cls: Any) -> Tree:
        """Return the schema of a dataclass. Dataclasses inside go to the definitions."""
        hints = typing.get_type_hints(cls)
        properties = {}
        required = []
        for field in schema.list_fields(cls):
            properties[field.name] = self._write_field(cls, field, hints[field.name])
            if not schema.has_default(field):
                required.append(field.name)
        described: Tree = {
            "description": " ".join((inspect.getdoc(cls) or "").split()),
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }
        if required:
            described["required"] = required
        return described | dict(self._added.get(cls.__name__, {}))

    def _write_field(self, cls: Any, field: dataclasses.Field[Any], hint: Any) -> Tree:
        """Return the schema of a field: its text, its default, and the values that it takes."""
        described: Tree = {}
        text = _LINK.sub(r"\1", _SEE.sub("", describe_field(cls, field)))
        if text:
            described["description"] = text
        default = schema.get_default(field) if schema.has_default(field) else None
        if default not in (None, {}, []):
            described["default"] = default
        keywords = dict(field.metadata.get("json schema", {}))
        keywords |= self._added.get(f"{cls.__name__}.{field.name}", {})
        return described | allow_interpolation(self._write_type(hint) | keywords)

    def _write_type(self, hint: Any) -> Tree:
        """Return the schema of the values that fit an annotation, without interpolations of the
        whole value.
        """
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options = typing.get_args(hint) if is_union else (hint,)
        names = [_TYPES[option] for option in options if option in _TYPES]
        if "number" in names and "integer" in names:  # every whole number is a number
            names.remove("integer")
        written: list[Tree] = []
        for option in options:
            if option not in _TYPES:
                written += self._write_container(option)
        if names:
            written.insert(0, {"type": names[0] if len(names) == 1 else names})
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _write_container(self, hint: Any) -> list[Tree]:
        """Return the schemas of an annotation such as `list[str]`, `Literal` or a dataclass: of its
        values, and of its short form.
        """
        if hint is Any:
            return [{}]
        outer = typing.get_origin(hint) or hint
        args = typing.get_args(hint)
        if outer is Literal:
            return [{"enum": list(args)}]
        if outer is list:
            elements = {"type": "array", "items": allow_interpolation(self._write_type(args[0]))}
            return [{"type": "string"}, elements] if args == (str,) else [elements]
        if dataclasses.is_dataclass(outer):
            return self._refer(outer)
        return [{"type": "object", "additionalProperties": self._write_element(args[1])}]

    def _write_element(self, hint: Any) -> Tree:
        return {} if hint is Any else allow_interpolation(self._write_type(hint))

    def _refer(self, cls: Any) -> list[Tree]:
        """Return references to the definition of a dataclass, and the schema of its short form."""
        name = cls.__name__.removesuffix("Spec").lower()
        if name not in self.definitions:
            self.definitions[name] = {}  # its place, before those of the classes inside
            self.definitions[name] = self.write_class(cls)
        written: list[Tree] = [{"$ref": f"#/$defs/{name}"}]
        short_form = schema.get_short_form(cls)
        if short_form:
            pattern = short_form.pattern
            limits = {} if pattern is None else {"pattern": match_whole(pattern)}
            written.append({"type": "string", **limits})
        return written
