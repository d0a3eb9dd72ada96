"""What a check says, and the registry of all checks.

A check is a plain function: a Mix in, hits out. Its id, its severity and the reason why it matters are stated once, at
its registration, so that the README's table, the JSON and the printed line cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mdsmix.mix.streams import Mix

Severity = Literal["error", "warning", "note"]


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


class Hit(NamedTuple):
    """What a check's function yields; the registration adds the rest of the finding."""

    streams: Sequence[str]
    message: str
    fix: str
    loader: str = ""
    "What `{loader}` in the message stands for: one finding names all loaders of which the same is said."


Look = Callable[[Mix], Iterator[Hit]]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the README's table."""

    id: str
    severity: Severity
    why: str
    look: Look

    def __call__(self, mix: Mix) -> Iterator[Finding]:
        found: dict[tuple[tuple[str, ...], str, str], list[str]] = {}
        for hit in self.look(mix):
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


def check(id: str, severity: Severity, why: str) -> Callable[[Look], Look]:
    """Registers the function below it; `why` is one sentence on what training would do."""

    def register(look: Look) -> Look:
        CHECKS[id] = Check(id, severity, why, look)
        return look

    return register


def does(things: Sized, one: str = "does", more: str = "do") -> str:
    """The verb of what is listed."""
    return one if len(things) == 1 else more


def spelled(value: object) -> str:
    """The value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def names(streams: Iterable[object]) -> list[str]:
    return [str(getattr(stream, "name", stream)) for stream in streams]
