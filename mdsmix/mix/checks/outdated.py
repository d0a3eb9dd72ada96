"""Checks of rule versions: this mdsmix must still convert the same records to the same rows."""

from __future__ import annotations

from contextlib import suppress

from mdsmix.errors import Damaged
from mdsmix.foundry_yaml.findings import CheckList, Finding, Findings
from mdsmix.kinds.encodings import find_raised_rules
from mdsmix.kinds.rules import compare_rules, find_record_rules, list_raised_formats
from mdsmix.mix.checks.tokenizers import find_conversion_tokenizer
from mdsmix.mix.streams.mix import Loader, Mix, StreamInMix
from mdsmix.shapes import Shape, find_shape
from mdsmix.shards.manifest import Manifest
from mdsmix.sources.formats import NAMED, format_by

CHECKS = CheckList()


@CHECKS.stream(
    "warning",
    "This mdsmix would convert the same records to other rows; the old rows have the fault that "
    "the change log describes.",
)
def rows_outdated(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    """Find streams that were converted by another version of a rule than this mdsmix has. A rule is
    a part of the conversion, and its version is raised when the rule makes other rows than before.
    """
    manifest = stream.trusted_manifest
    if manifest is None or stream.survey:
        return
    tokenizer = find_conversion_tokenizer(mix, stream, manifest)
    encoding = manifest.encoding
    # The rules of the kind and template, of the source formats, and of extra columns.
    shape = find_shape(encoding.shape, encoding.fields)
    rules_today = find_raised_rules(encoding, tokenizer) | _format_rules_of(stream, manifest, shape)
    rules_today |= find_record_rules(manifest, shape)
    for change in compare_rules(manifest.rules, rules_today):
        note = ""
        if change.rule.startswith("template.") and tokenizer is None:
            note = " (its tokenizer is not available, so the rule may not apply to its template)"
        fix = "a newer mdsmix converted the stream: convert, check and render with that version."
        if change.published < change.current:
            fix = (
                f"read about the rule in docs/changelog.md, and {mix.republish_fix()}. The command "
                "converts again only the part of the stream that the rule affects."
            )
        yield Finding(
            f"{{streams}}: the rule {change.rule} was version {change.published} at the "
            f"conversion, and is {change.current} here{note}.",
            fix,
        )


def _format_rules_of(
    stream: StreamInMix, manifest: Manifest, shape: Shape | None
) -> dict[str, int]:
    """Return the rules of the stream's source formats with their versions today, such as
    {"format.parquet": 2}.

    Args:
        stream: the stream.
        manifest: its manifest.
        shape: the shape of its records; None if the records have several shapes.
    """
    has_messages = shape is None or bool(shape.find_text_or_messages(manifest.encoding.fields))
    # The recipe may have named the format of a file whose suffix does not show it, so the
    # manifest's own list counts too. It may have the format of another package.
    rules = dict(manifest.formats)
    for rule in rules:
        name = rule.removeprefix("format.")
        if name in NAMED:
            rules[rule] = format_by("", name).version_for_stream(has_messages)
    if not manifest.mixed:
        with suppress(Damaged):  # the check side-files reports a damaged list of sources
            sources = manifest.read_sources(stream.folder)
            rules |= list_raised_formats((source.path for source in sources), has_messages)
    return rules
