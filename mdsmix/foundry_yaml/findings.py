"""The findings of checks, and the registry of all checks.

A check is a plain function: a Mix, one loader or one stream of it, or the section of either in;
findings out. The last argument is the thing that it judges. A finding that several streams share is
told once, of all of them. The id of a check, its severity and the reason why it matters are stated
once, at its registration, so that the README's table, the JSON and the printed line cannot differ.
A check of a section is a rule: `mdsmix check` reports it, `mdsmix.load` refuses what breaks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mdsmix.foundry_yaml.training_yaml import LoaderSection, StreamSection

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or worth knowing. An error refuses the mix."""

    message: str
    """What is wrong, with both values. A check writes `{loader}` and `{streams}`, here and in the
    fix, and `of` fills in the names.
    """
    fix: str
    streams: Sequence[str] = ()
    id: str = ""
    """Given by a function that serves several checks. Else the check fills it in, as it does
    severity and why.
    """
    severity: Severity = "note"
    why: str = ""

    def __str__(self) -> str:
        whose = f" [{', '.join(self.streams)}]" if self.streams else ""
        return f"{self.severity} {self.id}{whose}: {self.message} {self.why} Fix: {self.fix}"

    def of(self, loaders: Iterable[str], streams: Iterable[str]) -> Finding:
        """The finding with the names of these loaders and streams filled in."""
        message, fix = (
            text.replace("{loader}", ", ".join(loaders)).replace("{streams}", ", ".join(streams))
            for text in (self.message, self.fix)
        )
        return replace(self, message=message, fix=fix, streams=tuple(streams))


Findings = Iterator[Finding]
Finder = Callable[..., Findings]


@dataclass(frozen=True)
class Check:
    """One row of the README's table."""

    id: str
    severity: Severity
    why: str
    find: Finder

    @property
    def of(self) -> str:
        """The type that it judges, the last of its arguments: Mix, Loader, StreamInMix,
        LoaderSection or StreamSection.
        """
        judged = list(self.find.__annotations__.values())[-2]  # a text in a file of another package
        return str(getattr(judged, "__name__", judged))

    def found(self, streams: Iterable[StreamSection] = (), **looked_at: Any) -> Findings:
        """The findings of the check on a mix or a loader, or on each of the loader's streams.

        Args:
            looked_at: mix and loader, of which a check gets those that its arguments name.
        """
        for stream in streams if self.of.startswith("Stream") else [None]:
            given = looked_at | {"stream": stream}
            asked = given.keys() & self.find.__annotations__.keys()
            for each in self.find(**{name: given[name] for name in asked}):
                if each.id in ("", self.id):
                    named = (stream.name,) if stream else tuple(each.streams)
                    yield replace(
                        each, id=self.id, severity=self.severity, why=self.why, streams=named
                    )


CHECKS: dict[str, Check] = {}
"Id -> check, as they were registered."


def check(severity: Severity, why: str, id: str | None = None) -> Callable[[Finder], Finder]:
    """Registers the function below it by its name, `rows_short` as `rows-short`; `why` is one
    sentence on what training would do. A function that finds what several checks say is registered
    for each, and its findings name theirs.
    """

    def register(find: Finder) -> Finder:
        name = id or find.__name__.replace("_", "-")
        CHECKS[name] = Check(name, severity, why, find)
        return find

    return register


def refusal_message(finding: Finding, loader: LoaderSection) -> str:
    """The sentence with which a refused command ends: what is wrong, what comes of it,
    what to do.
    """
    said = finding.of([loader.label], finding.streams)
    return f"{said.message} {said.why} Fix: {said.fix}"
