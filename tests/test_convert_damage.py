"""`convert --verify-target` finds shards that were damaged at equal size, and the stream comes out byte for byte as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mdsmix.shards.index import read_index
from mdsmix.storage import Location, locate
from tests.converting import (
    Told,
    documents,
    lying_at,
    mdsmix,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)

TEXTS = [{"text": f"Document {n} is about the number {n}. " * 3} for n in range(60)]
SAME = [{"text": "the same text again and again"}] * 40


def flip(place: Location) -> None:
    data = bytearray(place.read())
    data[-1] ^= 0x55
    place.delete()  # a version shares its bytes on disk with no other name then
    place.write(data)


def shards(stream: Path) -> list[Location]:
    (home,) = {at.parent for at in stream.glob("*/index.json")}
    folder = locate(str(home))
    return [folder / shard.stored.basename for shard in read_index(folder).shards]


@pytest.fixture(params=[
    {},
    {"compression": "zstd"},
    {"publish": "versioned"},
    {"layout": "document", "texts": SAME},
])  # fmt: skip
def recipe(
    request: Any, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """In place, compressed, as versions, and with twins: shards of equal bytes. Concat leaves tokens over for a last part."""
    settings = dict(request.param)
    windows(monkeypatch, 1500 if "texts" not in settings else 500)
    write_jsonl(tmp_path / "a.jsonl", settings.pop("texts", TEXTS))
    layout = settings.pop("layout", "concat")
    streams = {"web": documents(tmp_path / "a.jsonl", layout=layout)}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams, **settings)


def test_damaged_shards_are_made_anew_and_nothing_else(recipe: Path, tmp_path: Path) -> None:
    run_recipe(recipe)
    target = tmp_path / "out/web"
    before, found = lying_at(target), shards(target)
    assert len(found) > 3
    answer = mdsmix("convert", recipe, "--verify-target", "--workers", 1)
    assert answer.code == 0
    assert "at the target read and hashed: all whole\n" in answer.out
    assert "web: up to date, " in answer.out
    assert lying_at(target) == before
    for place in (found[1], found[-1]):
        flip(place)
    (outcome,) = run_recipe(recipe)
    assert outcome.done == 0, "a run sees names and sizes"
    assert mdsmix("verify", target).code == 3
    told = Told()
    (outcome,) = run_recipe(recipe, verify_target=True, watcher=told)
    assert 0 < outcome.done < outcome.units
    assert [found[1].name in sentence for sentence in told.said].count(True) == 1
    assert outcome.notes[-1].startswith(f"{len(found)} shards ")
    assert outcome.notes[-1].endswith("at the target read and hashed: 2 damaged, made anew")
    assert lying_at(target) == before
    assert mdsmix("verify", target).code == 0


def test_a_version_that_is_published_again_is_whole(tmp_path: Path, tokenizer_folder: Path) -> None:
    """What an older version holds is looked at too, since a stream may come back to it."""
    streams = {"web": documents(tmp_path / "a.jsonl")}
    path = write_recipe(tmp_path, tokenizer_folder, streams=streams, publish="versioned")
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    run_recipe(path)
    first = shards(tmp_path / "out/web")[0]
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:-1])
    run_recipe(path)
    flip(first)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (outcome,) = run_recipe(path, verify_target=True)
    assert f"published as {first.parent}" in outcome.notes
    assert mdsmix("verify", first.parent).code == 0


def test_an_upload_that_a_killed_run_left_is_looked_at_too(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """A shard that no index names yet is reused as well. A dry run does not pretend to have looked."""
    streams = {"web": documents(tmp_path / "a.jsonl")}
    path = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    run_recipe(path)
    for place in shards(tmp_path / "out/web"):
        flip(place)
    (tmp_path / "out/web/train/index.json").unlink()
    (tmp_path / "out/web/train/mdsmix.manifest").unlink()
    run_recipe(path, verify_target=True)
    assert mdsmix("verify", tmp_path / "out/web").code == 0
    answer = mdsmix("convert", path, "--dry-run", "--verify-target")
    assert (answer.code, answer.out) == (2, "")
    assert "mdsmix verify RECIPE" in answer.err
