"""What setting a mix into a config changed of it: key by key, the old value and the new.

Nothing that a user wrote is replaced in silence: a tokenizer, a length and a format decide what a model learns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mdsmix.words import spelled

UNSET = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """One key of the config, by its path from the top."""

    key: str
    was: str | None
    "As YAML writes it; of keys below it their names. None: it was not there."
    now: str | None
    "None: it is gone."

    def __str__(self) -> str:
        was = "not set" if self.was is None else self.was
        now = "taken out" if self.now is None else self.now
        return f"{self.key}: {was} -> {now}"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ConfigChange]:
    """Every key that says something else in `after`, in the order of `before`, new ones behind."""
    return list(_changes("", before, after))


def _changes(key: str, was: Any, now: Any) -> Iterator[ConfigChange]:
    mappings = [_mapping(was), _mapping(now)]
    if None not in mappings:
        one, other = (mapping or {} for mapping in mappings)
        for name in dict.fromkeys([*one, *other]):
            below = f"{key}.{name}".lstrip(".")
            yield from _changes(below, one.get(name, UNSET), other.get(name, UNSET))
    elif was != now or type(was) is not type(now):
        yield ConfigChange(key=key, was=_spelled(was), now=_spelled(now))


def _mapping(value: Any) -> Mapping[str, Any] | None:
    """Keys and values; a list of evaluations by their labels."""
    if isinstance(value, list) and value and all(isinstance(e, Mapping) for e in value):
        return {str(entry.get("label")): entry for entry in value}
    return value if isinstance(value, Mapping) else None


def _spelled(value: Any) -> str | None:
    if value is UNSET:
        return None
    keys = _mapping(value)
    return f"{{{', '.join(keys)}}}" if keys else spelled(value) or "''"
