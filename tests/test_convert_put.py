"""Versions never change, share what is unchanged, and are found by whoever asks for the stream."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert import guard as target_state
from mdsmix.convert import publish as publish_module
from mdsmix.convert import run
from mdsmix.convert.run import Outcome
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.mix.resolve import resolve
from mdsmix.shards.index import read_index
from mdsmix.shards.published import current, find_published, versions
from mdsmix.storage import Location, locate
from tests.converting import (
    documents,
    files,
    manifest_of,
    mdsmix,
    run_recipe,
    times,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)

TEXTS = [{"text": f"Document {n} is about the number {n}."} for n in range(30)]
FIRST = {"text": "Another first document."}


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    windows(monkeypatch, 300)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    streams = {"web": documents(tmp_path / "a.jsonl", layout="document")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams, publish="versioned")


@pytest.fixture
def split(tmp_path: Path) -> Path:
    return tmp_path / "out" / "web" / "train"


def publish(recipe: Path, records: list[dict[str, str]], *overrides: str) -> tuple[Outcome, Path]:
    """The outcome, and the folder that the stream is read in then."""
    write_jsonl(recipe.parent / "a.jsonl", records)
    (outcome,) = run_recipe(recipe, *overrides)
    found = current(locate(outcome.target))
    assert found is not None
    return outcome, Path(found.url)


def edited(number: int) -> list[dict[str, str]]:
    """Its first work unit is another one."""
    return [{"text": f"{TEXTS[0]['text'][:-4]} ({number})."}, *TEXTS[1:]]


def names(folder: Path) -> set[str]:
    return {shard.stored.basename for shard in read_index(locate(folder)).shards}


def is_readable(folder: Location) -> bool:
    shards = [shard.stored for shard in read_index(folder).shards]
    stats = [(folder / file.basename).stat() for file in shards]
    return all(s and s.size == f.bytes for s, f in zip(stats, shards, strict=True))


def test_a_version_never_changes_and_shares_its_unchanged_shards(recipe: Path, split: Path) -> None:
    _, first = publish(recipe, TEXTS)
    assert first.name == f"train-{manifest_of(split).index_hash[:8]}"
    assert files(first).keys() == {*names(first), "index.json", "mdsmix.manifest"}
    before, stamps, rows = files(first), times(first), token_rows(first)
    outcome, second = publish(recipe, edited(2))
    assert (outcome.done, outcome.reused) == (1, outcome.units - 1)
    assert (files(first), times(first)) == (before, stamps)
    assert token_rows(first) == rows
    assert token_rows(second) != rows
    shared = names(first) & names(second)
    assert len(shared) == len(names(second)) - 1
    assert all(os.path.samefile(first / name, second / name) for name in shared)
    assert not {"index.json", *names(second)} & files(split).keys(), "nothing is kept twice"
    again = times(split.parent)
    assert run_recipe(recipe)[0].state == "up to date"
    assert times(split.parent) == again


def test_its_bytes_are_those_of_a_stream_in_place(recipe: Path, split: Path) -> None:
    _, first = publish(recipe, TEXTS)
    (plain,) = run_recipe(recipe, "publish=replace", f"local={recipe.parent / 'plain'}")
    in_place = files(Path(plain.target))
    assert files(first).items() <= in_place.items()
    assert files(split).items() <= in_place.items()


def test_a_version_that_comes_back_is_the_one_that_is_there(recipe: Path) -> None:
    _, first = publish(recipe, TEXTS)
    stamps = times(first)
    publish(recipe, edited(2))
    outcome, third = publish(recipe, TEXTS)
    assert (third, outcome.done) == (first, 0)
    assert times(first) == stamps


def test_a_version_that_lost_its_card_gets_it_back(recipe: Path) -> None:
    _, first = publish(recipe, TEXTS)
    before = files(first)
    (first / "mdsmix.manifest").unlink()
    assert run_recipe(recipe)[0].done == 0
    assert files(first) == before


def test_the_card_of_a_version_stays_when_only_the_sources_are_others(
    recipe: Path, split: Path
) -> None:
    _, first = publish(recipe, TEXTS)
    stamps = times(first)
    _, second = publish(recipe, [*TEXTS, {"text": ""}])
    assert (second, times(first)) == (first, stamps)
    assert manifest_of(split).records.dropped == 1
    assert run_recipe(recipe)[0].state == "up to date"


@pytest.mark.parametrize("named", ["", "train", "version"])
def test_everything_that_reads_a_stream_finds_the_current_version(
    recipe: Path, split: Path, named: str
) -> None:
    publish(recipe, TEXTS)
    _, second = publish(recipe, edited(2))
    place = second if named == "version" else split.parent / named
    assert find_published(locate(place)) == locate(second)
    (stream,) = resolve([str(place)]).streams
    assert stream.folder == locate(second)
    assert stream.trusted_manifest is not None
    assert mdsmix("verify", place).out.startswith(f"{second}: ")
    assert mdsmix("inspect", place).code == mdsmix("check", place).code == 0
    assert mdsmix("gc", place).out.startswith(f"{split}: 0 files")


def test_what_is_rendered_reads_the_version(recipe: Path, split: Path, tmp_path: Path) -> None:
    _, first = publish(recipe, TEXTS)
    (stream,) = resolve([str(recipe)]).streams
    assert stream.settings == {"local": str(split.parent), "split": first.name}
    (stream,) = resolve([str(recipe), f"remote={tmp_path / 'out'}", "local=/cache"]).streams
    assert stream.settings == {
        "local": f"/cache/web-{first.name[-8:]}",
        "remote": str(split.parent),
        "split": first.name,
    }
    rendered = tmp_path / "train.yaml"
    assert mdsmix("render-yaml", recipe, "-o", rendered).code == 0
    publish(recipe, edited(2))
    (stream,) = resolve([str(rendered)]).streams
    assert stream.folder == locate(first), "what was rendered before stays what it was"
    rendered.write_text(rendered.read_text().replace(first.name, "train"))
    with pytest.raises(Unreachable, match=r"no index\.json; set its split to train-[0-9a-f]{8}"):
        resolve([str(rendered)])


def test_a_recipe_that_only_mixes_finds_the_current_version(
    recipe: Path, split: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    _, first = publish(recipe, TEXTS)
    loader = {"name": "text"}
    for place in (split.parent, split):
        streams = {"old": {"local": str(place)}}
        folder = tmp_path / f"of {place.name}"
        folder.mkdir()
        mixing = write_recipe(folder, tokenizer_folder, streams=streams, train_loader=loader)
        (stream,) = resolve([str(mixing)]).streams
        assert stream.folder == locate(first)
        assert stream.settings == {"local": str(split.parent), "split": first.name}


def test_a_first_look_is_published_in_place(recipe: Path, split: Path) -> None:
    run_recipe(recipe, limit=3)
    assert (split.parent / "limit-3" / "index.json").exists()
    assert [path.name for path in split.parent.iterdir()] == ["limit-3"]


def test_a_stream_may_be_published_the_other_way_from_now_on(recipe: Path, split: Path) -> None:
    outcome, place = publish(recipe, TEXTS, "publish=replace")
    in_place, rows = names(place), token_rows(place)
    assert place == split
    outcome, first = publish(recipe, TEXTS)
    assert (outcome.done, token_rows(first)) == (0, rows)
    assert in_place <= files(split).keys(), "jobs may read by the index that lay there"
    assert run_recipe(recipe)[0].state == "up to date"
    stamps = times(first)
    outcome, place = publish(recipe, edited(2), "publish=replace")
    assert (place, outcome.done) == (split, 1)
    assert is_readable(locate(split))
    assert find_published(locate(split.parent)) == locate(split)
    outcome, again = publish(recipe, TEXTS)
    assert (again, outcome.done, times(first)) == (first, 0, stamps)


def test_a_version_with_the_same_digits_is_refused(
    recipe: Path, split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(recipe, TEXTS)
    before = files(split.parent)
    real = publish_module.find_index

    def colliding(folder: Location) -> object:
        held = real(folder)
        if held:
            held.__dict__["hash"] = f"{folder.name[-8:]}{'0' * 24}"
        return held

    monkeypatch.setattr(publish_module, "find_index", colliding)
    monkeypatch.setattr(target_state, "find_description", lambda _: None)
    with pytest.raises(MdsmixError, match="hash begins with the same 8 digits"):
        run_recipe(recipe)
    assert files(split.parent) == before


def test_a_shard_that_disappears_while_publishing_is_told(
    recipe: Path, split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = publish(recipe, TEXTS)
    shard = first / min(names(first))
    do_units = run.do_units

    def deleting(work: Any) -> Any:
        done = do_units(work)
        shard.unlink()
        return done

    monkeypatch.setattr(run, "do_units", deleting)
    with pytest.raises(Unreachable, match=r"was deleted from .* while the stream was being"):
        publish(recipe, edited(2))
    assert [version.name for version in versions(locate(split))] == [first.name]


def test_the_current_version_is_repaired_and_an_older_one_refused(
    recipe: Path, split: Path
) -> None:
    _, first = publish(recipe, TEXTS)
    _, second = publish(recipe, edited(2))
    before = files(split.parent)
    for name in sorted(names(second))[:2]:
        shard = second / name
        content = bytearray(shard.read_bytes())
        content[-1] ^= 0x55
        shard.unlink()
        shard.write_bytes(content)
    # A run that was killed when it had filled the version leaves what it filled it with.
    shutil.copy(shard, split)
    (second / "mdsmix.manifest").unlink()
    assert mdsmix("verify", second).code == 3
    answer = mdsmix("repair", second, "--recipe", recipe, "publish=replace")
    assert answer.code == 2
    assert f"publish in the recipe would not publish it at {second} again" in answer.err
    answer = mdsmix("repair", split.parent, "--recipe", recipe, "--workers", "1")
    assert answer.code == 0
    assert "work units made again (" in answer.out
    assert files(split.parent) == before
    (first / "index.json").write_bytes(b"{}")
    answer = mdsmix("repair", first, "--recipe", recipe)
    assert answer.code == 2
    assert f"only the current one, {second}, can be made again" in answer.err


def test_one_that_says_neither_is_refused(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="publish"):
        run_recipe(recipe, "publish=sideways")


def test_damage_that_versions_share_by_hard_links_is_deleted_in_all_and_made_anew_in_the_current(
    recipe: Path, split: Path
) -> None:
    """A copy that is as large and as damaged must not take the place of the deleted one."""
    _, first = publish(recipe, TEXTS)
    _, second = publish(recipe, edited(2))
    before, name = files(second), min(names(first) & names(second))
    with (second / name).open("r+b") as shard:
        shard.seek(-1, os.SEEK_END)
        last = shard.read(1)
        shard.seek(-1, os.SEEK_END)
        shard.write(bytes([last[0] ^ 1]))
    assert mdsmix("verify", first).code == mdsmix("verify", second).code == 3
    assert mdsmix("repair", split.parent, "--recipe", recipe, "--workers", 1).code == 0
    assert files(second) == before
    assert not (first / name).exists()
