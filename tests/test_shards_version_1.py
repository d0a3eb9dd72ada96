"""Streams of format version 1 are read as they are; converting one again makes it version 2, and says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from mdsmix.shards.manifest import Manifest, parse_manifest
from tests.converting import (
    Told,
    documents,
    files,
    manifest_of,
    mdsmix,
    run_recipe,
    samples,
    write_jsonl,
    write_recipe,
)

GOLDEN = Path(__file__).parent / "golden" / "version-1" / "web"
"A stream that a tool of version 1 published."


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    texts = [{"text": f"a document, number {n}"} for n in range(9)]
    write_jsonl(tmp_path / "data" / "a.jsonl", texts)
    streams = {"web": documents(tmp_path / "data" / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


def made_older(published: Path) -> bytes:
    """Gives a stream the card that version 1 wrote: all settings, names below the source's own folder, other keys."""
    at = published / "mdsmix.manifest"
    now, old = (
        orjson.loads(at.read_bytes()),
        orjson.loads((GOLDEN / "train" / at.name).read_bytes()),
    )
    settings = {name: now["encoding"].get(name) for name in old["encoding"]} | {"compact": False}
    now |= {"format_version": 1, "encoding": settings}
    for source in now["sources"]:
        source["path"] = source["path"].rpartition("/")[2]
    for part in now["parts"]:
        part["key"] = "1" * 32
    at.write_bytes(orjson.dumps(now, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    shutil.rmtree(published / ".mdsmix")
    return at.read_bytes()


def test_a_card_of_version_1_says_all_settings_that_it_knew() -> None:
    content = (GOLDEN / "train" / "mdsmix.manifest").read_bytes()
    card: Manifest = parse_manifest(content, "x")
    assert card.format_version == 1
    assert (card.encoding.compact, card.encoding.compression) == (False, None)
    said = orjson.loads(content)["encoding"]
    assert {name: getattr(card.encoding, name) for name in said} == said


def test_a_stream_of_version_1_is_verified_inspected_and_read() -> None:
    before = files(GOLDEN)
    for command in (["verify", GOLDEN], ["inspect", GOLDEN, "-n", "1"], ["check", GOLDEN]):
        answer = mdsmix(*command)
        assert (answer.code, answer.err) == (0, "")
    assert len(samples(GOLDEN / "train")) == 6
    assert files(GOLDEN) == before


def test_a_recipe_with_a_stream_of_version_1_is_checked_and_rendered(recipe: Path) -> None:
    run_recipe(recipe)
    made_older(recipe.parent / "out" / "web" / "train")
    assert mdsmix("check", recipe).code == 0
    rendered = mdsmix("render-yaml", recipe)
    assert rendered.code == 0
    assert "web" in rendered.out


def test_converting_makes_it_version_2_and_says_why(recipe: Path) -> None:
    run_recipe(recipe)
    published = recipe.parent / "out" / "web" / "train"
    first = files(published)
    made_older(published)
    said = mdsmix("convert", recipe, "--dry-run").out
    assert "published in format version 1" in said
    told = Told()
    (outcome,) = run_recipe(recipe, watcher=told)
    assert outcome.done == outcome.units == 1
    (sentence,) = told.said
    assert "all of it is converted again, into version 2" in sentence
    assert files(published) == first, "the same shards under the same index"
    assert run_recipe(recipe)[0].state == "up to date"


def test_other_sources_are_refused_as_ever(recipe: Path) -> None:
    run_recipe(recipe)
    published = recipe.parent / "out" / "web" / "train"
    old = made_older(published)
    write_jsonl(recipe.parent / "b.jsonl", [{"text": "another"}])
    answer = mdsmix("convert", recipe, f"streams.web.source.path={recipe.parent}/b.jsonl")
    assert answer.code == 2
    assert "none of which is among its sources now" in answer.err
    assert (published / "mdsmix.manifest").read_bytes() == old


def test_a_repair_says_that_only_a_conversion_can(recipe: Path) -> None:
    run_recipe(recipe)
    published = recipe.parent / "out" / "web" / "train"
    old = made_older(published)
    shard = next(published.glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    answer = mdsmix("repair", published, "--recipe", recipe)
    assert answer.code == 2
    assert "format version 1" in answer.err
    assert "mdsmix convert" in answer.err
    assert (published / "mdsmix.manifest").read_bytes() == old
    manifest_of(published)
