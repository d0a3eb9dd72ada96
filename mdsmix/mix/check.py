"""All checks over one mix, in order: what may not be mixed is said before a GPU is rented.

A check that cannot look (a store that does not answer, a missing right) raises Unreachable and ends the run with exit
code 4: an unseen shard must not pass for a good one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mdsmix.mix.findings import CHECKS, Finding
from mdsmix.mix.streams import Mix
from mdsmix.mix.weights import shares_of
from mdsmix.words import plural

SEVERITIES = ("error", "warning", "note")


def findings(mix: Mix) -> list[Finding]:
    """Everything there is to say of the mix, errors first, then in the order of the README's table."""
    import mdsmix.mix.checks  # noqa: F401 - registers them

    mix.look()
    found = [finding for check in CHECKS.values() for finding in check(mix)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def is_refused(found: Sequence[Finding]) -> bool:
    """Whether the mix may not be trained: one error is enough."""
    return any(finding.severity == "error" for finding in found)


def as_json(mix: Mix, found: Sequence[Finding]) -> dict[str, Any]:
    """Verdict, findings and what an epoch comes to, for machines."""
    return {
        "origin": mix.yaml.origin,
        "loader": mix.train.name,
        "may_be_mixed": not is_refused(found),
        "findings": [asdict(finding) for finding in found],
        "changed": [asdict(change) for change in mix.changed],
        "unseen": unseen(mix),
        "epoch": [asdict(share) for share in shares_of(mix.train, mix.yaml.batch_size)],
    }


def unseen(mix: Mix) -> list[str]:
    """The evaluations of the config that were not looked at."""
    seen = {loader.label for loader in mix.evals}
    return [section.label for section in mix.yaml.evals if section.label not in seen]


def verdict(mix: Mix, found: Sequence[Finding]) -> str:
    """One line on the whole."""
    counts = {s: sum(f.severity == s for f in found) for s in SEVERITIES}
    told = ", ".join(plural(n, s) for s, n in counts.items() if n)
    answer = "may not be mixed" if counts["error"] else "may be mixed"
    return f"{plural(len(mix.streams), 'stream')} {answer}{f' ({told})' if told else ''}"
