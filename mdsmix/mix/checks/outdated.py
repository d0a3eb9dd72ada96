"""Checks that streams are what this mdsmix would make of the same records today."""

from __future__ import annotations

from contextlib import suppress

from mdsmix.errors import Damaged
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.kinds.encodings import find_raised_rules
from mdsmix.kinds.rules import raised_extras, raised_formats, rule_changes
from mdsmix.mix.checks.tokenizers import tokenizer_that_made
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix
from mdsmix.shapes import find_shape
from mdsmix.shards.manifest import Manifest
from mdsmix.sources.formats import FORMATS

CHECKS = CheckList()


@CHECKS.stream(
    "warning",
    "This mdsmix would make other rows of the same records; the older rows have the fault that the "
    "change log describes.",
)
def rows_outdated(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    manifest = stream.trusted_manifest
    if manifest is None or stream.survey:
        return
    tokenizer = tokenizer_that_made(mix, stream, manifest)
    encoding = manifest.encoding
    now = find_raised_rules(encoding, tokenizer) | _formats_of(stream, manifest)
    now |= raised_extras(manifest, find_shape(encoding.shape, encoding.fields))
    for change in rule_changes(manifest.rules, now):
        note = ""
        if change.rule.startswith("template.") and tokenizer is None:
            note = " (its tokenizer is not at hand, so it may not concern this template)"
        fix = "a newer mdsmix made the stream: convert, check and render with that one."
        if change.made < change.now:
            fix = (
                f"look the rule up in docs/changelog.md, and {mix.republish_fix()}: it converts "
                "again only what the rule shapes."
            )
        yield Finding(
            f"{{streams}}: the rule {change.rule} was version {change.made} at the conversion, and "
            f"is {change.now} here{note}.",
            fix,
        )


def _formats_of(stream: StreamInMix, manifest: Manifest) -> dict[str, int]:
    """Return the raised rules that read the stream's sources. Long lists of sources are read only
    if there are such rules.
    """
    known = {each.rule: each.version for each in FORMATS.values()}
    # The recipe may have named the format of a file whose suffix does not tell it.
    found = {rule: known.get(rule, made) for rule, made in manifest.formats.items()}
    if not manifest.mixed and max(known.values()) > 1:
        with suppress(Damaged):  # a check of its own tells that a part of the list is damaged
            sources = manifest.read_sources(stream.folder)
            found |= raised_formats(source.path for source in sources)
    return found
