"""Links: a source is read through those that its pattern names, and no command writes through one that lies in its output.

A `**` does not follow links to folders, so that a link to a parent ends. Links to files are followed, as everyone's
caches of downloaded data sets are made of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.abuse.conftest import Arena
from tests.converting import documents, manifest_of, write_jsonl

RECORDS = [{"text": "one two three four five " * 9}] * 9


@pytest.fixture
def recipe(arena: Arena) -> Path:
    write_jsonl(arena.home / "data" / "a.jsonl", RECORDS)
    return arena.recipe(streams={"web": documents("data/**/*.jsonl")})


@pytest.fixture
def elsewhere(arena: Arena) -> Path:
    folder = arena.home.parent / "elsewhere"
    write_jsonl(folder / "b.jsonl", RECORDS)
    return folder


def sources(arena: Arena) -> list[str]:
    paths = [file.path for file in manifest_of(arena.out / "web" / "train").sources]
    assert all(path.startswith("data/") for path in paths), "from the recipe's folder on"
    return [path.removeprefix("data/") for path in paths]


def test_a_link_to_a_file_is_a_source_like_any_other(
    arena: Arena, recipe: Path, elsewhere: Path
) -> None:
    (arena.home / "data" / "b.jsonl").symlink_to(elsewhere / "b.jsonl")
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    assert sources(arena) == ["a.jsonl", "b.jsonl"]


def test_a_link_to_a_folder_is_followed_only_where_the_pattern_names_it(
    arena: Arena, recipe: Path, elsewhere: Path
) -> None:
    (arena.home / "data" / "sub").symlink_to(elsewhere)
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    assert sources(arena) == ["a.jsonl"]
    named = arena.recipe(streams={"web": documents("data/sub/*.jsonl")})
    assert arena.run("convert", named, "--workers", 1, "--reencode").code == 0
    assert sources(arena) == ["sub/b.jsonl"]


def test_links_that_go_round_end(arena: Arena, recipe: Path) -> None:
    (arena.home / "data" / "up").symlink_to("..")
    (arena.home / "data" / "self").symlink_to("self")
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    assert sources(arena) == ["a.jsonl"]
    (arena.home / "data" / "self.jsonl").symlink_to("self.jsonl")
    assert "self.jsonl" in arena.refused("convert", recipe)


def test_a_link_that_leads_nowhere_is_refused(arena: Arena, recipe: Path) -> None:
    """What it led to would be missing from the stream, and nobody would know."""
    (arena.home / "data" / "gone.jsonl").symlink_to("nowhere")
    assert "gone.jsonl: it is a link to" in arena.refused("convert", recipe)


@pytest.mark.parametrize("name", ["web", "web/train", "web/train/.mdsmix", "web/train/quarantine"])
@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_nothing_is_written_through_a_link_in_the_output(
    arena: Arena, recipe: Path, elsewhere: Path, name: str, target: str
) -> None:
    (arena.out / name).parent.mkdir(parents=True)
    (arena.out / name).symlink_to(elsewhere.with_name(target))
    for command in (
        ["convert", recipe],
        ["convert", recipe, "--reencode"],
        ["convert", recipe, "--dry-run"],
    ):
        assert "is a link to" in arena.refused(*command)


def test_a_version_is_not_published_through_a_link(
    arena: Arena, recipe: Path, elsewhere: Path
) -> None:
    command = ["convert", recipe, "--workers", 1, "publish=versioned"]
    assert arena.run(*command, f"local={arena.out / 'first'}").code == 0
    (version,) = (arena.out / "first" / "web").glob("train-*")
    (arena.out / "web").mkdir()
    (arena.out / "web" / version.name).symlink_to(elsewhere)
    assert "is a link to" in arena.refused(*command)
    assert [path.name for path in elsewhere.iterdir()] == ["b.jsonl"]


def test_a_file_in_the_output_that_is_a_link_is_put_in_place_of_the_link(
    arena: Arena, recipe: Path
) -> None:
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    folder = arena.out / "web" / "train"
    victim = arena.home.parent / "precious.jsonl"
    [shard] = folder.glob("*.mds")
    for name in (shard.name, "index.json", "mdsmix.manifest"):
        (folder / name).unlink()
        (folder / name).symlink_to(victim)
    assert arena.run("convert", recipe, "--workers", 1, "--reencode").code == 0
    assert not any((folder / n).is_symlink() for n in (shard.name, "index.json", "mdsmix.manifest"))
    assert arena.run("verify", folder).code == 0


def test_the_folder_that_the_recipe_names_may_be_a_link_itself(arena: Arena, recipe: Path) -> None:
    (arena.home / "out" / "disk").mkdir(parents=True)
    (arena.home / "out" / "link").symlink_to("disk")
    assert arena.run("convert", recipe, "--workers", 1, f"local={arena.out}/link").code == 0
    assert (arena.out / "disk" / "web" / "train" / "index.json").exists()


def test_gc_deletes_nothing_behind_a_link(arena: Arena, recipe: Path, elsewhere: Path) -> None:
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    folder = arena.out / "web" / "train"
    (elsewhere / ("a" * 32 + ".mds")).write_bytes(b"old")
    os.utime(elsewhere / ("a" * 32 + ".mds"), (0, 0))
    (folder / "sub").symlink_to(elsewhere)
    (folder / ".mdsmix" / "old").symlink_to(elsewhere)
    assert arena.run("gc", folder, "--delete").code == 0
