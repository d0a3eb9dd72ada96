"""Versions never change, share what is unchanged, and are found by whoever asks for the stream. They go only when
asked for, the oldest first, never the current one and never one that was replaced a moment ago."""

import os
import shutil
import time
from pathlib import Path

import pytest

from mdsmix.convert.garbage import find_garbage
from mdsmix.convert.run import Outcome
from mdsmix.errors import Unreachable
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
    write_recipe,
)

TEXTS = [f"Document {n} is about the number {n}." for n in range(30)]
OTHER = [f"{TEXTS[0][:-4]} (2).", *TEXTS[1:]]
"Its first work unit is another one."
DAY = 86_400.0


@pytest.fixture
def web(web: Web) -> Web:
    web.windows(300)
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


def age(web: Web, days: float) -> None:
    """Makes everything as old as if it had been done so much longer ago."""
    for path in web.out.rglob("*"):
        then = path.stat().st_mtime - days * DAY
        os.utime(path, (then, then))


@pytest.fixture
def published(web: Web) -> list[Path]:
    """Four versions, a day apart, the last one now."""
    made = []
    for number in range(4):
        age(web, 1)
        made.append(publish(web, [f"Version {number}."])[1])
    return made


def found(web: Web, keep: int | None, days: float = 0) -> list[str]:
    garbage = find_garbage(locate(web.train), days * DAY, keep)
    return [item.name for item in garbage if item.kind.endswith("version")]


def listed(web: Web) -> set[Path]:
    return {Path(version.url) for version in versions(locate(web.train))}


def test_what_a_killed_write_left_in_a_version_goes_and_the_version_stays(
    published: list[Path], web: Web
) -> None:
    half = published[0] / f"mdsmix.manifest.{'0' * 16}.tmp"
    half.write_bytes(b"half of it")
    (left,) = (g for g in find_garbage(locate(web.train), 0) if g.kind == "unfinished write")
    assert left.name == f"{half.parent.name}/{half.name}"
    left.discard()
    assert not half.exists()
    assert listed(web) == set(published)


def test_versions_stay_unless_it_is_said_how_many_do_and_for_a_while_after_they_were_replaced(
    published: list[Path], web: Web
) -> None:
    """One may be months old, and a job that opened it yesterday still reads it."""
    first, second, third, _ = (path.name for path in published)
    kept = [(None, []), (1, [third, second, first]), (2, [second, first]), (3, [first]), (4, [])]
    for keep, names in kept:
        assert found(web, keep) == names
    for path in published[2].iterdir():
        os.utime(path, (0, 0))
    ages = [(0, 0.5, [second, first]), (0, 1.5, [first]), (0, 7, []), (5.5, 7, [first])]
    for days, least, names in [*ages, (2, 7, [third, second, first])]:
        age(web, days)
        assert found(web, 1, least) == names


def test_one_that_was_current_again_is_as_new_as_that(published: list[Path], web: Web) -> None:
    first, second, third, fourth = published
    for number, version in ((0, first), (3, fourth)):
        age(web, 1)
        assert publish(web, [f"Version {number}."])[1] == version
    assert found(web, 2) == [third.name, second.name]
    assert found(web, 2, 2.5) == [second.name]


def test_what_is_deleted_and_what_is_not(published: list[Path], web: Web) -> None:
    before = files(web.train.parent)
    assert mdsmix("gc", web.train, "--keep", 2).out.endswith("0 files, 0 bytes: all is in use\n")
    age(web, 8)
    strange = published[0] / "notes.txt"
    strange.write_text("not ours")
    command = ("gc", published[1], "--keep", 2)
    assert f"days  {published[1].name}\n" in mdsmix(*command).out
    assert listed(web) == set(published)
    assert mdsmix(*command, "--delete").code == 0
    assert listed(web) == {published[0], *published[2:]}
    assert list(published[0].iterdir()) == [strange]
    kept = (published[2].name, published[3].name)
    left = files(web.train.parent)
    assert {n for n in before if n.startswith(kept)} == {n for n in left if n.startswith(kept)}
    assert mdsmix("verify", published[2]).code == mdsmix("verify", published[3]).code == 0
    assert len(list((web.train / ".mdsmix").glob("*.replaced"))) == 1
    assert web.run().state == "up to date"
    assert found(web, 2) == []


def test_a_version_that_was_half_made_or_half_deleted_goes_and_the_current_one_stays(
    published: list[Path], web: Web
) -> None:
    for half in (published[0], published[3]):
        (half / "index.json").unlink()
    assert found(web, None) == [published[0].name]
    assert found(web, 2) == [published[1].name, published[0].name]
    assert found(web, 1, time.time()) == []
