"""Checks and their findings.

A check is a plain function that yields findings about one subject:

- a mix: `find(mix)`,
- one loader of a mix: `find(mix, loader)`,
- one stream of a loader: `find(mix, loader, stream)`,
- the section of a loader in a YAML: `find(section)`,
- one stream of a loader's section: `find(section, stream_section)`.

Checks of a section are called rules: `mdsmix check` reports a broken rule, and `mdsmix.load`
refuses a section that breaks one. Each file of checks has a `CheckList`, to which a decorator adds
the function below it with its id, severity and consequence. The table in the README, the JSON and
the printed line are all made from these lists, so they cannot differ. A finding that several
streams share is printed once, with the names of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from mdsmix.foundry_yaml.training_yaml import LoaderSection
from mdsmix.frozen import frozen

Severity = Literal["error", "warning", "note"]
Subject = Literal["mix", "loader", "stream", "loader section", "stream section"]


@frozen
class Finding:
    """One thing that is wrong or worth knowing. If it is an error, the mix is refused."""

    message: str
    """What is wrong, with both of the values that do not fit. Here and in `fix` a check may write
    the placeholders `{loader}` and `{streams}`, which `with_names` replaces by names.
    """
    fix: str
    "What the user can do."
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
        """Return the finding with the placeholders `{loader}` and `{streams}` in its message and
        fix replaced by these names.
        """
        loader_names = ", ".join(loaders)
        stream_names = tuple(streams)

        def fill(text: str) -> str:
            """Replace the placeholders `{loader}` and `{streams}` in a string by the names."""
            named = text.replace("{loader}", loader_names)
            return named.replace("{streams}", ", ".join(stream_names))

        return replace(self, message=fill(self.message), fix=fill(self.fix), streams=stream_names)


Findings = Iterator[Finding]
Finder = Callable[..., Findings]
"The function of a check, which yields findings about its subject."


@frozen
class Check:
    """One check: its function, and the facts that the README's table shows of it."""

    id: str
    severity: Severity
    why: str
    "One sentence on the consequence for training."
    subject: Subject
    """The kind of subject that the check looks at. The beginning of this file lists the arguments
    of `find` for each kind.
    """
    find: Finder

    def run(self, *arguments: Any, stream: str | None = None) -> Findings:
        """Yield the findings of `find(*arguments)` that belong to this check, with its id, severity
        and consequence filled in.

        Args:
            arguments: the arguments of `find`.
            stream: the name of the stream that is checked; None if the findings name their streams.
        """
        # A function that serves several checks sets the check's id in each finding.
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
    """The checks of one file, as they are printed: the first one first.

    Each method returns a decorator that adds the function below it. A check's id is the function's
    name with hyphens (`rows_short` becomes `rows-short`), unless `id` is given. A function that
    serves several checks has a decorator for each, and sets the check's id in each finding.
    """

    def mix(self, severity: Severity, why: str, id: str | None = None) -> Register:
        """Return a decorator that adds a function as a check of a whole mix. It is called as
        `find(mix)`.
        """
        return self._make_decorator("mix", severity, why, id)

    def loader(self, severity: Severity, why: str, id: str | None = None) -> Register:
        """Return a decorator that adds a function as a check of each loader. It is called as
        `find(mix, loader)`.
        """
        return self._make_decorator("loader", severity, why, id)

    def stream(self, severity: Severity, why: str, id: str | None = None) -> Register:
        """Return a decorator that adds a function as a check of each stream. It is called as
        `find(mix, loader, stream)`.
        """
        return self._make_decorator("stream", severity, why, id)

    def loader_section(self, severity: Severity, why: str, id: str | None = None) -> Register:
        """Return a decorator that adds a function as a rule: a check that looks only at a YAML. It
        is called as `find(section)` with each loader's section.
        """
        return self._make_decorator("loader section", severity, why, id)

    def stream_section(self, severity: Severity, why: str, id: str | None = None) -> Register:
        """Return a decorator that adds a function as a rule: a check that looks only at a YAML. It
        is called as `find(section, stream_section)` with each stream's section.
        """
        return self._make_decorator("stream section", severity, why, id)

    def _make_decorator(
        self, subject: Subject, severity: Severity, why: str, id: str | None
    ) -> Register:
        """Return a decorator that adds the function below it as a check.

        Args:
            subject: what the check looks at. The subject decides which arguments the function gets.
            severity: the severity of its findings.
            why: the consequence for training.
            id: the check's id; None: the function's name with hyphens.
        """

        def add(find: Finder) -> Finder:
            name = id or find.__name__.replace("_", "-")
            self.append(Check(name, severity, why, subject, find))
            return find

        return add


def make_refusal_message(finding: Finding, loader: LoaderSection) -> str:
    """Return the message of a refusal: the problem, its consequence for training, and the fix."""
    named = finding.with_names([loader.label], finding.streams)
    return f"{named.message} {named.why} Fix: {named.fix}"
