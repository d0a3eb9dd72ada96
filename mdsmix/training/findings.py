"""What a check says, and the registry of all checks.

A check is a plain function: a Mix, one loader or one stream of it, or the section of a loader in; findings out. Its last argument is what
it judges. Its id, its severity and the reason why it matters are stated once, at its registration, so that the README's table, the JSON
and the printed line cannot differ. Those on a section are rules: `mdsmix check` reports them, `mdsmix.load` refuses what breaks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mdsmix.training.sections import LoaderSection

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong or worth knowing. An error refuses the mix."""

    message: str
    "What is wrong, with both values; in what a check gives, `{loader}` stands for the loader's name, `{streams}` for those of the streams."
    fix: str
    streams: Sequence[str] = ()
    id: str = ""
    "With severity and why: the check's, filled in by whoever runs it."
    severity: Severity = "note"
    why: str = ""

    def __str__(self) -> str:
        whose = f" [{', '.join(self.streams)}]" if self.streams else ""
        return f"{self.severity} {self.id}{whose}: {self.message} {self.why} Fix: {self.fix}"

    def of(self, loaders: str) -> Finding:
        """Said of these loaders."""
        said = self.message.replace("{loader}", loaders)
        return replace(self, message=said.replace("{streams}", ", ".join(self.streams)))


Findings = Iterator[Finding]
Finder = Callable[..., Findings]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the README's table."""

    id: str
    severity: Severity
    why: str
    find: Finder

    @property
    def of(self) -> str:
        """The type that it judges, the last of its arguments: Mix, Loader, StreamInMix or LoaderSection."""
        return str(list(self.find.__annotations__.values())[-2])

    def found(self, **looked_at: Any) -> Findings:
        """`looked_at`: mix, loader and stream, of which a check gets those that its arguments name."""
        asked = looked_at.keys() & self.find.__annotations__.keys()
        for each in self.find(**{name: looked_at[name] for name in asked}):
            yield replace(each, id=self.id, severity=self.severity, why=self.why)


CHECKS: dict[str, Check] = {}
"Id -> check, as they were registered."


def check(severity: Severity, why: str, id: str | None = None) -> Callable[[Finder], Finder]:
    """Registers the function below it by its name, `rows_cut` as `rows-cut`; `why` is one sentence on what training would do."""

    def register(find: Finder) -> Finder:
        name = id or find.__name__.replace("_", "-")
        CHECKS[name] = Check(name, severity, why, find)
        return find

    return register


def refusal(finding: Finding, loader: LoaderSection) -> str:
    """The end of a command: what is wrong, what comes of it, what to do."""
    said = finding.of(loader.label)
    return f"{said.message} {said.why} Fix: {said.fix}"
