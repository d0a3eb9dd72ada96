"""A recipe from anyone: whatever stands in it, it is read in a moment or refused in a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.abuse.conftest import Arena
from tests.converting import documents, write_jsonl

TEXTS: dict[str, bytes] = {
    "an alias to itself": b"streams: &a [*a]",
    "no such alias": b"streams: *b",
    "deep and closed": b"streams: " + b"{a: " * 5000 + b"}" * 5000,
    "a tag that runs code": b"streams: !!python/object/apply:os.system ['touch ../hacked']",
    "binary": bytes(range(256)) * 9,
    "UTF-16": "max_seq_len: 8".encode("utf-16"),
    "long": b"#" * (1 << 21),
    "an interpolation of itself": b"local: ${local}",
    "an interpolation that runs code": b"local: ${oc.env:HOME}${oc.decode:'__import__(\"os\")'}",
    "a number of a million digits": b"max_seq_len: " + b"9" * 1_000_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_what_is_no_recipe_is_one_sentence(arena: Arena, text: bytes) -> None:
    (arena.home / "recipe.yaml").write_bytes(text)
    for command in ("convert", "check", "render-yaml"):
        assert arena.refused(command, arena.home / "recipe.yaml")


@pytest.mark.parametrize("name", [".", "/dev/zero", "missing.yaml"])
def test_what_is_no_file_is_one_sentence(arena: Arena, name: str) -> None:
    for command in ("convert", "check"):
        assert arena.refused(command, name)


@pytest.mark.parametrize(
    "name", ["..", "../precious", "/etc", "a/b", "", ".mdsmix", "a\nb", "a\0b"]
)
def test_a_stream_or_a_split_that_would_lie_elsewhere_is_refused(arena: Arena, name: str) -> None:
    source = write_jsonl(arena.home / "a.jsonl", [{"text": "one two three"}] * 9)
    recipe = arena.recipe(streams={name: documents(source)})
    assert "a stream's name becomes a folder" in arena.refused("convert", recipe)
    if name != "a\nb":
        recipe = arena.recipe(streams={"web": documents(source, split=name)})
        assert "split is" in arena.refused("convert", recipe)


def test_an_alias_that_is_meant_is_read(arena: Arena) -> None:
    write_jsonl(arena.home / "a.jsonl", [{"text": "one two three four five " * 9}] * 9)
    (arena.home / "recipe.yaml").write_text(
        f"tokenizer: {arena.tokenizer}\nmax_seq_len: 16\nlocal: out\n"
        "streams:\n  a: &a {kind: pretraining, source: {path: a.jsonl, text: text}}\n  b: *a\n"
    )
    assert arena.run("convert", "recipe.yaml", "--workers", 1).code == 0


def test_a_recipe_may_come_through_a_pipe(arena: Arena) -> None:
    write_jsonl(arena.home / "a.jsonl", [{"text": "one two three four five " * 9}] * 9)
    recipe = arena.recipe(streams={"web": documents(arena.home / "a.jsonl")})
    read, write = os.pipe()
    os.write(write, Path(recipe).read_bytes())
    os.close(write)
    assert arena.run("convert", f"/dev/fd/{read}", "--workers", 1).code == 0
    os.close(read)
