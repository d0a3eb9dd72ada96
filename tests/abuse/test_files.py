"""What a pattern may match that is no file of records: pipes, devices, folders, names that would steer a terminal."""

import os
from pathlib import Path

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
