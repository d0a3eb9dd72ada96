"""The parts of pages that the code itself tells: commands with their options, from Typer; a
recipe's keys, from its fields; the checks, from their registry.

A page holds each between `<!-- generated: NAME -->` and `<!-- end -->`. `make tables` writes them
anew; tests/test_docs.py fails where a page says something else.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer.main

from mdsmix import recipe
from mdsmix.cli.main import app
from mdsmix.kinds.reasons import list_bad_reasons
from mdsmix.mix.check import list_checks as registered
from mdsmix.record import FILTERED

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / "docs" / name for name in ("commands.md", "recipe.md")),
    *(ROOT / "mdsmix" / room / "README.md" for room in ("mix", "encode")),
]
TOLD_ONCE = ("recipe", "overrides", "as_json", "quiet")
"Parameters of nearly every command: the head of the page tells them."
ON_THE_MIX = ("mix", "budget", "count", "max_repeat", "temperature", "absolute", "train_loader")
"Keys of a recipe that stand in the section on the mix."
NOT_AGAIN = {
    *("Recipe.max_bad", "Recipe.publish", "Recipe.remote", "Recipe.local", "Recipe.shared"),
    *("Recipe.mdsmix_on_nodes", "TokenizerSpec.backend", "SourceSpec.path", "ImagesSpec.root"),
    *("StreamSpec.expected_mean_tokens", "StreamSpec.duplicates", "StreamSpec.split"),
    *("StreamSpec.source", "StreamSpec.remote", "StreamSpec.local"),
    *(f"Recipe.{name}" for name in ON_THE_MIX),
    *("WeightSpec.repeat", "WeightSpec.proportion", "WeightSpec.choose", "WeightSpec.share"),
}
"""Keys whose change converts nothing again; tests/test_docs.py compares them with the keys of work
units.
"""
SECTIONS = {
    "top": [("Recipe", ""), ("TokenizerSpec", "tokenizer.")],
    "source": [("SourceSpec", "")],
    "stream": [("StreamSpec", "")],
    "images": [("ImagesSpec", "")],
    "mix": [("Recipe", ""), ("WeightSpec", "mix.<name>.")],
}
BLOCK = re.compile(r"(<!-- generated: (\w+) ([\w-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def command(name: str) -> Iterator[str]:
    """Usage, help and options of a command; those that another has too are only named."""
    found, shared = _commands()[name], _shared()
    usage = " ".join(str(a.metavar) for a in found.params if a.param_type_name == "argument")
    yield from (f"`mdsmix {name} {usage}`", "", _told(found.help), "")
    named = [each for each in _params(found) if _line(each) not in shared]
    yield from (f"- {_line(each)}" for each in named)
    also = [_named(each) for each in _params(found) if _line(each) in shared and _is_option(each)]
    if also:
        yield f"- {', '.join(also)}: as [above](#everywhere)."


def shared(_: str) -> Iterator[str]:
    """Arguments and options that several commands have."""
    yield from (f"- {line}" for line in _shared())


def _shared() -> list[str]:
    lines = [_line(each) for found in _commands().values() for each in _params(found)]
    return sorted(line for line, times in Counter(lines).items() if times > 1)


def _commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined, no-any-return]


def _params(found: Any) -> list[Any]:
    """Arguments first."""
    return sorted((p for p in found.params if p.name not in TOLD_ONCE), key=_is_option)


def _is_option(each: Any) -> bool:
    return bool(each.param_type_name == "option")


def _line(each: Any) -> str:
    return f"{_named(each)}: {_told(each.help)}{_default(each)}"


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


def reasons(becomes: str) -> Iterator[str]:
    """Why a record becomes no sample."""
    explanations = list_bad_reasons() if becomes == "bad" else FILTERED
    for code, text in explanations.items():
        yield f"- `{code}`: {_told(text)}"


def keys(section: str) -> Iterator[str]:
    """The keys of a section of the recipe: what the fields of its dataclasses say."""
    for name, prefix in SECTIONS[section]:
        told, types = _told_of_fields(name), get_type_hints(getattr(recipe, name))
        for each in fields(getattr(recipe, name)):
            is_here = name != "Recipe" or (each.name in ON_THE_MIX) == (section == "mix")
            if is_here and "set by" not in each.metadata:
                again = "" if f"{name}.{each.name}" in NOT_AGAIN else "**●** "
                what = _whom(each, told[each.name]) + _words(types[each.name], told[each.name])
                yield f"- {again}`{prefix}{each.name}`: {what}{_default_of(each)}"


def _told_of_fields(name: str) -> dict[str, str]:
    """The text below each field of a class."""
    [found] = ast.parse(inspect.getsource(getattr(recipe, name))).body
    assert isinstance(found, ast.ClassDef)
    pairs = zip(found.body, found.body[1:], strict=False)
    return {
        one.target.id: " ".join(text.value.value.split())
        for one, text in pairs
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def _whom(each: Field[Any], told: str) -> str:
    """The text of a key, with the kind of stream to which it means something."""
    whom = each.metadata.get("only of", "")
    return (
        f"{whom.capitalize()}: {told[0].lower()}{told[1:]}"
        if whom and each.name != "images"
        else told
    )


def _words(written: Any, told: str) -> str:
    """The words that a key takes, where its text does not name them."""
    words = [word for one in (written, *get_args(written)) for word in get_args(one)]
    words = [word for word in words if isinstance(word, str) and f"`{word}`" not in told]
    return f" One of {', '.join(f'`{word}`' for word in words)}." if len(words) > 1 else ""


def _default_of(each: Field[Any]) -> str:
    if each.default is MISSING or each.default is None:
        return ""
    if each.default == "\n":
        return " Default: a line break."
    shown = str(each.default).lower() if isinstance(each.default, bool) else each.default
    return f" Default: `{shown}`."


KINDS = {"command": command, "shared": shared, "keys": keys, "checks": checks, "reasons": reasons}


def renewed(page: str) -> str:
    """The page with each generated part as the code tells it today."""
    return BLOCK.sub(lambda m: m[1] + "\n".join(KINDS[m[2]](m[3])) + "\n" + m[4], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(renewed(path.read_text("utf-8")), "utf-8")
