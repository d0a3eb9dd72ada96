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
"""Version 1 did not read the extras of records, of shapes that have not got another version
themselves.
"""


@dataclass(frozen=True, kw_only=True)
class RuleChange:
    """A rule that had another version when a stream was made."""

    rule: str
    published: int
    "The version that made the stream."
    current: int
    "The version of this mdsmix."

    def __str__(self) -> str:
        return f"{self.rule} was version {self.published} and is {self.current}"


def list_raised_rules(
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
    raised = {name: version for name, version in versions.items() if version > 1}
    if kind.has_template:
        raised |= raised_template_rules(encoding, tokenizer)
    return raised


def find_extras_rule(manifest: Manifest, shape: Shape | None) -> dict[str, int]:
    """Return the rule that reads a record's extras, such as `loss_mask`, if it shapes a stream.

    Only the records tell whether they have extras. So the rule concerns a stream whose older
    conversion counted some among the fields that are not read, and one that this rule made.

    Args:
        manifest: the published stream's.
        shape: that of its records; None if they have several.
    """
    unread = {*manifest.records.unread, *manifest.records.unseen}
    has_unread_extras = shape is not None and not unread.isdisjoint(shape.extras)
    if has_unread_extras or EXTRAS_RULE in manifest.encoding.rules:
        return {EXTRAS_RULE: EXTRAS_VERSION}
    return {}


def list_raised_formats(paths: Iterable[str]) -> dict[str, int]:
    """Return the rules above version 1 that read files of these names: name -> version.

    A file whose suffix does not tell its format is left out.
    """
    file_names = {path.lower().rpartition("/")[2] for path in paths}
    # One name for all files of a suffix.
    examples = {name if name == INDEX else f"x.{name.partition('.')[2]}" for name in file_names}
    formats = list[Format]()
    for name in examples:
        with suppress(RecipeError):
            formats.append(format_by(name))
    return list_raised_versions(formats)


def compare_rules(published: Mapping[str, int], current: Mapping[str, int]) -> list[RuleChange]:
    """Compare the rules that made a stream with those that would make it now."""
    changes = list[RuleChange]()
    for rule in sorted({*published, *current}):
        before = published.get(rule, 1)
        after = current.get(rule, 1)
        if before != after:
            changes.append(RuleChange(rule=rule, published=before, current=after))
    return changes
