"""The JSON Schema of a recipe, which editors read to complete keys, show their descriptions and
mark mistakes.

It is made from the dataclasses of `mdsmix.recipe`, from the tables of kinds, loaders, shapes and
formats, and from the rules that concern one key or one stream. docs/recipe.md lists the rules
that a schema cannot express: only the command checks them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

from mdsmix.foundry_yaml.extra_loaders import DATASET_KEYS_OF
from mdsmix.json_schema import SchemaWriter, allow_interpolation, match_whole
from mdsmix.kinds.kind_table import KINDS, find_kinds
from mdsmix.recipe import Recipe, StreamSpec, WeightSpec
from mdsmix.recipe.rules import PHASE_NAME, PRETRAINED_FOLDER, STREAM_NAME, TARGET_PROMPTS
from mdsmix.recipe.stream_spec import SOURCED, UNSOURCED
from mdsmix.schema import get_default, list_fields
from mdsmix.shapes import SHAPES
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.sources.formats import NAMED
from mdsmix.table import Tree

SCHEMA_FILE = "mdsmix.schema.json"
"The name of the schema's file next to a recipe."
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_WRITER = "Written by mdsmix schema, digest "
_SET: Tree = {"not": {"type": "null"}}
"The schema of a key that a recipe sets: any value but null."


def write_schema() -> str:
    """Return the JSON Schema of a recipe as the text of a file. The same version of mdsmix always
    returns the same text, whatever other packages are installed.
    """
    described = describe_recipe()
    signed = {"$schema": _DIALECT, "$comment": _WRITER + _digest(described), **described}
    return json.dumps(signed, indent=1, ensure_ascii=False) + "\n"


def is_written_by_mdsmix(text: str) -> bool:
    """Check whether a text is a schema that some version of mdsmix wrote and that nobody changed:
    its digest is that of its content.
    """
    try:
        signed = json.loads(text)
    except ValueError:
        return False
    if not isinstance(signed, dict):
        return False
    comment = signed.pop("$comment", None)
    signed.pop("$schema", None)
    return bool(comment == _WRITER + _digest(signed))


def _digest(described: Tree) -> str:
    """Return 16 hex digits of the hash of a schema without `$schema` and `$comment`."""
    content = json.dumps(described, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def describe_recipe() -> Tree:
    """Return the JSON Schema of a recipe, without the name of its dialect."""
    writer = SchemaWriter(_added_keywords())
    described = writer.write_class(Recipe)
    return {"title": "Recipe of mdsmix", **described, "$defs": writer.definitions}


def _added_keywords() -> dict[str, Tree]:
    """Return the rules that the dataclasses' fields do not declare themselves, as keywords of JSON
    Schema: `{"SourceSpec.path": {"minItems": 1}}`. The keys are classes, or fields of classes.
    `mdsmix.recipe.rules` and `mdsmix.kinds.recipes` check the same rules.
    """
    keys = [field.name for field in list_fields(WeightSpec) if field.name != "max_repeat"]
    weights = [_require_set(key) for key in keys]
    text = allow_interpolation({"type": "string"})
    return {
        "Recipe.streams": {
            "minProperties": 1,
            "propertyNames": {
                "pattern": match_whole(STREAM_NAME.pattern),
                "not": {"pattern": match_whole(PRETRAINED_FOLDER.pattern)},
            },
        },
        "Recipe.phases": {"propertyNames": {"pattern": match_whole(PHASE_NAME.pattern)}},
        "PhaseSpec.mix": {"minProperties": 1},
        "Recipe.target_prompts": {"pattern": match_whole(TARGET_PROMPTS.pattern)},
        "Recipe.train_loader": {
            "properties": {
                "name": allow_interpolation({"enum": list(DATASET_KEYS_OF)}),
                "dataset": allow_interpolation({"type": ["object", "null"]}),
            }
        },
        # One weight, or max_repeat alone.
        "WeightSpec": {
            "oneOf": [*weights, _require_set("max_repeat") | {"not": {"anyOf": weights}}],
        },
        "StreamSpec": {"allOf": list(_stream_rules())},
        # A null comes first, since a stream without a source needs no kind.
        "StreamSpec.kind": {"enum": [None, *KINDS]},
        "StreamSpec.split": {"pattern": match_whole(STREAM_NAME.pattern)},
        "SourceSpec.path": {"minItems": 1},
        # Other packages and functions add to these two, so the names are only proposed.
        "SourceSpec.shape": {"examples": list(SHAPES)},
        "SourceSpec.format": {"examples": list(NAMED)},
        "SourceSpec.tags": {
            "properties": dict.fromkeys(TAGS, text),
            "additionalProperties": False,
        },
    }


def _stream_rules() -> list[Tree]:
    """Return the rules of a stream that concern several of its keys."""
    has_source = _require_set("source")
    rules: list[Tree] = [
        {
            "if": has_source,
            "then": _require_set("kind"),
            "else": {"anyOf": [_require_text("remote"), _require_text("local")]},
        },
        {"if": has_source, "else": _leave_out({UNSOURCED})},
    ]
    for word in KINDS:
        groups = {SOURCED}
        for kind in find_kinds(word):
            groups.update(kind.key_groups)
        is_kind = {"required": ["kind"], "properties": {"kind": {"const": word}}}
        rules.append({"if": {"allOf": [has_source, is_kind]}, "then": _leave_out(groups)})
    return rules


def _require_set(key: str) -> Tree:
    return {"type": "object", "required": [key], "properties": {key: _SET}}


def _require_text(key: str) -> Tree:
    return {"required": [key], "properties": {key: {"type": "string", "minLength": 1}}}


def _leave_out(groups: Collection[str]) -> Tree:
    """Return the rule on keys that do not apply to a stream: it leaves them out, or sets them to
    their defaults.

    Args:
        groups: the groups that the stream belongs to, such as `messages` (`Kind.key_groups`).
    """
    foreign: dict[str, Any] = {}
    for field in list_fields(StreamSpec):
        group = field.metadata.get("only of")
        if group and group not in groups:
            foreign[field.name] = allow_interpolation({"const": get_default(field)})
    return {"properties": foreign}
