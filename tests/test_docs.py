"""The pages that people read say what is there: links lead somewhere, keys and options are all named. What they show is run by tests/docs."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import typer.main

from mdsmix.cli.main import app
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, TokenizerSpec
from mdsmix.recipe.stream_spec import ImagesSpec

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "mdsmix", "tests", "benchmarks")
PAGES = [ROOT / "README.md", *(page for f in FOLDERS for page in sorted((ROOT / f).rglob("*.md")))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_inside_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("section", "prefix"),
    [
        (Recipe, ""),
        (TokenizerSpec, "tokenizer."),
        (StreamSpec, "streams.<name>."),
        (SourceSpec, "streams.<name>.source."),
        (ImagesSpec, "streams.<name>.images."),
    ],
)
def test_every_key_of_a_recipe_is_explained(section: type, prefix: str) -> None:
    page = (ROOT / "docs/recipe.md").read_text("utf-8")
    named = set(re.findall(r"`\.?([\w.<>]+)`", page))
    keys = [f.name for f in dataclasses.fields(section) if not f.metadata]
    left = {"streams", "mix", "source", "name", "kwargs"}  # explained by their own keys
    assert [k for k in keys if k not in left and not named & {f"{prefix}{k}", k}] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_named_is_one(page: Path) -> None:
    """In sentences and tables too: `mdsmix plan --nodes 2` is a command with such an option."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for words in re.findall(r"`mdsmix ([a-z][^`\n]*)`", page.read_text("utf-8")):
        name, *others = words.split()
        assert name in commands, words
        has = {
            o for option in commands[name].params for o in (*option.opts, *option.secondary_opts)
        }
        options = [
            word.strip("[]().,:").split("=")[0] for word in others if word.startswith(("-", "[-"))
        ]
        assert [o for o in options if o not in {*has, "--help", "-", "--"}] == [], words


def test_what_the_code_tells_stands_in_the_pages_as_it_tells_it() -> None:
    """`make tables` writes these parts."""
    tables = runpy.run_path(str(ROOT / "docs/site/tables.py"))
    for page in tables["PAGES"]:
        assert tables["renewed"](page.read_text("utf-8")) == page.read_text("utf-8"), page


def test_every_command_has_its_part_of_the_page() -> None:
    page = (ROOT / "docs/commands.md").read_text("utf-8")
    told = re.findall("<!-- generated: command ([a-z-]+) -->", page)
    assert sorted(told) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
