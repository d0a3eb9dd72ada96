"""The versions of the rules that shape rows: of kinds, shapes, formats and chat templates.

A rule's version is part of the key of each work unit that it shapes. When it is raised, `convert`
makes these units again and no others, and `check` names the rule for streams made before. Version 1
is never written, so that keys and manifests from before there were versions stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from mdsmix.encode.template_rules import raised_template_rules
from mdsmix.errors import RecipeError
from mdsmix.kinds.kind import Kind
from mdsmix.shapes import Shape
from mdsmix.shards.index import INDEX
from mdsmix.shards.manifest import Encoding, Manifest
from mdsmix.sources.format import Format
from mdsmix.sources.formats import format_by, list_raised_versions
from mdsmix.tokenizer.card import Tokenizer

EXTRAS_RULE = "record.extras"
EXTRAS_VERSION = 2
"""Version 1 left the extras of records unread, of shapes that have not got another version
themselves.
"""


@dataclass(frozen=True, kw_only=True)
class RuleChange:
    """A rule that had another version when a stream was made."""

    rule: str
    made: int
    now: int

    def __str__(self) -> str:
        return f"{self.rule} was version {self.made} and is {self.now}"


def raised_rules(
    kind: Kind, shapes: Iterable[Shape], encoding: Encoding, tokenizer: Tokenizer | None
) -> dict[str, int]:
    """Return the rules above version 1 that shape a stream, its formats aside: name -> version.

    Args:
        kind: that of the stream.
        shapes: those of its records.
        encoding: its settings.
        tokenizer: None if it is not at hand; then template rules that may concern it count too.
    """
    versions = {f"kind.{kind.name}": kind.version}
    versions |= {f"shape.{shape.name}": shape.version for shape in shapes}
    found = {name: version for name, version in versions.items() if version > 1}
    return found | (raised_template_rules(encoding, tokenizer) if kind.has_template else {})


def raised_extras(made: Manifest, shape: Shape | None) -> dict[str, int]:
    """Return the rule by which a record's extras are read, such as `loss_mask`, if it shapes a
    stream.

    Only the records tell whether they have extras. So the rule concerns a stream whose older
    conversion counted some among the fields that are not read, and one that was made by the rule
    before.

    Args:
        made: the stream's manifest.
        shape: that of its records; None if they have several.
    """
    unread = {*made.records.unread, *made.records.unseen}
    is_concerned = shape is not None and not unread.isdisjoint(shape.extras)
    is_concerned |= EXTRAS_RULE in made.encoding.rules
    return {EXTRAS_RULE: EXTRAS_VERSION} if is_concerned else {}


def raised_formats(paths: Iterable[str]) -> dict[str, int]:
    """Return the rules above version 1 that read files of these names: name -> version.

    A file whose suffix does not tell its format is left out.
    """
    names = (path.lower().rpartition("/")[2] for path in paths)
    alike = {name if name == INDEX else f"x.{name.partition('.')[2]}" for name in names}
    found = list[Format]()
    for name in alike:
        with suppress(RecipeError):
            found.append(format_by(name))
    return list_raised_versions(found)


def rule_changes(made: Mapping[str, int], now: Mapping[str, int]) -> list[RuleChange]:
    """Compare the rules that made a stream with those that would make it now."""
    names = sorted({*made, *now})
    changes = (RuleChange(rule=n, made=made.get(n, 1), now=now.get(n, 1)) for n in names)
    return [each for each in changes if each.made != each.now]
