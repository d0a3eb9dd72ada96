"""A recipe from anyone: whatever stands in it, it is read in a moment or refused in a sentence."""

import os
from pathlib import Path

import pytest

from mdsmix.errors import RecipeError
from mdsmix.recipe import load_recipe
from tests.abuse.conftest import Arena
from tests.converting import documents, write_jsonl

RECORDS = [{"text": "one two three four five " * 9}] * 9
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


def refusal(recipe: Path) -> str:
    with pytest.raises(RecipeError) as refused:
        load_recipe(recipe)
    assert len(str(refused.value)) < 1000
    return str(refused.value)


def test_what_is_no_recipe_is_one_sentence(arena: Arena) -> None:
    path = arena.home / "recipe.yaml"
    for text in TEXTS.values():
        path.write_bytes(text)
        assert refusal(path)
    for name in (".", "/dev/zero", "missing.yaml"):
        assert refusal(Path(name))
    path.write_bytes(TEXTS["a tag that runs code"])
    for command in ("convert", "check", "render-yaml"):
        for name in (path, "/dev/zero"):
            assert arena.refused(command, name)


def test_a_stream_or_a_split_that_would_lie_elsewhere_is_refused(arena: Arena) -> None:
    for name in ("..", "../precious", "/etc", "a/b", "", ".mdsmix", "a\nb", "a\0b"):
        recipe = arena.recipe(streams={name: documents("a.jsonl")})
        assert "a stream's name becomes a folder" in refusal(recipe), name
        if name != "a\nb":
            recipe = arena.recipe(streams={"web": documents("a.jsonl", split=name)})
            assert "split is" in refusal(recipe), name
    assert arena.refused("convert", recipe)


def test_an_alias_is_read_and_a_recipe_may_come_through_a_pipe(arena: Arena) -> None:
    write_jsonl(arena.home / "a.jsonl", RECORDS)
    read, write = os.pipe()
    text = (
        f"tokenizer: {arena.tokenizer}\nmax_seq_len: 16\nlocal: {arena.out}\n"
        f"streams:\n  a: &a {{kind: pretraining, source: {{path: {arena.home}/a.jsonl, text: text}}}}\n"
        "  b: *a\n"
    )
    os.write(write, text.encode())
    os.close(write)
    assert arena.run("convert", f"/dev/fd/{read}", "--workers", 1).code == 0
    os.close(read)
    assert {path.name for path in arena.out.iterdir()} >= {"a", "b"}
