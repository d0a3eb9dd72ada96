"""All checks over one mix, in order: a mix that would fail is refused before a GPU is rented.

A check that cannot look (the store does not answer, a right is missing) raises Unreachable and ends
the command with exit code 4: an unseen shard must not pass for a good one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import get_args

from mdsmix.foundry_yaml.findings import CHECKS, Check, Finding, Severity
from mdsmix.foundry_yaml.training_yaml import StreamSection
from mdsmix.mix.epoch.apportion import shares_to_json
from mdsmix.mix.epoch.figures import make_epoch_table, measure_epoch
from mdsmix.mix.streams.mix import Mix, unique_folders
from mdsmix.shards.verification import ReadingWatcher, verify
from mdsmix.table import Tree, as_json
from mdsmix.words import plural

SEVERITIES: tuple[Severity, ...] = get_args(Severity)


def run_checks(mix: Mix) -> list[Finding]:
    """All findings on the mix, errors first, then in the order of the README's table. A finding
    that several loaders or streams share is one finding that names them all.
    """
    mix.look()
    return sort_by_severity(_of_all(mix, list_checks()))


def run_one_check(mix: Mix, id: str) -> list[Finding]:
    """Return the findings of one check, for a command that asks for no verdict."""
    return _of_all(mix, [check for check in list_checks() if check.id == id])


def _of_all(mix: Mix, run: Sequence[Check]) -> list[Finding]:
    said: dict[Finding, tuple[dict[str, None], dict[str, None]]] = {}
    for check in run:
        for label, finding in _by_loader(check, mix):
            labels, streams = said.setdefault(replace(finding, streams=()), ({}, {}))
            labels[label] = None
            streams |= dict.fromkeys(finding.streams)
    return [f.of(labels, streams) for f, (labels, streams) in said.items()]


def list_checks() -> list[Check]:
    """All checks in the order of the README's table, the rules of sections last."""
    import mdsmix.mix.checks  # noqa: F401 - registers them

    return sorted(CHECKS.values(), key=lambda check: check.of.endswith("Section"))


def _by_loader(check: Check, mix: Mix) -> Iterator[tuple[str, Finding]]:
    if check.of == "Mix":
        yield from (("", each) for each in check.found(mix=mix))
    elif not (mix.is_bare and check.of.endswith("Section")):  # streams named alone have no section
        for loader in mix.loaders:
            streams: list[StreamSection] = [*loader.streams]
            if check.of == "StreamSection":
                streams += loader.unopened
            for finding in check.found(streams, mix=mix, loader=loader):
                yield loader.label, finding
        if check.of.endswith("Section"):
            for section in mix.unseen:
                found = check.found(section.stream_sections, loader=section)
                yield from ((section.label, each) for each in found)


def sort_by_severity(found: Sequence[Finding]) -> list[Finding]:
    """The findings, errors first."""
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def verify_streams(mix: Mix, watcher: ReadingWatcher) -> Mix:
    """The mix with every shard read, hashed, decoded and counted, which reads every byte of every
    stream.

    Unreachable where a stream cannot be read.
    """
    return replace(
        mix,
        verified={
            stream.folder.url: verify(stream.folder, watcher)
            for stream in unique_folders(mix.streams)
        },
    )


def is_refused(found: Sequence[Finding]) -> bool:
    """Whether the mix may not be trained: one error is enough."""
    return any(finding.severity == "error" for finding in found)


def make_report(mix: Mix, found: Sequence[Finding]) -> Tree:
    """Verdict, findings and the epoch's samples and tokens, for machines."""
    epoch = make_epoch_table(measure_epoch(mix.train, mix.yaml.batch_size))
    return {
        "origin": mix.yaml.origin,
        "loader": mix.train.name,
        "may_be_mixed": not is_refused(found),
        "findings": [asdict(finding) for finding in found],
        "contents_read": bool(mix.verified),
        "changed": list(mix.changed),
        "unseen": list_unopened_evals(mix),
        "epoch": as_json(epoch)["rows"],
    } | ({"shares": shares_to_json(mix.shares)} if mix.shares else {})


def describe_coverage(mix: Mix) -> str:
    """One line on how far shards were looked at. Names and sizes do not show a byte that was
    changed in place.
    """
    shards = [shard.stored for stream in unique_folders(mix.streams) for shard in stream.shards]
    told = f"{plural(len(shards), 'shard')}, {plural(sum(s.bytes for s in shards), 'byte')}"
    if mix.verified:
        blind = sum(report.blind for report in mix.verified.values())
        more = f"; of {plural(blind, 'shard')} no hash or no decompressor is known" if blind else ""
        return f"read and hashed: {told}{more}"
    return (
        f"not looked at: the contents of {told}, known by their names and sizes; `mdsmix check --deep`, or `mdsmix verify` "
        "of a stream, reads them"
    )


def list_unopened_evals(mix: Mix) -> list[str]:
    """Return the labels of the config's evaluations whose streams were not looked at."""
    return [section.label for section in mix.unseen]


def describe_verdict(mix: Mix, found: Sequence[Finding]) -> str:
    """One line: how many streams, whether they may be mixed, and the findings counted by
    severity.
    """
    counts = Counter(finding.severity for finding in found)
    told = ", ".join(plural(counts[s], s) for s in SEVERITIES if counts[s])
    answer = "may not be mixed" if counts["error"] else "may be mixed"
    return f"{plural(len(mix.streams), 'stream')} {answer}{told and f' ({told})'}"
