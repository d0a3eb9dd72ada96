"""Streams published as versions: a version never changes, versions share unchanged shards, and
every command finds the current one. Versions are deleted only on request, the oldest first, but
never the current one or one that was replaced recently.
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
"Texts that differ from TEXTS in the first work unit."
DAY = 86_400.0


@pytest.fixture
def project(project: Project) -> Project:
    project.set_window_size(300)
    return project.configure(documents("a.jsonl", layout="document"), publish="versioned")


def publish(project: Project, texts: list[str]) -> tuple[Outcome, Path]:
    """Write a source and convert it. Return the outcome and the folder of the current version."""
    project.write_source(texts)
    return project.run(), project.shards[0].parent


@pytest.fixture
def second(project: Project) -> Path:
    """The folder of the second of two versions."""
    publish(project, TEXTS)
    return publish(project, OTHER)[1]


def shard_names(project: Project) -> set[str]:
    return {path.name for path in project.shards}


def test_a_version_never_changes_and_shares_its_unchanged_shards(project: Project) -> None:
    _, first = publish(project, TEXTS)
    assert first.name == f"train-{project.manifest.index_hash[:8]}"
    before = read_files(first)
    times = read_times(first)
    shards_of_first = shard_names(project)
    assert before.keys() == {*shards_of_first, "index.json", "mdsmix.manifest"}
    in_place = project.convert_into("publish=replace")
    assert {**before, **project.files}.items() <= in_place.files.items(), "the same bytes"
    outcome, second = publish(project, OTHER)
    assert (outcome.done, outcome.reused) == (1, outcome.units - 1)
    shared = shards_of_first & shard_names(project)
    assert len(shared) == len(shards_of_first) - 1
    assert all(os.path.samefile(first / name, second / name) for name in shared)
    assert not {"index.json", *shard_names(project)} & project.files.keys(), (
        "the target has no copies"
    )
    times_of_all = read_times(project.out)
    assert project.run().state == "up to date"
    assert read_times(project.out) == times_of_all
    outcome, third = publish(project, TEXTS)
    assert (third, outcome.done) == (first, 0), "the existing version is current again"
    assert (read_files(first), read_times(first)) == (before, times)


def test_every_command_finds_the_current_version(project: Project, second: Path) -> None:
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
        folder = project.folder / f"of {place.name}"
        folder.mkdir()
        loader = {"name": "text"}
        streams = {"old": {"local": str(place)}}
        recipe = write_recipe(folder, project.tokenizer, streams=streams, train_loader=loader)
        (resolved,) = resolve_mix([str(recipe)]).streams
        assert resolved.settings == {"local": str(train.parent), "split": second.name}


def test_a_rendered_yaml_names_the_version(project: Project) -> None:
    _, first = publish(project, TEXTS)
    stream = project.train.parent
    local = {"local": str(stream), "split": first.name}
    cached = {"local": f"/cache/web-{first.name[-8:]}", "remote": str(stream), "split": first.name}
    overrides_for_cache = [f"remote={project.out}", "local=/cache"]
    for overrides, settings in (([], local), (overrides_for_cache, cached)):
        assert resolve_mix([str(project.recipe), *overrides]).streams[0].settings == settings
    rendered = project.folder / "train.yaml"
    run_ok("render-yaml", project.recipe, "-o", rendered)
    publish(project, OTHER)
    (resolved,) = resolve_mix([str(rendered)]).streams
    assert resolved.folder == locate(first), "a YAML keeps its version"
    rendered.write_text(rendered.read_text().replace(first.name, "train"))
    with pytest.raises(
        Unreachable, match=r"no index\.json; correct its split, which is train-[0-9a-f]{8}"
    ):
        resolve_mix([str(rendered)])


def test_only_the_current_version_can_be_repaired(project: Project, second: Path) -> None:
    (first,) = {Path(v.url) for v in list_versions(locate(project.train))} - {second}
    before = read_files(project.out)
    damaged = sorted(project.shards)[:2]
    for shard in damaged:
        flip_byte(shard)
    # A run that was killed after filling the version leaves its shards in the target too.
    shutil.copy(damaged[-1], project.train)
    (second / "mdsmix.manifest").unlink()
    assert mdsmix("verify", second).code == 3
    recipe = ("--recipe", project.recipe)
    stream = project.train.parent
    answer = mdsmix("repair", second, *recipe, "publish=replace")
    assert_refused(
        answer, 2, f"with its current `publish` the recipe would not publish it at {second} again"
    )
    answer = run_ok("repair", stream, *recipe, "--workers", 1)
    assert f"fault {damaged[0].name}: " in answer.out
    assert "repaired, 0 of 5 work units made again" in answer.out
    assert read_files(project.out) == before
    assert run_ok("repair", stream, *recipe).out == f"{second}: whole, nothing to repair\n"
    (first / "index.json").write_bytes(b"{}")
    answer = mdsmix("repair", first, *recipe)
    assert_refused(answer, 2, f"only the current version {second} can be repaired")


def test_damage_in_hard_links_is_deleted_in_all_versions_and_repaired_in_one(
    project: Project,
) -> None:
    """The deleted shard must not be replaced by another version's link to the damaged file."""
    _, first = publish(project, TEXTS)
    shards_of_first = shard_names(project)
    _, second = publish(project, OTHER)
    before = read_files(second)
    name = min(shards_of_first & shard_names(project))
    with (second / name).open("r+b") as shard:
        shard.write(bytes([before[name][0] ^ 1]))
    assert mdsmix("verify", first).code == mdsmix("verify", second).code == 3
    run_ok("repair", project.train.parent, "--recipe", project.recipe, "--workers", 1)
    assert read_files(second) == before
    assert not (first / name).exists()


