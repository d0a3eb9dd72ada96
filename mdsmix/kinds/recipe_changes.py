"""Compares the settings of a recipe with the settings that a stream was converted with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from mdsmix.encode.answer_ends import is_ended_by_next
from mdsmix.frozen import frozen
from mdsmix.messages import format_yaml_value, join_names
from mdsmix.recipe.stream_spec import SourceSpec
from mdsmix.shapes import find_shape
from mdsmix.shards.manifest import Encoding

SOURCE_KEYS = {field.name for field in fields(SourceSpec)}
KEYS_WITHOUT_ROWS = frozenset({"compression", "source.id", "loader", "columns"})
"""Keys that do not change the content of rows. They change only how shards are compressed, the
names of records, or the columns. Another check judges whether a loader reads the columns.
"""
SAMPLE = "sample"
STOPS = "tokenizer.stop_tokens (ids)"
DERIVED = "columns"
"A setting that no key of a recipe sets: it follows from other settings and from the tokenizer."


@frozen(kw_only=True)
class KeyChange:
    """A key of the recipe whose value has changed. A value None means that the key is not set."""

    key: str
    published: Any
    "The value that the stream was converted with."
    current: Any
    "The value in the recipe."

    @property
    def shapes_rows(self) -> bool:
        """Whether the key changes the content of rows."""
        return self.key not in KEYS_WITHOUT_ROWS

    def __str__(self) -> str:
        return (
            f"{self.key} was {_format_value(self.published)} and is {_format_value(self.current)}"
        )


def _format_value(value: Any) -> str:
    """Return the value of a key for a message: `not set`, `true`, `a, b and 3 more`."""
    if isinstance(value, list):
        return join_names([*map(format_yaml_value, value)])
    return "not set" if value is None else format_yaml_value(value)


def compare_encodings(published: Encoding, current: Encoding) -> list[KeyChange]:
    """Return the settings that differ between a published stream and the recipe, each under its key
    in the recipe. The versions of the code's rules (`Encoding.rules`) are not compared here, since
    no key sets them.

    Args:
        published: the settings that the stream was converted with.
        current: the settings in the recipe.
    """
    changes = compare_keys(list_recipe_keys(published), list_recipe_keys(current))
    added_keys = _list_added_keys(published, current)
    changes = [change for change in changes if change.key not in added_keys]
    depends_on_stops = is_ended_by_next(published)
    if not depends_on_stops:
        changes = [change for change in changes if change.key != STOPS]
    # DERIVED (`columns`) follows from other settings. So its change may follow from other changes:
    # name it only if it is the only change.
    own_changes = [change for change in changes if change.key != DERIVED]
    return own_changes or changes


def _list_added_keys(published: Encoding, current: Encoding) -> set[str]:
    """Return the keys of the recipe that a newer version of the stream's shape has added, such as
    `source.system`. A recipe with only `shape: openai` names all keys of its shape, so nobody has
    changed it. The rule of the shape then says that the stream is outdated.
    """
    shape = find_shape(current.shape, current.fields)
    if shape is None or published.shape != current.shape:
        return set()
    rule = f"shape.{shape.name}"
    if current.rules.get(rule, 1) <= published.rules.get(rule, 1):
        return set()
    added = set[str]()
    for key in shape.optional:
        has_own_name = current.fields.get(key) == key
        if has_own_name and key not in published.fields:
            added.add(f"source.{key}")
    return added


def compare_sources(published: Mapping[str, Any], current: Mapping[str, Any]) -> list[KeyChange]:
    """Return the settings that differ between two sources: which files are read, and how.

    Args:
        published: the settings in the manifest. If the manifest has none, nothing is compared.
        current: the settings in the recipe.
    """
    if not published:
        return []
    changes = compare_keys(published, current)
    # SAMPLE only says that a budget decides the sampled share. The share itself is in Encoding.
    return [change for change in changes if change.key != SAMPLE]


def compare_keys(published: Mapping[str, Any], current: Mapping[str, Any]) -> list[KeyChange]:
    """Return the keys whose values differ. A key that is missing in one mapping has the value None
    there.
    """
    changes = list[KeyChange]()
    for key in dict.fromkeys([*published, *current]):
        before = published.get(key)
        after = current.get(key)
        if before != after:
            changes.append(KeyChange(key=key, published=before, current=after))
    return changes


def list_recipe_keys(encoding: Encoding) -> dict[str, Any]:
    """Return the settings of an encoding by the recipe's keys for them, such as `source.where`."""
    # Most fields of Encoding have the name of the recipe's key: only the others have a case.
    settings = dict[str, Any]()
    for key, value in asdict(encoding).items():
        match key:
            case "rules":
                continue
            case "fields":
                settings |= {f"source.{role}": name for role, name in value.items()}
            case "shape_options":
                settings |= {_find_option_key(name): setting for name, setting in value.items()}
            case "shape" | "where" | "id":
                settings[f"source.{key}"] = value
            case "images":
                settings |= {f"images.{name}": setting for name, setting in value.items()}
            case "template":
                settings |= {
                    f"tokenizer.template.{name}": setting for name, setting in value.items()
                }
            case "train_parts":
                settings |= {
                    f"train_parts.{name}": weight for name, weight in value.items() if weight != 1
                }
            case "stop_ids":
                settings[STOPS] = value
            case "max_gen_len":
                settings[f"train_loader.dataset.{key}"] = value
            case "compact":
                settings["columns: compact"] = value
            case _:
                settings[key] = value
    return settings


def _find_option_key(name: str) -> str:
    """Return the recipe's key for an option of how records are read: `source.joined_by`, or a
    stream's own key such as `consecutive_roles`.
    """
    return f"source.{name}" if name in SOURCE_KEYS else name
