"""The parts of pages that the code itself tells: commands with their options, from Typer; the checks, from their registry.

A page holds each between `<!-- generated: NAME -->` and `<!-- end -->`. `make tables` writes them anew; tests/test_docs.py fails where
a page says something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from mdsmix.cli.main import app
from mdsmix.mix.check import checks as registered
from mdsmix.reasons import BAD, FILTERED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/commands.md", ROOT / "mdsmix/mix/README.md", ROOT / "mdsmix/encode/README.md"]
TOLD_ONCE = ("recipe", "overrides", "as_json", "quiet")
"Parameters that many commands share: the head of the page tells them."
BLOCK = re.compile(r"(<!-- generated: (\w+) ([\w-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def command(name: str) -> Iterator[str]:
    """Usage, help and options of a command."""
    found = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    arguments = [each for each in found.params if each.param_type_name == "argument"]
    options = [each for each in found.params if each.param_type_name == "option"]
    usage = " ".join(str(a.metavar) for a in arguments)
    yield from (f"`mdsmix {name} {usage}`", "", _told(found.help), "")
    for each in (each for each in (*arguments, *options) if each.name not in TOLD_ONCE):
        yield f"- {_named(each)}: {_told(each.help)}{_default(each)}"


def _named(each: Any) -> str:
    if each.param_type_name == "argument":
        return f"`{each.metavar}`"
    *short, last = sorted((*each.opts, *each.secondary_opts), key=len)
    value = "" if each.is_flag else f" {each.metavar or 'N'}"
    return ", ".join(f"`{name}`" for name in (*short, last + value))


def _default(each: Any) -> str:
    shown = getattr(each, "show_default", False)
    if isinstance(shown, str):
        return f" Default: {shown}."
    is_value = (
        shown and isinstance(each.default, (int, float, str)) and not isinstance(each.default, bool)
    )
    return f" Default: `{each.default}`." if is_value else ""


def _told(text: str | None) -> str:
    return " ".join((text or "").split()).replace("<", "&lt;")


def checks(_: str) -> Iterator[str]:
    """What `mdsmix check` looks for, and what would come of it."""
    for each in registered():
        yield f"- `{each.id}`, {each.severity}: {_told(each.why)}"


def reasons(_: str) -> Iterator[str]:
    """Why a record becomes no sample."""
    yield from ("| code | what | becomes |", "|---|---|---|")
    for codes, becomes in ((BAD, "quarantined"), (FILTERED, "filtered")):
        yield from (f"| `{code}` | {_told(text)} | {becomes} |" for code, text in codes.items())


KINDS = {"command": command, "checks": checks, "reasons": reasons}


def renewed(page: str) -> str:
    """The page with each generated part as the code tells it today."""
    return BLOCK.sub(lambda m: m[1] + "\n".join(KINDS[m[2]](m[3])) + "\n" + m[4], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(renewed(path.read_text("utf-8")), "utf-8")