def make_older(project: Project, days: float) -> None:
    """Subtract so many days from the modification times of all published files."""
    for path in project.out.rglob("*"):
        seconds = path.stat().st_mtime - days * DAY
        os.utime(path, (seconds, seconds))


@pytest.fixture
def four(project: Project) -> list[Path]:
    """Four versions, published a day apart, the last one now."""
    versions = []
    for number in range(4):
        make_older(project, 1)
        versions.append(publish(project, [f"Version {number}."])[1])
    return versions


def list_garbage(project: Project, keep: int | None, days: float = 0) -> list[str]:
    """Return the names of versions that `gc` would delete."""
    garbage = find_garbage(locate(project.train), days * DAY, keep)
    return [item.name for item in garbage if item.kind.endswith("version")]


def find_versions(project: Project) -> set[Path]:
    return {Path(version.url) for version in list_versions(locate(project.train))}


def test_versions_are_kept_unless_asked_and_for_a_while_after_they_are_replaced(
    four: list[Path], project: Project
) -> None:
    """A version may be months old, and a job that opened it yesterday still reads it. The age of a
    version that was current again counts from then.
    """
    first, second, third, _ = (path.name for path in four)
    expected = [
        (None, []),
        (1, [third, second, first]),
        (2, [second, first]),
        (3, [first]),
        (4, []),
    ]
    for keep, names in expected:
        assert list_garbage(project, keep) == names
    for path in four[2].iterdir():
        os.utime(path, (0, 0))
    ages = [(0, 0.5, [second, first]), (0, 1.5, [first]), (0, 7, []), (5.5, 7, [first])]
    for days, older_than, names in [*ages, (2, 7, [third, second, first])]:
        make_older(project, days)
        assert list_garbage(project, 1, older_than) == names
    for number in (0, 3):
        make_older(project, 1)
        assert publish(project, [f"Version {number}."])[1] == four[number]
    assert list_garbage(project, 2) == [third, second]
    assert list_garbage(project, 2, 9.9) == [second]


def test_gc_deletes_old_versions_but_no_file_of_others(four: list[Path], project: Project) -> None:
    unfinished = four[0] / f"mdsmix.manifest.{'0' * 16}.tmp"
    unfinished.write_bytes(b"half of it")
    garbage = find_garbage(locate(project.train), 0)
    (item,) = (item for item in garbage if item.kind == "unfinished write")
    assert item.name == f"{unfinished.parent.name}/{unfinished.name}"
    item.discard()
    assert not unfinished.exists()
    stream = project.train.parent
    before = read_files(stream)
    assert run_ok("gc", project.train, "--keep", 2).out.endswith("0 bytes: nothing to delete\n")
    make_older(project, 8)
    notes = four[0] / "notes.txt"
    notes.write_text("not a file of mdsmix")
    command = ("gc", four[1], "--keep", 2)
    assert f"days  {four[1].name}\n" in run_ok(*command).out
    assert find_versions(project) == set(four)
    run_ok(*command, "--delete")
    assert find_versions(project) == {four[0], *four[2:]}
    assert list(four[0].iterdir()) == [notes]
    kept = (four[2].name, four[3].name)
    files_before = {name for name in before if name.startswith(kept)}
    assert {name for name in read_files(stream) if name.startswith(kept)} == files_before
    assert run_ok("verify", four[2]).code == run_ok("verify", four[3]).code
    assert len(list((project.train / ".mdsmix").glob("*.replaced"))) == 1
    assert project.run().state == "up to date"
    assert list_garbage(project, 2) == []


def test_an_unfinished_version_is_deleted_unless_it_is_current(
    four: list[Path], project: Project
) -> None:
    for version in (four[0], four[3]):
        (version / "index.json").unlink()
    assert list_garbage(project, None) == [four[0].name]
    assert list_garbage(project, 2) == [four[1].name, four[0].name]
    assert list_garbage(project, 1, time.time()) == []
