"""Checks and their findings.

A check is a plain function that yields findings about one subject:

- a mix: `find(mix)`,
- one loader of a mix: `find(mix, loader)`,
- one stream of a loader: `find(mix, loader, stream)`,
- the section of a loader in a YAML: `find(section)`,
- one stream of such a section: `find(section, stream_section)`.

Checks of the last two are called rules: `mdsmix check` reports a broken rule, `mdsmix.load` refuses
it. Each file of checks has a `CheckList`, to which a decorator adds the function below it with its
id, severity and consequence. The table in the README, the JSON and the printed line are all made
from that list, so they cannot differ. A finding that several streams share is printed once and
names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mdsmix.foundry_yaml.training_yaml import LoaderSection

Severity = Literal["error", "warning", "note"]
Subject = Literal["mix", "loader", "stream", "loader section", "stream section"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or worth knowing. If it is an error, the mix is refused."""

    message: str
    """What is wrong, with both of the values that do not fit. A check writes the placeholders
    `{loader}` and `{streams}` here and in the fix; `with_names` fills the names in.
    """
    fix: str
    streams: Sequence[str] = ()
    id: str = ""
    """The check's id. A function that serves several checks sets it. Otherwise the check fills it
    in, together with `severity` and `why`.
    """
    severity: Severity = "note"
    why: str = ""

    def __str__(self) -> str:
        whose = f" [{', '.join(self.streams)}]" if self.streams else ""
        return f"{self.severity} {self.id}{whose}: {self.message} {self.why} Fix: {self.fix}"

    def with_names(self, loaders: Iterable[str], streams: Iterable[str]) -> Finding:
        """Fill in the names of these loaders and streams."""
        loader_names = ", ".join(loaders)
        stream_names = tuple(streams)

        def fill(text: str) -> str:
            """Replace the placeholders in a text."""
            named = text.replace("{loader}", loader_names)
            return named.replace("{streams}", ", ".join(stream_names))

        return replace(self, message=fill(self.message), fix=fill(self.fix), streams=stream_names)


Findings = Iterator[Finding]
Finder = Callable[..., Findings]
"The function of a check, which yields findings about its subject."


@dataclass(frozen=True)
class Check:
    """One row of the README's table."""

    id: str
    severity: Severity
    why: str
    "One sentence on the consequence for training."
    subject: Subject
    """The kind of subject that it checks. It decides on the arguments of `find`, which the
    beginning of this file lists.
    """
    find: Finder

    @property
    def is_rule(self) -> bool:
        """Whether it checks a section of a YAML, without opening any stream."""
        return self.subject in ("loader section", "stream section")

    def run(self, *arguments: Any, stream: str | None = None) -> Findings:
        """Yield the findings of `find(*arguments)` that belong to this check, with its id, severity
        and consequence filled in.

        Args:
            arguments: the arguments of `find`.
            stream: the name of the stream that is checked; None if the findings name their streams.
        """
        for finding in self.find(*arguments):
            if finding.id in ("", self.id):
                yield replace(
                    finding,
                    id=self.id,
                    severity=self.severity,
                    why=self.why,
                    streams=tuple(finding.streams) if stream is None else (stream,),
                )

    def run_rule(self, section: LoaderSection) -> Findings:
        """Yield the findings of a rule on a section, or on each stream of the section."""
        if self.subject == "loader section":
            yield from self.run(section)
        else:
            for stream in section.stream_sections:
                yield from self.run(section, stream, stream=stream.name)


Register = Callable[[Finder], Finder]
"A decorator that adds a function to a CheckList and returns it unchanged."


class CheckList(list[Check]):
    """The checks of one file, in the order in which they are printed.

    Each method returns a decorator that adds the function below it. A check's id is the function's
    name with hyphens (`rows_short` becomes `rows-short`), unless `id` is given. A function that
    serves several checks is added once for each, and its findings name their check's id.
    """

    def mix(self, severity: Severity, why: str, id: str | None = None) -> Register:
        """Add a check of a mix: `find(mix)`."""
        return self._adder("mix", severity, why, id)

    def loader(self, severity: Severity, why: str, id: str | None = None) -> Register:
        """Add a check of a loader: `find(mix, loader)`."""
        return self._adder("loader", severity, why, id)

    def stream(self, severity: Severity, why: str, id: str | None = None) -> Register:
        """Add a check of a stream: `find(mix, loader, stream)`."""
        return self._adder("stream", severity, why, id)

    def loader_section(self, severity: Severity, why: str, id: str | None = None) -> Register:
        """Add a rule of a loader's section: `find(section)`."""
        return self._adder("loader section", severity, why, id)

    def stream_section(self, severity: Severity, why: str, id: str | None = None) -> Register:
        """Add a rule of a stream's section: `find(section, stream_section)`."""
        return self._adder("stream section", severity, why, id)

    def _adder(self, subject: Subject, severity: Severity, why: str, id: str | None) -> Register:
        """Return a decorator that adds its function as a check.

        Args:
            subject: what the check is about. It decides on the arguments of the function.
            severity: the severity of its findings.
            why: the consequence for training.
            id: the check's id; None: the function's name with hyphens.
        """

        def add(find: Finder) -> Finder:
            name = id or find.__name__.replace("_", "-")
            self.append(Check(name, severity, why, subject, find))
            return find

        return add


def refusal_message(finding: Finding, loader: LoaderSection) -> str:
    """Return the message of a refusal: the problem, its consequence for training, and the fix."""
    named = finding.with_names([loader.label], finding.streams)
    return f"{named.message} {named.why} Fix: {named.fix}"
