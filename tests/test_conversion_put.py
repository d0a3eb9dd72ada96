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
from tests.converting import (
    Project,
    assert_refused,
    documents,
    flip_byte,
    mdsmix,
    read_files,
    read_times,
    run_ok,
    write_recipe,
)

TEXTS = [f"Document {n} is about the number {n}." for n in range(30)]
OTHER = [f"{TEXTS[0][:-4]} (2).", *TEXTS[1:]]
"Its first work unit is another one."
DAY = 86_400.0


@pytest.fixture
def project(project: Project) -> Project:
    project.set_window_size(300)
    return project.configure(documents("a.jsonl", layout="document"), publish="versioned")


def publish(project: Project, texts: list[str]) -> tuple[Outcome, Path]:
    """The outcome, and the folder that the stream is read in then."""
    project.write_source(texts)
    return project.run(), project.shards[0].parent


@pytest.fixture
def second(project: Project) -> Path:
    """The current version, beside the first one."""
    publish(project, TEXTS)
    return publish(project, OTHER)[1]


def names(project: Project) -> set[str]:
    return {path.name for path in project.shards}


def test_a_version_never_changes_and_shares_its_unchanged_shards(project: Project) -> None:
    _, first = publish(project, TEXTS)
    assert first.name == f"train-{project.manifest.index_hash[:8]}"
    before, stamps, of_first = read_files(first), read_times(first), names(project)
    assert before.keys() == {*of_first, "index.json", "mdsmix.manifest"}
    in_place = project.convert_into("publish=replace")
    assert {**before, **project.files}.items() <= in_place.files.items(), "the same bytes"
    outcome, second = publish(project, OTHER)
    assert (outcome.done, outcome.reused) == (1, outcome.units - 1)
    shared = of_first & names(project)
    assert len(shared) == len(of_first) - 1
    assert all(os.path.samefile(first / name, second / name) for name in shared)
    assert not {"index.json", *names(project)} & project.files.keys(), "nothing is kept twice"
    again = read_times(project.out)
    assert project.run().state == "up to date"
    assert read_times(project.out) == again
    outcome, third = publish(project, TEXTS)
    assert (third, outcome.done) == (first, 0), "one that comes back is the one that is there"
    assert (read_files(first), read_times(first)) == (before, stamps)


def test_everything_that_reads_a_stream_finds_the_current_version(
    project: Project, second: Path
) -> None:
    train = project.train
    for place in (train.parent, train, second):
        assert find_published(locate(place)) == locate(second)
        (stream,) = resolve_mix([str(place)]).streams
        assert stream.folder == locate(second)
        assert stream.trusted_manifest is not None
        assert run_ok("verify", place).out.startswith(f"{second}: ")
        assert run_ok("gc", place).out.startswith(f"{train}: 0 files")
        assert run_ok("inspect", place).code == run_ok("check", place).code
    for place in (train.parent, train):
        mixing = project.folder / f"of {place.name}"
        mixing.mkdir()
        loader, streams = {"name": "text"}, {"old": {"local": str(place)}}
        recipe = write_recipe(mixing, project.tokenizer, streams=streams, train_loader=loader)
        (read,) = resolve_mix([str(recipe)]).streams
        assert read.settings == {"local": str(train.parent), "split": second.name}


def test_what_is_rendered_reads_the_version(project: Project) -> None:
    _, first = publish(project, TEXTS)
    stream = project.train.parent
    local = {"local": str(stream), "split": first.name}
    cached = {"local": f"/cache/web-{first.name[-8:]}", "remote": str(stream), "split": first.name}
    elsewhere = [f"remote={project.out}", "local=/cache"]
    for given, settings in (([], local), (elsewhere, cached)):
        assert resolve_mix([str(project.recipe), *given]).streams[0].settings == settings
    rendered = project.folder / "train.yaml"
    run_ok("render-yaml", project.recipe, "-o", rendered)
    publish(project, OTHER)
    (read,) = resolve_mix([str(rendered)]).streams
    assert read.folder == locate(first), "what was rendered before stays what it was"
    rendered.write_text(rendered.read_text().replace(first.name, "train"))
    with pytest.raises(Unreachable, match=r"no index\.json; correct its split, train-[0-9a-f]{8}"):
        resolve_mix([str(rendered)])


