"""What a rule says, and the registry of all rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.training.sections import LoaderSection

Severity = Literal["error", "warning", "note"]


class Hit(NamedTuple):
    """One thing that is wrong or worth knowing."""

    message: str
    "What is wrong, with both values; `{loader}` stands for the loader's name."
    fix: str
    streams: Sequence[str] = ()
    loader: str = ""
    "Filled in by whoever runs the rule: one finding names all loaders of which the same is said."


Finder = Callable[[LoaderSection], Iterator[Hit]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold of a loader's section."""

    id: str
    severity: Severity
    why: str
    find: Finder


RULES: dict[str, Rule] = {}
"Id -> rule, in the order in which they are checked."


def rule(id: str, severity: Severity, why: str) -> Callable[[Finder], Finder]:
    """Registers the function below it; `why` is one sentence on what training would do."""

    def register(find: Finder) -> Finder:
        RULES[id] = Rule(id, severity, why, find)
        return find

    return register


def refuse(loader: LoaderSection, but: Collection[str] = ()) -> None:
    """RecipeError on the first rule that the section breaks, those named in `but` left out."""
    for rule in RULES.values():
        if rule.severity == "error" and rule.id not in but:
            for hit in rule.find(loader):
                raise RecipeError(refusal(hit, rule.why, loader))


def refusal(hit: Hit, why: str, loader: LoaderSection) -> str:
    """The hit as the end of a command: what is wrong, what comes of it, what to do."""
    return f"{hit.message.replace('{loader}', loader.label)} {why} Fix: {hit.fix}"
