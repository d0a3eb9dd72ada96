"""What a look at the surroundings found: one thing, whether it is well, and where it is not, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One thing that a run needs."""

    what: str
    "`versions`, `memory`, `source web`, `target`, ..."
    state: State
    "A problem ends a run; a warning may."
    said: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f" Fix: {self.fix}" if self.fix else ""
        return f"{self.state:<8} {self.what}: {self.said}{fix}"


def ok(what: str, said: str) -> Diagnosis:
    return Diagnosis(what=what, state="ok", said=said)


def warning(what: str, said: str, fix: str) -> Diagnosis:
    return Diagnosis(what=what, state="warning", said=said, fix=fix)


def problem(what: str, said: str, fix: str = "") -> Diagnosis:
    """`fix` is blank where the sentence already says what to do, as those of errors do."""
    return Diagnosis(what=what, state="problem", said=said, fix=fix)
