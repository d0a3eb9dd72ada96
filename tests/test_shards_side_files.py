"""A long list of sources lies in parts beside the manifest: read only where names are asked for,
whole or not at all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mdsmix.conversion.gc import find_garbage
from mdsmix.storage import locate
from mdsmix.storage.local import LocalPath
from tests.converting import Web, documents, done, files, flip, list_in_parts, mdsmix, times


@pytest.fixture
def web(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    """A stream of eight sources and an empty one; their list is in parts."""
    list_in_parts(monkeypatch)
    for name in "abcdefgh":
        web.holds([f"This is the file {name}. " * 5], f"{name}.jsonl")
    web.holds([], "empty.jsonl")
    web.run()
    return web


def test_a_long_list_is_beside_the_manifest_and_a_short_one_in_it(web: Web) -> None:
    split, manifest, before = web.train, web.manifest, times(web.train)
    sources = list(manifest.read_sources(locate(split)))
    assert [source.path for source in sources] == [f"{name}.jsonl" for name in "abcdefgh"]
    assert (manifest.sources, manifest.source_count) == ([], 8)
    parts = {path.name for path in split.glob("*.sources.zst")}
    assert {part.name for part in manifest.source_parts} == parts != set()
    assert web.run().state == "up to date"
    assert times(split) == before
    web.patch.undo()
    short = web.anew()
    assert short.manifest == replace(manifest, sources=sources, source_parts=[])
    assert b"source_parts" not in short.manifest.to_bytes()
    assert short.rows == web.rows


def test_few_read_names(web: Web) -> None:
    fetched, real = list[str](), LocalPath.fetch

    def fetch(self: LocalPath, most: int = 1 << 62) -> object:
        fetched.append(self.name)
        return real(self, most)

    web.patch.setattr(LocalPath, "fetch", fetch)
    done("inspect", "--json", web.recipe)
    assert "8 files" in done("inspect", web.train).out
    assert "mdsmix.manifest" in fetched
    assert not [name for name in fetched if name.endswith(".zst")]
    # Which formats the sources have decides whether rows are outdated; a recipe's sources are
    # compared with those that were converted.
    lists = sorted(path.name for path in Path(web.train).glob("*.sources.zst"))
    for command, target, most in (("check", web.train, 1), ("render-yaml", web.recipe, 2)):
        fetched.clear()
        done(command, target)
        assert max(Counter(name for name in fetched if name in lists).values()) <= most


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
        said = done("repair", place, "--recipe", web.recipe, *settings, "--workers", 1).out
        assert "0 of " in said, "no unit is converted again for a list of names"
        assert files(web.folder / publish) == before
        done("verify", place)
        for spoil, more in ((Path.unlink, ()), (flip, ("--verify-target", "--workers", 1))):
            spoil(part)
            web.done(*settings, *more)
            assert files(web.folder / publish) == before


def test_a_side_file_is_no_garbage_and_its_damage_is_found(web: Web) -> None:
    stream = documents("*.jsonl", layout="document")
    stream["source"]["id"] = "text"
    web.says(stream).run()
    side, *_ = web.train.glob("*.ids.side")
    other = side.with_name(f"{'0' * 32}.ids.side")
    other.touch()
    found = find_garbage(locate(web.train), 0)
    assert [item.name for item in found if item.kind == "side file"] == [other.name]
    done("verify", web.train)
    content = side.read_bytes()
    short = f"expected {len(content)} bytes, found {len(content) - 1}"
    for problem, damaged in (("its xxh128 is", content[:-1] + b"x"), (short, content[1:])):
        side.write_bytes(damaged)
        answer = mdsmix("verify", web.train)
        assert (answer.code, f"fault {side.name}: {problem}" in answer.out) == (3, True), answer
