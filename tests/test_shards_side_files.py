"""A long list of sources lies in parts beside the manifest: read only where names are asked for, whole or not at all."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.convert.garbage import find_garbage
from mdsmix.errors import RecipeError
from mdsmix.shards import side_files
from mdsmix.shards.side_files import SideFile, SourceEntry, read_part, store_sources
from mdsmix.storage import Location, locate
from mdsmix.storage.local import LocalPath
from tests.converting import (
    documents,
    files,
    flip,
    list_in_parts,
    manifest_of,
    mdsmix,
    run_recipe,
    times,
    token_rows,
    write_jsonl,
    write_recipe,
)

NAMES = st.sets(st.text("ab/\u00e9", min_size=1, max_size=6), min_size=1, max_size=12)


def entry(path: str) -> SourceEntry:
    return SourceEntry(path=path, size=len(path), hash=xxhash.xxh128_hexdigest(path))


@settings(deadline=None, max_examples=12)
@given(names=NAMES)
def test_a_list_comes_back_in_the_order_of_its_names(
    names: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = locate(tmp_path_factory.mktemp("parts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_files, "FILES_A_PART", 3)
        parts = store_sources(folder, [entry(name) for name in names])
    listed = [source for part in parts for source in read_part(folder, part)]
    assert listed == [entry(name) for name in sorted(names)]
    assert [part.files for part in parts[:-1]] == [3] * (len(parts) - 1)


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight sources and an empty one; their list is in parts."""
    list_in_parts(monkeypatch)
    for name in "abcdefgh":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"This is the file {name}. " * 5}])
    (tmp_path / "empty.jsonl").touch()
    return write_recipe(tmp_path, tokenizer_folder, streams={"web": documents("*.jsonl")})


@pytest.fixture
def split(recipe: Path) -> Path:
    run_recipe(recipe)
    return recipe.parent / "out" / "web" / "train"


def parts_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.sources.zst"))


