"""A long list of sources lies in parts beside the manifest: read only where names are asked for, whole or not at all."""

from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from mdsmix.convert.garbage import find_garbage
from mdsmix.shards.side_files import SideFile
from mdsmix.storage import Location, locate
from mdsmix.storage.local import LocalPath
from tests.converting import Web, files, flip, list_in_parts, mdsmix, times


@pytest.fixture
def web(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    """Eight sources and an empty one; their list is in parts."""
    list_in_parts(monkeypatch)
    for name in "abcdefgh":
        web.holds([f"This is the file {name}. " * 5], f"{name}.jsonl")
    web.holds([], "empty.jsonl")
    return web


@pytest.fixture
def split(web: Web) -> Path:
    web.run()
    return web.train


def test_a_long_list_is_beside_the_manifest_and_a_short_one_in_it(
    web: Web, split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, before = web.manifest, times(split)
    sources = list(manifest.read_sources(locate(split)))
    assert [source.path for source in sources] == [f"{name}.jsonl" for name in "abcdefgh"]
    assert (manifest.sources, manifest.source_count) == ([], 8)
    parts = {path.name for path in split.glob("*.sources.zst")}
    assert {part.name for part in manifest.source_parts} == parts != set()
    assert web.run().state == "up to date"
    assert times(split) == before
    monkeypatch.undo()
    short = web.anew()
    assert short.manifest == replace(manifest, sources=sources, source_parts=[])
    assert b"source_parts" not in short.manifest.to_bytes()
    assert short.rows == web.rows


def test_few_read_names(web: Web, split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, real = list[str](), LocalPath.fetch

    def fetch(self: LocalPath, most: int = 1 << 62) -> object:
        fetched.append(self.name)
        return real(self, most)

    monkeypatch.setattr(LocalPath, "fetch", fetch)
    for command in ("check", "render-yaml"):
        assert mdsmix(command, web.recipe).code == 0
    for command in (("inspect", web.recipe), ("inspect", split, "--json")):
        assert "8" in mdsmix(*command).out
    assert "8 files" in mdsmix("inspect", split).out
    assert "mdsmix.manifest" in fetched
    assert not [name for name in fetched if name.endswith(".zst")]


def test_a_spoiled_part_is_said_and_made_anew_by_repair_or_a_conversion(web: Web) -> None:
    for publish, spoil in (("replace", flip), ("versioned", Path.unlink)):
        settings = (f"publish={publish}", f"local={web.folder / publish}")
        outcome = web.run(*settings)
        place = Path(outcome.target)
        if publish == "versioned":
            place = place.with_name(f"train-{outcome.manifest.index_hash[:8]}")
        before, (part, *_) = files(web.folder / publish), sorted(place.glob("*.sources.zst"))
        spoil(part)
        answer = mdsmix("verify", place)
        assert answer.code == 3
        assert f"fault {part.name}: " in answer.out
        mended = mdsmix("repair", place, "--recipe", web.recipe, *settings, "--workers", 1)
        assert mended.code == 0, mended
        assert "0 of " in mended.out, "no unit is converted again for a list of names"
        assert files(web.folder / publish) == before
        assert mdsmix("verify", place).code == 0
        for spoil, more in ((Path.unlink, ()), (flip, ("--verify-target", "--workers", 1))):
            spoil(part)
            mended = web.convert(*settings, *more)
            assert mended.code == 0, mended
            assert files(web.folder / publish) == before


def beside_a_shard(folder: Location, content: bytes) -> SideFile:
    """A side file of the folder's first shard, as a writer of such files would write it."""
    shard = next(name for name, _ in folder.list() if name.endswith(".mds"))
    digest = xxhash.xxh128_hexdigest(content)
    name = f"{digest}.marks.side"
    (folder / name).write(content)
    return SideFile(name=name, bytes=len(content), hash=digest, kind="marks", shard=shard)


def test_a_side_file_is_no_garbage_and_its_damage_is_found(web: Web, split: Path) -> None:
    folder = locate(split)
    named, other = beside_a_shard(folder, b"marks"), beside_a_shard(folder, b"old marks")
    manifest = replace(web.manifest, side_files=[*web.manifest.side_files, named])
    (folder / "mdsmix.manifest").write(manifest.to_bytes())
    assert web.manifest == manifest
    garbage = {item.name for item in find_garbage(folder, 0) if item.kind == "side file"}
    assert garbage == {other.name}
    assert mdsmix("verify", split).code == 0
    for problem, content in (("its xxh128 is", b"mark5"), ("expected 5 bytes", b"mark")):
        (folder / named.name).write(content)
        answer = mdsmix("verify", split)
        assert answer.code == 3
        assert f"fault {named.name}: {problem}" in answer.out
