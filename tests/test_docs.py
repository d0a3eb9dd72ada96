"""The pages that people read say what is there: links lead somewhere, keys and options are all named. What they show is run by tests/docs."""

import dataclasses
import re
import runpy
from pathlib import Path

import typer.main

from mdsmix.cli.main import app
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, TokenizerSpec
from mdsmix.recipe.stream_spec import ImagesSpec

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "mdsmix", "tests", "benchmarks")
PAGES = [ROOT / "README.md", *(page for f in FOLDERS for page in sorted((ROOT / f).rglob("*.md")))]


def test_every_link_inside_leads_to_a_file() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text("utf-8"))
        if not (page.parent / link).exists()
    ]
    assert lost == []


def test_every_key_of_a_recipe_is_explained() -> None:
    named = set(re.findall(r"`\.?([\w.<>]+)`", (ROOT / "docs/recipe.md").read_text("utf-8")))
    explained = {"streams", "mix", "source", "name", "kwargs"}  # by their own keys
    for section, prefix in (
        (Recipe, ""),
        (TokenizerSpec, "tokenizer."),
        (StreamSpec, "streams.<name>."),
        (SourceSpec, "streams.<name>.source."),
        (ImagesSpec, "streams.<name>.images."),
    ):
        keys = {f.name for f in dataclasses.fields(section) if not f.metadata} - explained
        assert [k for k in keys if not named & {f"{prefix}{k}", k}] == []


def test_every_command_that_is_named_is_one() -> None:
    """In sentences and tables too: `mdsmix plan --nodes 2` is a command with such an option."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {
        name: {o for p in c.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-", "--"}
        for name, c in commands.items()
    }
    for page in PAGES:
        for words in re.findall(r"`mdsmix ([a-z][^`\n]*)`", page.read_text("utf-8")):
            name, *others = words.split()
            options = {w.strip("[]().,:").split("=")[0] for w in others if w.startswith(("-", "[-"))}  # fmt: skip
            assert name in commands, (page, words)
            assert options <= known[name], (page, words)


def test_what_the_code_tells_stands_in_the_pages_as_it_tells_it() -> None:
    """`make tables` writes these parts."""
    tables = runpy.run_path(str(ROOT / "docs/site/tables.py"))
    for page in tables["PAGES"]:
        assert tables["renewed"](page.read_text("utf-8")) == page.read_text("utf-8"), page


def test_every_command_has_its_part_of_the_page() -> None:
    page = (ROOT / "docs/commands.md").read_text("utf-8")
    told = re.findall("<!-- generated: command ([a-z-]+) -->", page)
    assert sorted(told) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