def test_a_long_list_is_beside_the_manifest_and_a_short_one_in_it(
    recipe: Path, split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, rows = manifest_of(split), token_rows(split)
    names = [f"{name}.jsonl" for name in "abcdefgh"]
    assert [s.path for s in manifest.read_sources(locate(split))] == names
    assert (manifest.sources, manifest.source_count) == ([], 8)
    assert [split / part.name for part in manifest.source_parts] != []
    assert {part.name for part in manifest.source_parts} == {p.name for p in parts_in(split)}
    before = times(split)
    assert run_recipe(recipe)[0].state == "up to date"
    assert times(split) == before
    monkeypatch.undo()
    (short,) = run_recipe(recipe, f"local={recipe.parent / 'short'}")
    assert short.manifest == replace(
        manifest, sources=list(manifest.read_sources(locate(split))), source_parts=[]
    )
    assert b"source_parts" not in short.manifest.to_bytes()
    assert token_rows(short.target) == rows


def test_who_needs_no_names_reads_none(
    recipe: Path, split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    real = LocalPath.fetch

    def fetch(self: LocalPath, most: int = 1 << 62) -> object:
        fetched.append(self.name)
        return real(self, most)

    monkeypatch.setattr(LocalPath, "fetch", fetch)
    for command in ("check", "render-yaml"):
        assert mdsmix(command, recipe).code == 0
    for command in (("inspect", recipe), ("inspect", split, "--json")):
        assert "8" in mdsmix(*command).out
    assert "mdsmix.manifest" in fetched
    assert not [name for name in fetched if name.endswith(".zst")]
    shown = mdsmix("inspect", split).out
    assert "8 files" in shown


def test_an_edited_source_writes_its_part_and_no_other(recipe: Path, split: Path) -> None:
    before = {path.name for path in parts_in(split)}
    write_jsonl(recipe.parent / "c.jsonl", [{"text": "Another text in c."}])
    os.remove(recipe.parent / "h.jsonl")
    dry = mdsmix("convert", recipe, "--dry-run", "--reencode").out
    assert "not whole at the target: those of " in dry
    assert "h.jsonl is no longer among its sources: about 1 of the 8 records" in dry
    run_recipe(recipe, reencode=True)
    now = {part.name for part in manifest_of(split).source_parts}
    assert 0 < len(now - before) <= 2
    assert mdsmix("verify", split).code == 0
    gone = {item.name: item.kind for item in find_garbage(locate(split), 0)}
    assert {name for name, kind in gone.items() if kind == "source list"} == before - now


def test_a_part_that_is_spoiled_is_said_and_made_anew_by_repair(recipe: Path) -> None:
    for publish, spoil in (("replace", flip), ("versioned", Path.unlink)):
        settings = (f"publish={publish}", f"local={recipe.parent / publish}")
        (outcome,) = run_recipe(recipe, *settings)
        place = Path(outcome.target)
        if publish == "versioned":
            place = place.with_name(f"train-{outcome.manifest.index_hash[:8]}")
        before, part = files(recipe.parent / publish), parts_in(place)[0]
        spoil(part)
        answer = mdsmix("verify", place)
        assert answer.code == 3
        assert f"fault {part.name}: " in answer.out
        mended = mdsmix("repair", place, "--recipe", recipe, *settings, "--workers", 1)
        assert mended.code == 0, mended
        assert "0 of " in mended.out, "no unit is converted again for a list of names"
        assert files(recipe.parent / publish) == before
        assert mdsmix("verify", place).code == 0


def test_the_next_conversion_writes_a_lost_part_anew_and_verify_target_a_damaged_one(
    recipe: Path, split: Path
) -> None:
    before, parts = files(split), manifest_of(split).source_parts
    (split / parts[0].name).unlink()
    assert mdsmix("convert", recipe).code == 0
    assert files(split) == before
    flip(split / parts[-1].name)
    answer = mdsmix("convert", recipe, "--verify-target", "--workers", 1)
    assert answer.code == 0, answer
    assert f"{locate(split) / parts[-1].name} is damaged" in answer.err
    assert files(split) == before


def test_a_repair_knows_how_many_names_a_spoiled_part_had(recipe: Path, split: Path) -> None:
    before = files(split)
    parts_in(split)[0].unlink()
    write_jsonl(recipe.parent / "i.jsonl", [{"text": "one more"}])
    answer = mdsmix("repair", split, "--recipe", recipe)
    assert answer.code == 2
    assert "files of its source were added, removed or changed since" in answer.err
    assert files(split).items() <= before.items(), "nothing is touched"


def test_another_stream_in_its_place_is_refused_by_its_names(recipe: Path, split: Path) -> None:
    folder = recipe.parent
    for path in folder.glob("?.jsonl"):
        path.unlink()
    write_jsonl(folder / "z.jsonl", [{"text": "something else"}])
    with pytest.raises(
        RecipeError, match=r"a\.jsonl, b\.jsonl, c\.jsonl and 5 more are no longer among"
    ):
        run_recipe(recipe)
    for name in "abcdefgh":
        write_jsonl(folder / f"moved-{name}.jsonl", [{"text": f"This is the file {name}. " * 5}])
    assert run_recipe(recipe)[0].state != "up to date"


def beside_a_shard(folder: Location, content: bytes) -> SideFile:
    """A side file of the folder's first shard, as a writer of such files would write it."""
    shard = next(name for name, _ in folder.list() if name.endswith(".mds"))
    digest = xxhash.xxh128_hexdigest(content)
    name = f"{digest}.marks.side"
    (folder / name).write(content)
    return SideFile(name=name, bytes=len(content), hash=digest, kind="marks", shard=shard)


def test_a_side_file_of_a_shard_is_no_garbage_and_its_damage_is_found(split: Path) -> None:
    folder = locate(split)
    named, other = beside_a_shard(folder, b"marks"), beside_a_shard(folder, b"old marks")
    ours = manifest_of(split).side_files
    manifest = replace(manifest_of(split), side_files=[*ours, named])
    (folder / "mdsmix.manifest").write(manifest.to_bytes())
    assert manifest_of(split) == manifest
    garbage = {item.name for item in find_garbage(folder, 0) if item.kind == "side file"}
    assert garbage == {other.name}
    assert mdsmix("verify", split).code == 0
    for problem, content in (("its xxh128 is", b"mark5"), ("expected 5 bytes", b"mark")):
        (folder / named.name).write(content)
        answer = mdsmix("verify", split)
        assert answer.code == 3
        assert f"fault {named.name}: {problem}" in answer.out
