"""What a pattern may match: pipes, devices, names that would steer a terminal, and links: a source is read through those that its pattern names, and no command writes through one that lies in its output.

A `**` does not follow links to folders, so that a link to a parent ends. Links to files are followed, as everyone's
caches of downloaded data sets are made of them."""

import os
from pathlib import Path

import pytest

from tests.abuse.conftest import Arena
from tests.converting import documents, manifest_of, quarantined, write_jsonl

RECORDS = [{"text": "one two three four five " * 9}] * 9
REFUSED = {
    "data/pipe.jsonl": "it is a pipe, a socket or a device",
    "data/*.jsonl": "it is a pipe, a socket or a device",
    "zero.jsonl": "it is a pipe, a socket or a device",
    "folders/*.jsonl": "matches no file",
    "folders/**/*.jsonl": "matches no file",
    "/*/nothing-*.jsonl": "matches no file",
    "/dev/*": "",
    "/proc/self/fd/*": "",
    "a\0.jsonl": "",
    "data/*\0.jsonl": "",
}
"Path of a source -> a part of the sentence. A pipe keeps nobody waiting, and /dev/zero is not read for ever."


def recipe_of(arena: Arena, path: object) -> Path:
    return arena.recipe(streams={"web": documents(path)})


def test_a_path_that_names_no_file_of_records_is_refused(arena: Arena) -> None:
    write_jsonl(arena.home / "data" / "a.jsonl", RECORDS)
    os.mkfifo(arena.home / "data" / "pipe.jsonl")
    (arena.home / "zero.jsonl").symlink_to("/dev/zero")
    (arena.home / "folders" / "a.jsonl" / "b.jsonl").mkdir(parents=True)
    for path, said in REFUSED.items():
        assert said in arena.refused("convert", recipe_of(arena, path)), path
    for extra in (["--limit", 3], ["--dry-run"]):
        assert "a pipe" in arena.refused("convert", recipe_of(arena, "data/*.jsonl"), *extra)
    for command in ("verify", "inspect", "check", "gc"):
        assert arena.refused(command, "a\0b")


NAMES = ["a\nb.jsonl", "\x1b]0;owned\x07.jsonl", "a b'\"$(id).jsonl", "-rf.jsonl", "é\u202e.jsonl"]


def test_a_name_steers_neither_a_shell_nor_a_terminal(arena: Arena) -> None:
    for name in NAMES:
        write_jsonl(arena.home / "data" / "c.jsonl" / name, [*RECORDS, {"no": "text"}])
    recipe = recipe_of(arena, "data/**/*.jsonl")
    assert arena.run("convert", recipe, "--workers", 1).code == 0
    folder, read = arena.out / "web" / "train", {f"data/c.jsonl/{name}" for name in NAMES}
    assert {file.path for file in manifest_of(folder).sources} == read
    assert {bad["file"] for bad in quarantined(folder)} == read
    for name in NAMES:
        for arguments in (
            ("convert", recipe, "--only", name),
            ("verify", f"no {name}"),
            ("check", f"no {name}"),
        ):
            answer = arena.run(*arguments)
            assert answer.code in (2, 4)
            assert answer.err.rstrip("\n").isprintable(), answer.err


@pytest.fixture
def recipe(arena: Arena) -> Path:
    write_jsonl(arena.home / "data" / "a.jsonl", RECORDS)
    return arena.recipe(streams={"web": documents("data/**/*.jsonl")})


@pytest.fixture
def elsewhere(arena: Arena) -> Path:
    folder = arena.home.parent / "elsewhere"
    write_jsonl(folder / "b.jsonl", RECORDS)
    return folder


def convert(arena: Arena, recipe: Path, *settings: str) -> Path:
    assert arena.run("convert", recipe, "--workers", 1, *settings).code == 0
    return arena.out / "web" / "train"


def sources(folder: Path) -> list[str]:
    return [file.path for file in manifest_of(folder).sources]


def test_a_link_to_a_file_is_a_source_and_one_to_a_folder_where_the_pattern_names_it(
    arena: Arena, recipe: Path, elsewhere: Path
) -> None:
    data = arena.home / "data"
    (data / "b.jsonl").symlink_to(elsewhere / "b.jsonl")
    (data / "sub").symlink_to(elsewhere)
    (data / "up").symlink_to("..")
    (data / "self").symlink_to("self")
    assert sources(convert(arena, recipe)) == ["data/a.jsonl", "data/b.jsonl"]
    named = arena.recipe(streams={"web": documents("data/sub/*.jsonl")})
    assert sources(convert(arena, named, "--reencode")) == ["data/sub/b.jsonl"]
    recipe = arena.recipe(streams={"web": documents("data/**/*.jsonl")})
    # What it leads to would be missing from the stream, and nobody would know.
    for name, target, said in (
        ("self.jsonl", "self.jsonl", "self.jsonl"),
        ("gone.jsonl", "nowhere", "gone.jsonl: it is a link to"),
    ):
        (data / name).symlink_to(target)
        assert said in arena.refused("convert", recipe)
        (data / name).unlink()


def test_nothing_is_written_through_a_link_in_the_output(
    arena: Arena, recipe: Path, elsewhere: Path
) -> None:
    for name in ("web", "web/train", "web/train/.mdsmix", "web/train/quarantine"):
        link = arena.out / name
        link.parent.mkdir(parents=True, exist_ok=True)
        for target in ("elsewhere", "nowhere"):
            link.symlink_to(elsewhere.with_name(target))
            for option in ([], ["--reencode"], ["--dry-run"]):
                assert "is a link to" in arena.refused("convert", recipe, *option), name
            link.unlink()


def test_a_version_is_not_published_through_a_link(
    arena: Arena, recipe: Path, elsewhere: Path
) -> None:
    convert(arena, recipe, "publish=versioned", f"local={arena.out / 'first'}")
    (version,) = (arena.out / "first" / "web").glob("train-*")
    (arena.out / "web").mkdir()
    (arena.out / "web" / version.name).symlink_to(elsewhere)
    command = ["convert", recipe, "--workers", 1, "publish=versioned"]
    assert "is a link to" in arena.refused(*command)
    assert [path.name for path in elsewhere.iterdir()] == ["b.jsonl"]


def test_a_file_in_the_output_that_is_a_link_is_put_in_place_of_the_link(
    arena: Arena, recipe: Path
) -> None:
    folder = convert(arena, recipe)
    [shard] = folder.glob("*.mds")
    links = [shard, folder / "index.json", folder / "mdsmix.manifest"]
    for link in links:
        link.unlink()
        link.symlink_to(arena.home.parent / "precious.jsonl")
    convert(arena, recipe, "--reencode")
    assert not any(link.is_symlink() for link in links)
    assert arena.run("verify", folder).code == 0


def test_a_target_that_is_a_link_is_followed_and_gc_deletes_nothing_behind_one(
    arena: Arena, recipe: Path, elsewhere: Path
) -> None:
    (arena.out / "disk").mkdir(parents=True)
    (arena.out / "link").symlink_to("disk")
    convert(arena, recipe, f"local={arena.out}/link")
    folder, old = arena.out / "disk" / "web" / "train", elsewhere / ("a" * 32 + ".mds")
    assert (folder / "index.json").exists()
    old.write_bytes(b"old")
    os.utime(old, (0, 0))
    (folder / "sub").symlink_to(elsewhere)
    (folder / ".mdsmix" / "old").symlink_to(elsewhere)
    assert arena.run("gc", folder, "--delete").code == 0
