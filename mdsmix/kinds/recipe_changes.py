"""The settings of a recipe that differ from those by which a stream was converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mdsmix.encode.answer_ends import is_ended_by_next
from mdsmix.messages import format_yaml_value, join_names
from mdsmix.recipe.stream_spec import SourceSpec
from mdsmix.shards.manifest import Encoding

OF_SOURCE = {each.name for each in fields(SourceSpec)}
NO_ROWS = frozenset({"compression", "source.id", "loader", "columns"})
"""Settings that shape shards, the names of records and the columns of a row, and not what it holds.
Whether a loader reads the columns is judged by a check of its own."""
SAMPLE = "sample"
STOPS = "tokenizer.stop_tokens (ids)"
DERIVED = "columns"
"It follows from other settings and from the tokenizer."


@dataclass(frozen=True, kw_only=True)
class KeyChange:
    """A key of the recipe with two values. `None`: it is not set."""

    key: str
    made: Any
    now: Any

    @property
    def shapes_rows(self) -> bool:
        return self.key not in NO_ROWS

    def __str__(self) -> str:
        return f"{self.key} was {_shown(self.made)} and is {_shown(self.now)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return join_names([*map(format_yaml_value, value)])
    return "not set" if value is None else format_yaml_value(value)


def encoding_changes(made: Encoding, now: Encoding) -> list[KeyChange]:
    """Compare two encodings, in the words of a recipe. Versions of rules are left out."""
    before, after = recipe_keys(made), recipe_keys(now)
    changes = key_changes(before, after)
    if not is_ended_by_next(made):  # no row of it follows from them
        changes = [change for change in changes if change.key != STOPS]
    derived = [change for change in changes if change.key == DERIVED]
    return [change for change in changes if change.key != DERIVED] or derived


def source_changes(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[KeyChange]:
    """Compare which files are read, and how. None of it is known of a manifest that does not say
    it.
    """
    changes = key_changes(made, now) if made else []
    return [change for change in changes if change.key != SAMPLE]


def key_changes(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[KeyChange]:
    """Return the keys whose values differ; a key that is missing has the value None."""
    keys = dict.fromkeys([*made, *now])
    changes = (KeyChange(key=key, made=made.get(key), now=now.get(key)) for key in keys)
    return [change for change in changes if change.made != change.now]


def recipe_keys(encoding: Encoding) -> dict[str, Any]:
    """Return the settings by the keys of a recipe that set them."""
    found = dict[str, Any]()
    for key, value in asdict(encoding).items():
        match key:
            case "rules":
                continue
            case "fields":
                found |= {f"source.{role}": name for role, name in value.items()}
            case "shape_options":
                found |= {_option(name): setting for name, setting in value.items()}
            case "shape" | "where" | "id":
                found[f"source.{key}"] = value
            case "images":
                found |= {f"images.{name}": setting for name, setting in value.items()}
            case "template":
                found |= {f"tokenizer.template.{n}": setting for n, setting in value.items()}
            case "stop_ids":
                found[STOPS] = value
            case "compact":
                found["columns: compact"] = value
            case _:
                found[key] = value
    return found


def _option(name: str) -> str:
    return f"source.{name}" if name in OF_SOURCE else name
