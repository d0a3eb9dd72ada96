"""A long list of sources lies in parts beside the manifest: read only where names are asked for, whole or not at all."""

from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from mdsmix.convert.garbage import find_garbage
from mdsmix.shards.side_files import SideFile
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
    assert "8 files" in mdsmix("inspect", split).out
    assert "mdsmix.manifest" in fetched
    assert not [name for name in fetched if name.endswith(".zst")]


def test_a_part_that_is_spoiled_is_said_and_made_anew_by_repair_or_the_next_conversion(
    recipe: Path,
) -> None:
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
        for spoil, more in ((Path.unlink, ()), (flip, ("--verify-target", "--workers", 1))):
            spoil(part)
            mended = mdsmix("convert", recipe, *settings, *more)
            assert mended.code == 0, mended
            assert files(recipe.parent / publish) == before


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
