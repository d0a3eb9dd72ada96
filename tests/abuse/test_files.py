"""What a pattern may match that is no file of records: pipes, devices, folders, names that would steer a terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.abuse.conftest import Arena
from tests.converting import documents, manifest_of, quarantined, write_jsonl

RECORDS = [{"text": "one two three four five " * 9}] * 9


def recipe_of(arena: Arena, path: object) -> Path:
    return arena.recipe(streams={"web": documents(path)})


@pytest.mark.parametrize("path", ["data/*.jsonl", "data/pipe.jsonl"])
def test_a_pipe_keeps_nobody_waiting(arena: Arena, path: str) -> None:
    (arena.home / "data").mkdir()
    os.mkfifo(arena.home / "data" / "pipe.jsonl")
    write_jsonl(arena.home / "data" / "a.jsonl", RECORDS)
    for extra in ([], ["--limit", 3], ["--dry-run"]):
        refusal = arena.refused("convert", recipe_of(arena, path), *extra)
        assert "it is a pipe, a socket or a device" in refusal


def test_a_device_behind_a_link_is_not_read_for_ever(arena: Arena) -> None:
    (arena.home / "zero.jsonl").symlink_to("/dev/zero")
    refusal = arena.refused("convert", recipe_of(arena, "zero.jsonl"))
    assert "it is a pipe, a socket or a device" in refusal


def test_folders_are_no_files_whatever_they_are_called(arena: Arena) -> None:
    (arena.home / "data" / "a.jsonl" / "b.jsonl").mkdir(parents=True)
    assert "matches no file" in arena.refused("convert", recipe_of(arena, "data/*.jsonl"))
    assert "matches no file" in arena.refused("convert", recipe_of(arena, "data/**/*.jsonl"))
    write_jsonl(arena.home / "data" / "a.jsonl" / "c.jsonl", RECORDS)
    assert arena.run("convert", recipe_of(arena, "data/**/*.jsonl"), "--workers", 1).code == 0
    assert [f.path for f in manifest_of(arena.out / "web/train").sources] == [
        "data/a.jsonl/c.jsonl"
    ]


NAMES = ["a\nb.jsonl", "\x1b]0;owned\x07.jsonl", "a b'\"$(id).jsonl", "-rf.jsonl", "é\u202e.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_steers_neither_a_shell_nor_a_terminal(arena: Arena, name: str) -> None:
    write_jsonl(arena.home / "data" / name, [*RECORDS, {"no": "text"}])
    assert arena.run("convert", recipe_of(arena, "data/*.jsonl"), "--workers", 1).code == 0
    folder = arena.out / "web" / "train"
    assert [file.path for file in manifest_of(folder).sources] == [f"data/{name}"]
    assert [bad["file"] for bad in quarantined(folder)] == [f"data/{name}"]
    (arena.home / "data" / name).write_bytes(b"")
    refusal = arena.run("convert", recipe_of(arena, "data/*.jsonl"), "--workers", 1, "--only", name)
    assert refusal.code == 2
    assert refusal.err.rstrip("\n").isprintable()


@pytest.mark.parametrize("name", ["a\nb", "\x1b]0;owned\x07"])
def test_a_refusal_is_one_printable_line_whatever_it_names(arena: Arena, name: str) -> None:
    for command in ("verify", "inspect", "check", "gc", "convert"):
        answer = arena.run(command, name)
        assert answer.code in (2, 4)
        assert answer.err.rstrip("\n").isprintable(), answer.err


def test_a_name_with_a_nul_is_refused(arena: Arena) -> None:
    for place in ("a\0.jsonl", "data/*\0.jsonl"):
        assert arena.refused("convert", recipe_of(arena, place))
    for command in ("verify", "inspect", "check", "gc"):
        assert arena.refused(command, "a\0b")


def test_a_pattern_over_everything_ends(arena: Arena) -> None:
    assert "matches no file" in arena.refused("convert", recipe_of(arena, "/*/nothing-*.jsonl"))
    assert arena.refused("convert", recipe_of(arena, "/dev/*"))
    assert arena.refused("convert", recipe_of(arena, "/proc/self/fd/*"))
