"""Files that the manifest names: the files of a long list of sources, which are read only if names
are needed, and side files of shards. Damage to one is noticed and repaired.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mdsmix.conversion.gc import find_garbage
from mdsmix.storage import locate
from mdsmix.storage.local import LocalPath
from tests.converting import (
    Project,
    documents,
    flip_byte,
    list_in_parts,
    mdsmix,
    read_files,
    read_times,
    run_ok,
)


@pytest.fixture
def project(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A stream of eight sources and an empty one, whose list is in files of its own."""
    list_in_parts(monkeypatch)
    for name in "abcdefgh":
        project.write_source([f"This is the file {name}. " * 5], f"{name}.jsonl")
    project.write_source([], "empty.jsonl")
    project.run()
    return project


def test_a_long_list_is_in_files_of_its_own_and_a_short_one_in_the_manifest(
    project: Project,
) -> None:
    split = project.train
    manifest = project.manifest
    times_before = read_times(split)
    sources = list(manifest.read_sources(locate(split)))
    assert [source.path for source in sources] == [f"{name}.jsonl" for name in "abcdefgh"]
    assert (manifest.sources, manifest.source_count) == ([], 8)
    file_names = {path.name for path in split.glob("*.sources.zst")}
    assert file_names
    assert {source_list.name for source_list in manifest.source_parts} == file_names
    assert project.run().state == "up to date"
    assert read_times(split) == times_before
    project.patch.undo()
    short = project.convert_into()
    assert short.manifest == replace(manifest, sources=sources, source_parts=[])
    assert b"source_parts" not in short.manifest.to_bytes()
    assert short.rows == project.rows


def test_commands_read_the_names_of_sources_only_if_they_need_them(project: Project) -> None:
    fetched = list[str]()
    real_fetch = LocalPath.fetch

    def fetch(self: LocalPath, limit: int = 1 << 62) -> object:
        fetched.append(self.name)
        return real_fetch(self, limit)

    project.patch.setattr(LocalPath, "fetch", fetch)
    run_ok("inspect", "--json", project.recipe)
    assert "8 files" in run_ok("inspect", project.train).out
    assert "mdsmix.manifest" in fetched
    assert not [name for name in fetched if name.endswith(".zst")]
    # `check` needs the names, since the formats of the sources decide whether rows are outdated;
    # `render-yaml` also compares a recipe's sources with those that were converted.
    lists = sorted(path.name for path in Path(project.train).glob("*.sources.zst"))
    for command, target, limit in (("check", project.train, 1), ("render-yaml", project.recipe, 2)):
        fetched.clear()
        run_ok(command, target)
        reads_of_lists = Counter(name for name in fetched if name in lists)
        assert max(reads_of_lists.values()) <= limit


def test_a_damaged_list_is_noticed_and_made_again_by_repair_or_a_conversion(
    project: Project,
) -> None:
    for publish, damage in (("replace", flip_byte), ("versioned", Path.unlink)):
        settings = (f"publish={publish}", f"local={project.folder / publish}")
        outcome = project.run(*settings)
        place = Path(outcome.target)
        if publish == "versioned":
            place = place.with_name(f"train-{outcome.manifest.index_hash[:8]}")
        files_before = read_files(project.folder / publish)
        list_file, *_ = sorted(place.glob("*.sources.zst"))
        damage(list_file)
        answer = mdsmix("verify", place)
        assert answer.code == 3
        assert f"fault {list_file.name}: " in answer.out
        output = run_ok("repair", place, "--recipe", project.recipe, *settings, "--workers", 1).out
        assert "0 of " in output, "no unit is converted again for a list of names"
        assert read_files(project.folder / publish) == files_before
        run_ok("verify", place)
        for damage_again, options in (
            (Path.unlink, ()),
            (flip_byte, ("--verify-target", "--workers", 1)),
        ):
            damage_again(list_file)
            project.convert_ok(*settings, *options)
            assert read_files(project.folder / publish) == files_before


def test_gc_keeps_a_side_file_and_its_damage_is_noticed(project: Project) -> None:
    stream = documents("*.jsonl", layout="document")
    stream["source"]["id"] = "text"
    project.configure(stream).run()
    side_file, *_ = project.train.glob("*.ids.side")
    unnamed = side_file.with_name(f"{'0' * 32}.ids.side")
    unnamed.touch()
    garbage = find_garbage(locate(project.train), 0)
    assert [item.name for item in garbage if item.kind == "side file"] == [unnamed.name]
    run_ok("verify", project.train)
    content = side_file.read_bytes()
    wrong_size = f"expected {len(content)} bytes, found {len(content) - 1}"
    for problem, damaged in (
        ("the file's xxh128 hash is", content[:-1] + b"x"),
        (wrong_size, content[1:]),
    ):
        side_file.write_bytes(damaged)
        answer = mdsmix("verify", project.train)
        assert answer.code == 3
        assert f"fault {side_file.name}: {problem}" in answer.out