def test_the_current_version_is_repaired_and_an_older_one_refused(
    project: Project, second: Path
) -> None:
    (first,) = {Path(v.url) for v in list_versions(locate(project.train))} - {second}
    before, damaged = read_files(project.out), sorted(project.shards)[:2]
    for shard in damaged:
        flip_byte(shard)
    # A run that was killed when it had filled the version leaves what it filled it with.
    shutil.copy(damaged[-1], project.train)
    (second / "mdsmix.manifest").unlink()
    assert mdsmix("verify", second).code == 3
    recipe, place = ("--recipe", project.recipe), project.train.parent
    answer = mdsmix("repair", second, *recipe, "publish=replace")
    assert_refused(
        answer, 2, f"with its current `publish` the recipe would not publish it at {second} again"
    )
    answer = run_ok("repair", place, *recipe, "--workers", 1)
    assert f"fault {damaged[0].name}: " in answer.out
    assert "repaired, 0 of 5 work units made again" in answer.out
    assert read_files(project.out) == before
    assert run_ok("repair", place, *recipe).out == f"{second}: whole, nothing to repair\n"
    (first / "index.json").write_bytes(b"{}")
    answer = mdsmix("repair", first, *recipe)
    assert_refused(answer, 2, f"only the current one, {second}, can be made again")


def test_damage_shared_by_hard_links_is_deleted_in_all_and_mended_in_one(project: Project) -> None:
    """A copy that is as large and as damaged must not take the place of the deleted one."""
    _, first = publish(project, TEXTS)
    of_first = names(project)
    _, second = publish(project, OTHER)
    before, name = read_files(second), min(of_first & names(project))
    with (second / name).open("r+b") as shard:
        shard.write(bytes([before[name][0] ^ 1]))
    assert mdsmix("verify", first).code == mdsmix("verify", second).code == 3
    run_ok("repair", project.train.parent, "--recipe", project.recipe, "--workers", 1)
    assert read_files(second) == before
    assert not (first / name).exists()


def age(project: Project, days: float) -> None:
    """Makes everything as old as if it had been done so much longer ago."""
    for path in project.out.rglob("*"):
        then = path.stat().st_mtime - days * DAY
        os.utime(path, (then, then))


@pytest.fixture
def four(project: Project) -> list[Path]:
    """Versions, a day apart, the last one now."""
    made = []
    for number in range(4):
        age(project, 1)
        made.append(publish(project, [f"Version {number}."])[1])
    return made


def found(project: Project, keep: int | None, days: float = 0) -> list[str]:
    garbage = find_garbage(locate(project.train), days * DAY, keep)
    return [item.name for item in garbage if item.kind.endswith("version")]


def listed(project: Project) -> set[Path]:
    return {Path(version.url) for version in list_versions(locate(project.train))}


def test_versions_stay_unless_told_and_a_while_after_replaced(
    four: list[Path], project: Project
) -> None:
    """One may be months old, and a job that opened it yesterday still reads it. One that was
    current again is as new as that.
    """
    first, second, third, _ = (path.name for path in four)
    kept = [(None, []), (1, [third, second, first]), (2, [second, first]), (3, [first]), (4, [])]
    for keep, names in kept:
        assert found(project, keep) == names
    for path in four[2].iterdir():
        os.utime(path, (0, 0))
    ages = [(0, 0.5, [second, first]), (0, 1.5, [first]), (0, 7, []), (5.5, 7, [first])]
    for days, least, names in [*ages, (2, 7, [third, second, first])]:
        age(project, days)
        assert found(project, 1, least) == names
    for number in (0, 3):
        age(project, 1)
        assert publish(project, [f"Version {number}."])[1] == four[number]
    assert found(project, 2) == [third, second]
    assert found(project, 2, 9.9) == [second]


def test_what_is_deleted_and_what_is_not(four: list[Path], project: Project) -> None:
    half = four[0] / f"mdsmix.manifest.{'0' * 16}.tmp"
    half.write_bytes(b"half of it")
    (left,) = (g for g in find_garbage(locate(project.train), 0) if g.kind == "unfinished write")
    assert left.name == f"{half.parent.name}/{half.name}"
    left.discard()
    assert not half.exists()
    stream = project.train.parent
    before = read_files(stream)
    assert run_ok("gc", project.train, "--keep", 2).out.endswith("0 bytes: all files are in use\n")
    age(project, 8)
    strange = four[0] / "notes.txt"
    strange.write_text("not ours")
    command = ("gc", four[1], "--keep", 2)
    assert f"days  {four[1].name}\n" in run_ok(*command).out
    assert listed(project) == set(four)
    run_ok(*command, "--delete")
    assert listed(project) == {four[0], *four[2:]}
    assert list(four[0].iterdir()) == [strange]
    kept = (four[2].name, four[3].name)
    left_of, had = (
        {n for n in each if n.startswith(kept)} for each in (read_files(stream), before)
    )
    assert left_of == had
    assert run_ok("verify", four[2]).code == run_ok("verify", four[3]).code
    assert len(list((project.train / ".mdsmix").glob("*.replaced"))) == 1
    assert project.run().state == "up to date"
    assert found(project, 2) == []


def test_half_a_version_goes_and_the_current_one_stays(four: list[Path], project: Project) -> None:
    for half in (four[0], four[3]):
        (half / "index.json").unlink()
    assert found(project, None) == [four[0].name]
    assert found(project, 2) == [four[1].name, four[0].name]
    assert found(project, 1, time.time()) == []
