"""Versions never change, share what is unchanged, and are found by whoever asks for the stream."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert import run
from mdsmix.convert.run import Outcome
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.mix.resolve import resolve
from mdsmix.shards.published import find_published, versions
from mdsmix.storage import locate
from tests.converting import (
    Web,
    documents,
    files,
    flip,
    mdsmix,
    times,
    token_rows,
    windows,
    write_recipe,
)

TEXTS = [f"Document {n} is about the number {n}." for n in range(30)]
OTHER = [f"{TEXTS[0][:-4]} (2).", *TEXTS[1:]]
"Its first work unit is another one."


@pytest.fixture
def web(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    windows(monkeypatch, 300)
    return web.says(documents("a.jsonl", layout="document"), publish="versioned")


def publish(web: Web, texts: list[str], *overrides: str) -> tuple[Outcome, Path]:
    """The outcome, and the folder that the stream is read in then."""
    web.holds(texts)
    return web.run(*overrides), web.shards[0].parent


def names(web: Web) -> set[str]:
    return {path.name for path in web.shards}


def test_a_version_never_changes_and_shares_its_unchanged_shards(web: Web) -> None:
    _, first = publish(web, TEXTS)
    assert first.name == f"train-{web.manifest.index_hash[:8]}"
    before, stamps, of_first = files(first), times(first), names(web)
    assert before.keys() == {*of_first, "index.json", "mdsmix.manifest"}
    in_place = web.anew("publish=replace", name="plain")
    assert {**before, **web.files}.items() <= in_place.files.items(), "bytes as those in place"
    outcome, second = publish(web, OTHER)
    assert (outcome.done, outcome.reused) == (1, outcome.units - 1)
    shared = of_first & names(web)
    assert len(shared) == len(of_first) - 1
    assert all(os.path.samefile(first / name, second / name) for name in shared)
    assert not {"index.json", *names(web)} & web.files.keys(), "nothing is kept twice"
    again = times(web.out)
    assert web.run().state == "up to date"
    assert times(web.out) == again
    outcome, third = publish(web, TEXTS)
    assert (third, outcome.done) == (first, 0), "one that comes back is the one that is there"
    assert (files(first), times(first)) == (before, stamps)


def test_a_version_that_lost_its_card_gets_it_back_and_keeps_it_under_other_sources(
    web: Web,
) -> None:
    _, first = publish(web, TEXTS)
    before = files(first)
    (first / "mdsmix.manifest").unlink()
    assert web.run().done == 0
    assert files(first) == before
    stamps = times(first)
    _, second = publish(web, [*TEXTS, ""])
    assert (second, times(first)) == (first, stamps)
    assert web.manifest.records.dropped == 1
    assert web.run().state == "up to date"


def test_everything_that_reads_a_stream_finds_the_current_version(web: Web) -> None:
    publish(web, TEXTS)
    _, second = publish(web, OTHER)
    for place in (web.train.parent, web.train, second):
        assert find_published(locate(place)) == locate(second)
        (stream,) = resolve([str(place)]).streams
        assert stream.folder == locate(second)
        assert stream.trusted_manifest is not None
        assert mdsmix("verify", place).out.startswith(f"{second}: ")
        assert mdsmix("gc", place).out.startswith(f"{web.train}: 0 files")
        assert mdsmix("inspect", place).code == mdsmix("check", place).code == 0, place


def test_what_is_rendered_or_mixed_reads_the_version(web: Web) -> None:
    _, first = publish(web, TEXTS)
    stream = web.train.parent
    local = {"local": str(stream), "split": first.name}
    cached = {"local": f"/cache/web-{first.name[-8:]}", "remote": str(stream), "split": first.name}
    for given, settings in (([], local), ([f"remote={web.out}", "local=/cache"], cached)):
        assert resolve([str(web.recipe), *given]).streams[0].settings == settings
    rendered = web.folder / "train.yaml"
    assert mdsmix("render-yaml", web.recipe, "-o", rendered).code == 0
    publish(web, OTHER)
    (read,) = resolve([str(rendered)]).streams
    assert read.folder == locate(first), "what was rendered before stays what it was"
    rendered.write_text(rendered.read_text().replace(first.name, "train"))
    with pytest.raises(Unreachable, match=r"no index\.json; correct its split, train-[0-9a-f]{8}"):
        resolve([str(rendered)])
    for place in (stream, web.train):
        mixing = web.folder / f"of {place.name}"
        mixing.mkdir()
        loader, streams = {"name": "text"}, {"old": {"local": str(place)}}
        recipe = write_recipe(mixing, web.tokenizer, streams=streams, train_loader=loader)
        (read,) = resolve([str(recipe)]).streams
        assert read.settings == {"local": str(stream), "split": web.shards[0].parent.name}


def test_a_first_look_is_published_in_place(web: Web) -> None:
    web.holds(TEXTS)
    web.run(limit=3)
    assert (web.train.parent / "limit-3" / "index.json").exists()
    assert [path.name for path in web.train.parent.iterdir()] == ["limit-3"]
    with pytest.raises(RecipeError, match="publish"):
        web.run("publish=sideways")


def test_a_stream_may_be_published_the_other_way_from_now_on(web: Web) -> None:
    outcome, place = publish(web, TEXTS, "publish=replace")
    in_place, rows = names(web), token_rows(place)
    assert place == web.train
    outcome, first = publish(web, TEXTS)
    assert (outcome.done, token_rows(first)) == (0, rows)
    assert in_place <= web.files.keys(), "jobs may read by the index that lay there"
    assert web.run().state == "up to date"
    stamps = times(first)
    outcome, place = publish(web, OTHER, "publish=replace")
    assert (place, outcome.done) == (web.train, 1)
    assert mdsmix("verify", web.train).code == 0
    assert find_published(locate(web.train.parent)) == locate(web.train)
    outcome, again = publish(web, TEXTS)
    assert (again, outcome.done, times(first)) == (first, 0, stamps)


def test_a_shard_that_disappears_while_publishing_is_told(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = publish(web, TEXTS)
    shard, do_units = min(web.shards), run.do_units

    def deleting(work: Any) -> Any:
        done = do_units(work)
        shard.unlink()
        return done

    monkeypatch.setattr(run, "do_units", deleting)
    with pytest.raises(Unreachable, match=r"was deleted from .* while the stream was being"):
        publish(web, OTHER)
    assert [version.name for version in versions(locate(web.train))] == [first.name]


def test_the_current_version_is_repaired_and_an_older_one_refused(web: Web) -> None:
    _, first = publish(web, TEXTS)
    _, second = publish(web, OTHER)
    before, damaged = files(web.out), sorted(web.shards)[:2]
    for shard in damaged:
        flip(shard)
    # A run that was killed when it had filled the version leaves what it filled it with.
    shutil.copy(damaged[-1], web.train)
    (second / "mdsmix.manifest").unlink()
    assert mdsmix("verify", second).code == 3
    answer = mdsmix("repair", second, "--recipe", web.recipe, "publish=replace")
    assert answer.code == 2
    assert f"publish in the recipe would not publish it at {second} again" in answer.err
    answer = mdsmix("repair", web.train.parent, "--recipe", web.recipe, "--workers", "1")
    assert answer.code == 0
    assert "repaired, 0 of 5 work units made again" in answer.out
    assert files(web.out) == before
    (first / "index.json").write_bytes(b"{}")
    answer = mdsmix("repair", first, "--recipe", web.recipe)
    assert answer.code == 2
    assert f"only the current one, {second}, can be made again" in answer.err


def test_damage_that_versions_share_by_hard_links_is_deleted_in_all_and_made_anew_in_the_current(
    web: Web,
) -> None:
    """A copy that is as large and as damaged must not take the place of the deleted one."""
    _, first = publish(web, TEXTS)
    of_first = names(web)
    _, second = publish(web, OTHER)
    before, name = files(second), min(of_first & names(web))
    with (second / name).open("r+b") as shard:
        shard.write(bytes([before[name][0] ^ 1]))
    assert mdsmix("verify", first).code == mdsmix("verify", second).code == 3
    assert mdsmix("repair", web.train.parent, "--recipe", web.recipe, "--workers", 1).code == 0
    assert files(second) == before
    assert not (first / name).exists()
