"""What a check says, and the registry of all checks.

A check is a plain function: a Mix, or one loader or one stream of it, in; hits out. Its id, its severity and the reason why it
matters are stated once, at its registration, so that the README's table, the JSON and the printed line cannot differ. The
rules on a loader's section, which `mdsmix.load` holds too, are checks as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps

from mdsmix.mix.streams import Loader, Mix, Stream
from mdsmix.training.rules import Hit, Rule, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong or worth knowing. An error refuses the mix."""

    id: str
    severity: Severity
    streams: tuple[str, ...]
    message: str
    "What is wrong, with both values."
    why: str
    fix: str

    def __str__(self) -> str:
        whose = f" [{', '.join(self.streams)}]" if self.streams else ""
        return f"{self.severity} {self.id}{whose}: {self.message} {self.why} Fix: {self.fix}"


Finder = Callable[[Mix], Iterator[Hit]]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the README's table."""

    id: str
    severity: Severity
    why: str
    find: Finder

    def __call__(self, mix: Mix) -> Iterator[Finding]:
        found: dict[tuple[tuple[str, ...], str, str], list[str]] = {}
        for hit in self.find(mix):
            found.setdefault((tuple(hit.streams), hit.message, hit.fix), []).append(hit.loader)
        for (streams, message, fix), loaders in found.items():
            yield Finding(
                id=self.id,
                severity=self.severity,
                streams=streams,
                message=message.replace("{loader}", ", ".join(dict.fromkeys(loaders))),
                why=self.why,
                fix=fix,
            )


CHECKS: dict[str, Check] = {}
"Id -> check, in the order in which they are run and printed."


def check(id: str, severity: Severity, why: str) -> Callable[[Finder], Finder]:
    """Registers the function below it; `why` is one sentence on what training would do."""

    def register(find: Finder) -> Finder:
        CHECKS[id] = Check(id, severity, why, find)
        return find

    return register


def check_loaders(
    id: str, severity: Severity, why: str
) -> Callable[[Callable[[Mix, Loader], Iterable[Hit]]], Finder]:
    """The same for a function on one loader of a mix."""

    def register(find: Callable[[Mix, Loader], Iterable[Hit]]) -> Finder:
        @wraps(find)
        def find_all(mix: Mix) -> Iterator[Hit]:
            for loader in mix.loaders:
                for hit in find(mix, loader):
                    yield hit._replace(loader=loader.label)

        return check(id, severity, why)(find_all)

    return register


def check_streams(
    id: str, severity: Severity, why: str
) -> Callable[[Callable[[Mix, Loader, Stream], Iterable[Hit]]], Finder]:
    """The same for a function on one stream of a loader, which its hits are on."""

    def register(find: Callable[[Mix, Loader, Stream], Iterable[Hit]]) -> Finder:
        @wraps(find)
        def find_all(mix: Mix, loader: Loader) -> Iterator[Hit]:
            for stream in loader.streams:
                for hit in find(mix, loader, stream):
                    yield hit._replace(streams=[stream.name])

        return check_loaders(id, severity, why)(find_all)

    return register


def check_rule(rule: Rule) -> None:
    """Registers a rule on sections. Streams that were named alone have no section of a loader to judge."""

    @wraps(rule.find)
    def find_all(mix: Mix, loader: Loader) -> Iterable[Hit]:
        return () if mix.is_bare else rule.find(loader)

    check_loaders(rule.id, rule.severity, rule.why)(find_all)


def names(streams: Iterable[Stream]) -> list[str]:
    return [stream.name for stream in streams]


def listed(streams: Iterable[Stream]) -> str:
    """The streams as a sentence names them."""
    return ", ".join(names(streams))
