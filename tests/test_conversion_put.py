"""Versions never change, share what is unchanged, and are found by whoever asks for the stream.
They go only when asked for, the oldest first, never the current one and never one that was replaced
a moment ago.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from mdsmix.conversion.gc import find_garbage
from mdsmix.conversion.run import Outcome
from mdsmix.errors import Unreachable
from mdsmix.mix.streams.resolve import resolve_mix
from mdsmix.shards.published import find_published, list_versions
from mdsmix.storage import locate
from tests.converting import Web, documents, done, files, flip, mdsmix, refused, times, write_recipe

TEXTS = [f"Document {n} is about the number {n}." for n in range(30)]
OTHER = [f"{TEXTS[0][:-4]} (2).", *TEXTS[1:]]
"Its first work unit is another one."
DAY = 86_400.0


@pytest.fixture
def web(web: Web) -> Web:
    web.windows(300)
    return web.says(documents("a.jsonl", layout="document"), publish="versioned")


def publish(web: Web, texts: list[str]) -> tuple[Outcome, Path]:
    """The outcome, and the folder that the stream is read in then."""
    web.holds(texts)
    return web.run(), web.shards[0].parent


@pytest.fixture
def second(web: Web) -> Path:
    """The current version, beside the first one."""
    publish(web, TEXTS)
    return publish(web, OTHER)[1]


def names(web: Web) -> set[str]:
    return {path.name for path in web.shards}


def test_a_version_never_changes_and_shares_its_unchanged_shards(web: Web) -> None:
    _, first = publish(web, TEXTS)
    assert first.name == f"train-{web.manifest.index_hash[:8]}"
    before, stamps, of_first = files(first), times(first), names(web)
    assert before.keys() == {*of_first, "index.json", "mdsmix.manifest"}
    in_place = web.anew("publish=replace")
    assert {**before, **web.files}.items() <= in_place.files.items(), "the same bytes"
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


def test_everything_that_reads_a_stream_finds_the_current_version(web: Web, second: Path) -> None:
    train = web.train
    for place in (train.parent, train, second):
        assert find_published(locate(place)) == locate(second)
        (stream,) = resolve_mix([str(place)]).streams
        assert stream.folder == locate(second)
        assert stream.trusted_manifest is not None
        assert done("verify", place).out.startswith(f"{second}: ")
        assert done("gc", place).out.startswith(f"{train}: 0 files")
        assert done("inspect", place).code == done("check", place).code
    for place in (train.parent, train):
        mixing = web.folder / f"of {place.name}"
        mixing.mkdir()
        loader, streams = {"name": "text"}, {"old": {"local": str(place)}}
        recipe = write_recipe(mixing, web.tokenizer, streams=streams, train_loader=loader)
        (read,) = resolve_mix([str(recipe)]).streams
        assert read.settings == {"local": str(train.parent), "split": second.name}


def test_what_is_rendered_reads_the_version(web: Web) -> None:
    _, first = publish(web, TEXTS)
    stream = web.train.parent
    local = {"local": str(stream), "split": first.name}
    cached = {"local": f"/cache/web-{first.name[-8:]}", "remote": str(stream), "split": first.name}
    elsewhere = [f"remote={web.out}", "local=/cache"]
    for given, settings in (([], local), (elsewhere, cached)):
        assert resolve_mix([str(web.recipe), *given]).streams[0].settings == settings
    rendered = web.folder / "train.yaml"
    done("render-yaml", web.recipe, "-o", rendered)
    publish(web, OTHER)
    (read,) = resolve_mix([str(rendered)]).streams
    assert read.folder == locate(first), "what was rendered before stays what it was"
    rendered.write_text(rendered.read_text().replace(first.name, "train"))
    with pytest.raises(Unreachable, match=r"no index\.json; correct its split, train-[0-9a-f]{8}"):
        resolve_mix([str(rendered)])


def test_the_current_version_is_repaired_and_an_older_one_refused(web: Web, second: Path) -> None:
    (first,) = {Path(v.url) for v in list_versions(locate(web.train))} - {second}
    before, damaged = files(web.out), sorted(web.shards)[:2]
    for shard in damaged:
        flip(shard)
    # A run that was killed when it had filled the version leaves what it filled it with.
    shutil.copy(damaged[-1], web.train)
    (second / "mdsmix.manifest").unlink()
    assert mdsmix("verify", second).code == 3
    recipe, place = ("--recipe", web.recipe), web.train.parent
    answer = mdsmix("repair", second, *recipe, "publish=replace")
    refused(
        answer, 2, f"with its current `publish` the recipe would not publish it at {second} again"
    )
    answer = done("repair", place, *recipe, "--workers", 1)
    assert f"fault {damaged[0].name}: " in answer.out
    assert "repaired, 0 of 5 work units made again" in answer.out
    assert files(web.out) == before
    assert done("repair", place, *recipe).out == f"{second}: whole, nothing to repair\n"
    (first / "index.json").write_bytes(b"{}")
    answer = mdsmix("repair", first, *recipe)
    refused(answer, 2, f"only the current one, {second}, can be made again")


def test_damage_shared_by_hard_links_is_deleted_in_all_and_mended_in_one(web: Web) -> None:
    """A copy that is as large and as damaged must not take the place of the deleted one."""
    _, first = publish(web, TEXTS)
    of_first = names(web)
    _, second = publish(web, OTHER)
    before, name = files(second), min(of_first & names(web))
    with (second / name).open("r+b") as shard:
        shard.write(bytes([before[name][0] ^ 1]))
    assert mdsmix("verify", first).code == mdsmix("verify", second).code == 3
    done("repair", web.train.parent, "--recipe", web.recipe, "--workers", 1)
    assert files(second) == before
    assert not (first / name).exists()


def age(web: Web, days: float) -> None:
    """Makes everything as old as if it had been done so much longer ago."""
    for path in web.out.rglob("*"):
        then = path.stat().st_mtime - days * DAY
        os.utime(path, (then, then))


@pytest.fixture
def four(web: Web) -> list[Path]:
    """Versions, a day apart, the last one now."""
    made = []
    for number in range(4):
        age(web, 1)
        made.append(publish(web, [f"Version {number}."])[1])
    return made


def found(web: Web, keep: int | None, days: float = 0) -> list[str]:
    garbage = find_garbage(locate(web.train), days * DAY, keep)
    return [item.name for item in garbage if item.kind.endswith("version")]


def listed(web: Web) -> set[Path]:
    return {Path(version.url) for version in list_versions(locate(web.train))}


def test_versions_stay_unless_told_and_a_while_after_replaced(four: list[Path], web: Web) -> None:
    """One may be months old, and a job that opened it yesterday still reads it. One that was
    current again is as new as that.
    """
    first, second, third, _ = (path.name for path in four)
    kept = [(None, []), (1, [third, second, first]), (2, [second, first]), (3, [first]), (4, [])]
    for keep, names in kept:
        assert found(web, keep) == names
    for path in four[2].iterdir():
        os.utime(path, (0, 0))
    ages = [(0, 0.5, [second, first]), (0, 1.5, [first]), (0, 7, []), (5.5, 7, [first])]
    for days, least, names in [*ages, (2, 7, [third, second, first])]:
        age(web, days)
        assert found(web, 1, least) == names
    for number in (0, 3):
        age(web, 1)
        assert publish(web, [f"Version {number}."])[1] == four[number]
    assert found(web, 2) == [third, second]
    assert found(web, 2, 9.9) == [second]


def test_what_is_deleted_and_what_is_not(four: list[Path], web: Web) -> None:
    half = four[0] / f"mdsmix.manifest.{'0' * 16}.tmp"
    half.write_bytes(b"half of it")
    (left,) = (g for g in find_garbage(locate(web.train), 0) if g.kind == "unfinished write")
    assert left.name == f"{half.parent.name}/{half.name}"
    left.discard()
    assert not half.exists()
    stream = web.train.parent
    before = files(stream)
    assert done("gc", web.train, "--keep", 2).out.endswith("0 bytes: all files are in use\n")
    age(web, 8)
    strange = four[0] / "notes.txt"
    strange.write_text("not ours")
    command = ("gc", four[1], "--keep", 2)
    assert f"days  {four[1].name}\n" in done(*command).out
    assert listed(web) == set(four)
    done(*command, "--delete")
    assert listed(web) == {four[0], *four[2:]}
    assert list(four[0].iterdir()) == [strange]
    kept = (four[2].name, four[3].name)
    left_of, had = ({n for n in each if n.startswith(kept)} for each in (files(stream), before))
    assert left_of == had
    assert done("verify", four[2]).code == done("verify", four[3]).code
    assert len(list((web.train / ".mdsmix").glob("*.replaced"))) == 1
    assert web.run().state == "up to date"
    assert found(web, 2) == []


def test_half_a_version_goes_and_the_current_one_stays(four: list[Path], web: Web) -> None:
    for half in (four[0], four[3]):
        (half / "index.json").unlink()
    assert found(web, None) == [four[0].name]
    assert found(web, 2) == [four[1].name, four[0].name]
    assert found(web, 1, time.time()) == []
