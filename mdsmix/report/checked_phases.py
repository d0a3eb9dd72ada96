"""The output of `mdsmix check` for a recipe with phases: each phase is checked as its own mix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mdsmix.foundry_yaml.findings import Finding
from mdsmix.mix.check import describe_coverage, sort_by_severity
from mdsmix.report.checked_mix import CheckedMix
from mdsmix.report.result import Result
from mdsmix.report.show import Item, Title, group_findings
from mdsmix.table import Tree


class CheckedPhases(Result):
    """The findings on each phase of a recipe."""

    def __init__(self, phases: Mapping[str, CheckedMix]) -> None:
        """Keep the findings.

        Args:
            phases: name of a phase -> the findings on its mix.
        """
        self.phases = phases

    @property
    def is_refused(self) -> bool:
        """Whether a phase has an error, so that the run may not be trained."""
        return any(checked.is_refused for checked in self.phases.values())

    @property
    def findings(self) -> list[Finding]:
        """The findings of all phases, the gravest first. One that all phases share is listed once;
        the message of any other begins with its phase.
        """
        lists = [list(checked) for checked in self.phases.values()]
        shared = list[Finding]()
        for finding in lists[0]:
            if all(finding in findings for findings in lists):
                shared.append(finding)
        all_findings = list(shared)
        for name, checked in self.phases.items():
            for finding in checked:
                if finding not in shared:
                    message = f"phase {name}: {finding.message}"
                    all_findings.append(replace(finding, message=message))
        return sort_by_severity(all_findings)

    def items(self) -> Iterator[Item]:
        yield from group_findings(self.findings)
        yield from self.summary()

    def summary(self) -> Iterator[Item]:
        """Yield what follows the findings: the shares and the verdict of each phase."""
        for name, checked in self.phases.items():
            yield Title(f"phase {name}")
            coverage = describe_coverage(checked.mix)
            yield from (item for item in checked.summary() if item != coverage)
        yield describe_coverage(checked.mix)

    def to_dict(self) -> Tree:
        """Return the result as `mdsmix check --json` prints it."""
        phases = {name: checked.to_dict() for name, checked in self.phases.items()}
        return {"may_be_mixed": not self.is_refused, "phases": phases}
