"""The parts of pages that are made from the code: commands with their options, from Typer; a
recipe's keys, from its fields; the checks and reason codes, from their tables; the stops of a
conversion; and which tests belong to which package.

A page has each between `<!-- generated: KIND NAME -->` and `<!-- end -->`. `make tables` writes
them again; tests/test_docs.py fails if a page differs.
"""

from __future__ import annotations

import re
import runpy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer.main

from mdsmix import recipe
from mdsmix.cli.commands import make_app
from mdsmix.json_schema import describe_field
from mdsmix.kinds.reasons import list_bad_reasons
from mdsmix.kinds.recipe_schema import SCHEMA_FILE, write_schema
from mdsmix.mix.check import list_checks
from mdsmix.record import FILTERED

ROOT = Path(__file__).parents[2]
TROUBLES = runpy.run_path(str(ROOT / "docs/site/troubles.py"))
STOPS = runpy.run_path(str(ROOT / "docs/site/stops.py"))
PAGES = [
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("commands", "recipe", "conversion-path", "troubles")
    ),
    *(ROOT / "mdsmix" / package / "README.md" for package in ("mix", "encode")),
    ROOT / "tests/README.md",
]
DESCRIBED_ONCE = ("recipe", "overrides", "as_json", "quiet")
"Parameters of nearly every command, which the head of the page describes."
MIX_KEYS = (
    *("mix", "budget", "count", "max_repeat", "phases", "phase", "temperature", "absolute"),
    "train_loader",
)
"Keys of a recipe that are listed in the section on the mix."
NOT_CONVERTED_AGAIN = {
    *("Recipe.max_bad", "Recipe.publish", "Recipe.remote", "Recipe.local", "Recipe.shared"),
    *("Recipe.mdsmix_on_nodes", "TokenizerSpec.backend", "SourceSpec.path", "ImagesSpec.root"),
    *("StreamSpec.expected_mean_tokens", "StreamSpec.duplicates", "StreamSpec.split"),
    *("StreamSpec.source", "StreamSpec.remote", "StreamSpec.local"),
    *(f"Recipe.{name}" for name in MIX_KEYS),
    *("WeightSpec.repeat", "WeightSpec.proportion", "WeightSpec.choose", "WeightSpec.share"),
    "WeightSpec.max_repeat",
    *("PhaseSpec.budget", "PhaseSpec.mix", "PhaseSpec.max_repeat", "PhaseSpec.shuffle_seed"),
}
"""Keys that can be changed without converting anything again; tests/test_docs.py compares them with
the keys of work units.
"""
SECTIONS = {
    "top": [("Recipe", ""), ("TokenizerSpec", "tokenizer.")],
    "source": [("SourceSpec", "")],
    "stream": [("StreamSpec", "")],
    "images": [("ImagesSpec", "")],
    "mix": [("Recipe", ""), ("WeightSpec", "mix.<name>."), ("PhaseSpec", "phases.<name>.")],
}
BLOCK = re.compile(r"(<!-- generated: (\w+) ([\w-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def describe_command(name: str) -> Iterator[str]:
    """Yield the usage, help and options of a command. Options that other commands have too are only
    named.
    """
    command = _commands()[name]
    shared = _shared_lines()
    usage = " ".join(str(a.metavar) for a in command.params if a.param_type_name == "argument")
    yield f"`mdsmix {name} {usage}`"
    yield ""
    yield _one_line(command.help)
    yield ""
    options_elsewhere = []
    for parameter in _parameters(command):
        line = _parameter_line(parameter)
        if line not in shared:
            yield f"- {line}"
        elif _is_option(parameter):
            options_elsewhere.append(_parameter_name(parameter))
    if options_elsewhere:
        yield f"- {', '.join(options_elsewhere)}: as [above](#everywhere)."


def describe_shared(_: str) -> Iterator[str]:
    """Yield the arguments and options that several commands have."""
    yield from (f"- {line}" for line in _shared_lines())


def _shared_lines() -> list[str]:
    lines = Counter[str]()
    for command in _commands().values():
        lines.update(_parameter_line(parameter) for parameter in _parameters(command))
    return sorted(line for line, count in lines.items() if count > 1)


def _commands() -> dict[str, Any]:
    return typer.main.get_command(make_app()).commands  # type: ignore[attr-defined, no-any-return]


def _parameters(command: Any) -> list[Any]:
    """Return the parameters to describe, arguments before options."""
    described = [p for p in command.params if p.name not in DESCRIBED_ONCE]
    return sorted(described, key=_is_option)


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _parameter_line(parameter: Any) -> str:
    name = _parameter_name(parameter)
    return f"{name}: {_one_line(parameter.help)}{_parameter_default(parameter)}"


def _parameter_name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    *short, long = sorted((*parameter.opts, *parameter.secondary_opts), key=len)
    value = "" if parameter.is_flag else f" {parameter.metavar or 'N'}"
    return ", ".join(f"`{name}`" for name in (*short, long + value))


def _parameter_default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", False)
    if isinstance(shown, str):
        return f" Default: {shown}."
    default = parameter.default
    is_value = isinstance(default, (int, float, str)) and not isinstance(default, bool)
    return f" Default: `{default}`." if shown and is_value else ""


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("<", "&lt;")


def describe_checks(_: str) -> Iterator[str]:
    """Yield each check with its severity and what happens if it is ignored."""
    for check in list_checks():
        yield f"- `{check.id}`, {check.severity}: {_one_line(check.why)}"


def describe_reasons(fate: str) -> Iterator[str]:
    """Yield the reason codes of bad records (`bad`) or of filtered ones."""
    explanations = list_bad_reasons() if fate == "bad" else FILTERED
    for code, text in explanations.items():
        yield f"- `{code}`: {_one_line(text)}"


def describe_keys(section: str) -> Iterator[str]:
    """Yield the keys of a section of the recipe, from the fields of its dataclasses."""
    for class_name, prefix in SECTIONS[section]:
        spec = getattr(recipe, class_name)
        types = get_type_hints(spec)
        for field in fields(spec):
            is_here = class_name != "Recipe" or (field.name in MIX_KEYS) == (section == "mix")
            if not is_here or "set by" in field.metadata:
                continue
            text = describe_field(spec, field)
            mark = "" if f"{class_name}.{field.name}" in NOT_CONVERTED_AGAIN else "**●** "
            description = text + _list_values(types[field.name], text)
            yield f"- {mark}`{prefix}{field.name}`: {description}{_field_default(field)}"


def _list_values(annotation: Any, text: str) -> str:
    """Return the values that a key takes, if its text does not name them."""
    values = []
    for part in (annotation, *get_args(annotation)):
        for value in get_args(part):
            if isinstance(value, str) and f"`{value}`" not in text:
                values.append(value)
    return f" One of {', '.join(f'`{value}`' for value in values)}." if len(values) > 1 else ""


def _field_default(field: Field[Any]) -> str:
    default = field.default
    if default is MISSING or default is None:
        return ""
    if default == "\n":
        return " Default: a line break."
    shown = str(default).lower() if isinstance(default, bool) else default
    return f" Default: `{shown}`."


def describe_stops(_: str) -> Iterator[str]:
    """Yield the table of the stops of a conversion."""
    yield from STOPS["list_rows"]()


TESTS_OF_SEVERAL = {
    "abuse": "sources shards recipe",
    "browser": "report",
    "docs": "cli",
    "e2e": "conversion storage sources",
    "exporting": "exporting",
    "foundry": "encode kinds load",
    "package": "cli",
    "ray": "engines",
    "stores": "storage",
    "today": "tokenizer load",
    "vocabularies": "tokenizer encode",
    "test_conversion_budget": "conversion estimate",
    "test_docs": "cli recipe",
    "test_earlier": "conversion shards",
    "test_structure": "",
    "test_extensions": "shapes sources shards",
    "test_mix_plan": "mix estimate",
    "test_recipe_changed": "mix recipe",
    "test_rules": "foundry_yaml mix",
    "with_torch/test_cache_window": "mix load",
    "with_torch/test_golden_rows": "kinds encode",
    "with_torch/test_preferences": "kinds shapes",
    "with_torch/test_prompts": "kinds shapes",
    "with_torch/test_unpaired_preferences": "kinds shapes",
    "with_torch/test_starters": "cli",
    "with_torch/test_tokenizers": "tokenizer encode",
    "with_torch/test_transformers_five": "tokenizer processor",
    "with_torch/test_whole_way": "cli conversion load",
    "with_torch/test_processor_proof": "processor",
}
"Folders and files of tests whose names do not begin with their package -> their packages."


def describe_tests(_: str) -> Iterator[str]:
    """Yield a table of the packages with the files of their tests.

    Raises LookupError if a test file belongs to no package.
    """
    tests_by_package = defaultdict[str, dict[str, None]](dict)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        folder = name.partition("/")[0]
        link = f"[{name.replace('test_', '')}]({name}.py)"
        if folder != name and folder in TESTS_OF_SEVERAL:
            link = f"`{folder}/`"
        for package in _packages_of_test(name):
            tests_by_package[package][link] = None
    yield "| package | tests |"
    yield "|---|---|"
    for package, tests in sorted(tests_by_package.items()):
        readme = ROOT / "mdsmix" / package / "README.md"
        name = f"[{package}](../mdsmix/{package}/README.md)" if readme.is_file() else package
        yield f"| {name} | {', '.join(tests)} |"


def _packages_of_test(name: str) -> list[str]:
    folder = name.partition("/")[0]
    for key in (name, folder):
        if key in TESTS_OF_SEVERAL:
            return TESTS_OF_SEVERAL[key].split()
    words = name.rpartition("/")[2].removeprefix("test_").split("_")
    for count in range(len(words), 0, -1):
        package = "_".join(words[:count])
        folder_path = ROOT / "mdsmix" / package
        if folder_path.is_dir() or folder_path.with_suffix(".py").is_file():
            return [package]
    raise LookupError(f"tests/{name}.py belongs to no package: add it to TESTS_OF_SEVERAL")


DESCRIPTIONS: dict[str, Callable[[str], Iterator[str]]] = {
    "command": describe_command,
    "shared": describe_shared,
    "keys": describe_keys,
    "checks": describe_checks,
    "reasons": describe_reasons,
    "exits": lambda _: TROUBLES["describe_exit_codes"](),
    "refusals": TROUBLES["describe_refusals"],
    "fixes": TROUBLES["describe_reasons_with_fixes"],
    "findings": TROUBLES["describe_findings"],
    "stores": TROUBLES["describe_store_errors"],
    "stops": describe_stops,
    "tests": describe_tests,
}


def renew_page(page: str) -> str:
    """Return the page with each generated part as the code gives it now."""

    def renew_block(block: re.Match[str]) -> str:
        lines = DESCRIPTIONS[block[2]](block[3])
        return block[1] + "\n".join(lines) + "\n" + block[4]

    return BLOCK.sub(renew_block, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(renew_page(path.read_text("utf-8")), "utf-8")
    (ROOT / "yamls" / SCHEMA_FILE).write_text(write_schema(), "utf-8")
    STOPS["PICTURE"].write_text(STOPS["draw"](), "utf-8")
