"""Marks that conversions publish, and what `mdsmix check` makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from mdsmix.convert.ledger import read_record, write_record
from mdsmix.mix import overlap
from mdsmix.overlap import estimate, grams, marks, stored
from mdsmix.overlap.estimate import Estimate, containment
from mdsmix.overlap.marks import Marking, Merged, parse
from mdsmix.ragged import Ragged
from mdsmix.shards.index import read_index
from mdsmix.storage import locate
from tests.converting import (
    chats,
    documents,
    manifest_of,
    mdsmix,
    pairs,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)


@pytest.fixture(autouse=True)
def keep_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half of all grams are kept, so that a few KB of text have some."""
    monkeypatch.setattr(grams, "_KEPT", np.uint16(1 << 15))
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))


def text(number: int) -> str:
    draw = np.random.default_rng(number)
    return " ".join(f"w{n}" for n in draw.integers(0, 1000, 30).tolist())


def streams(folder: Path, **settings: Any) -> dict[str, Any]:
    texts = write_jsonl(folder / "web.jsonl", [{"text": text(i)} for i in range(12)])
    asked = [{"prompt": text(i), "response": text(i + 40)} for i in range(8)]
    talk = [{"messages": [{"role": "user", "content": text(i)}, {"role": "assistant", "content": text(80 + i)}]} for i in range(8)]  # fmt: skip
    return {
        "rows": documents(texts, **settings),
        "whole": documents(texts, layout="document", **settings),
        "packed": documents(texts, layout="document", pack=True, **settings),
        "asked": pairs(write_jsonl(folder / "asked.jsonl", asked), **settings),
        "talk": chats(write_jsonl(folder / "talk.jsonl", talk), **settings),
    }


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the same documents twice, one packed."""
    windows(monkeypatch, 600)
    found = {name: s for name, s in streams(tmp_path).items() if name in ("whole", "packed")}
    path = write_recipe(tmp_path, tokenizer_folder, streams=found, max_seq_len=256)
    run_recipe(path)
    return path


def mark_of(folder: Path) -> bytes:
    (side,) = folder.glob("*.grams.side")
    return side.read_bytes()


def test_what_is_worked_out_of_shards_is_what_the_conversion_wrote(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that are joined, whole, packed, in two columns and in turns; units and the part of leftovers apart. And a mark that
    was lost is brought back."""
    windows(monkeypatch, 1500)
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams(tmp_path), max_seq_len=256)
    run_recipe(recipe)
    for name in ("rows", "whole", "packed", "asked", "talk"):
        folder = tmp_path / f"out/{name}/train"
        manifest, index = manifest_of(folder), read_index(locate(folder))
        assert len(manifest.parts) >= 2
        found = stored.work_out(locate(folder), index, manifest)
        assert found
        assert found.to_bytes() == mark_of(folder), name
        assert sum(unit.count for unit in found.units) > 50
    (side,) = (tmp_path / "out/rows/train").glob("*.grams.side")
    content = side.read_bytes()
    side.unlink()
    run_recipe(recipe, only=("rows",))
    assert side.read_bytes() == content


def test_a_run_that_changes_nothing_adds_no_mark_and_one_that_does_keeps_those_there(
    recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out/whole/train"
    before = mark_of(folder)
    for path in folder.glob(".mdsmix/*.grams"):
        path.unlink()
    assert {outcome.state for outcome in run_recipe(recipe)} == {"up to date"}
    assert mark_of(folder) == before
    write_jsonl(tmp_path / "web.jsonl", [{"text": text(i)} for i in range(13)])
    run_recipe(recipe, only=("whole",))
    (side,) = [s for s in manifest_of(folder).side_files if s.kind == marks.KIND]
    after = parse((folder / side.name).read_bytes())
    assert after
    assert [u.key for u in after.units] == [p.key for p in manifest_of(folder).parts]


def without_marks(folder: Path) -> bytes:
    """The stream as it was published before there were marks."""
    for path in (*folder.glob(".mdsmix/*.grams"), *folder.glob("*.grams.side")):
        path.unlink()
    for path in folder.glob(".mdsmix/*"):
        if "." not in path.name and path.name != "lease":
            record = read_record(locate(folder), path.name)
            assert record
            write_record(locate(folder), replace(record, marked=None))
    manifest = replace(manifest_of(folder), side_files=[])
    (folder / "mdsmix.manifest").write_bytes(manifest.to_bytes())
    return manifest.to_bytes()


def test_a_stream_without_a_mark_keeps_its_bytes_and_is_compared_all_the_same(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "out/whole/train", tmp_path / "out/packed/train"
    manifest = without_marks(old)
    assert {outcome.state for outcome in run_recipe(recipe)} == {"up to date"}
    command = ("check", old, "--eval", new, "--json")
    first = json.loads(mdsmix(*command).out)["overlap"]
    (pair,) = first["pairs"]
    assert (pair["share"], pair["is_evaluation"], first["unseen"]) == (1.0, True, [])
    with monkeypatch.context() as patch:
        patch.setattr(stored, "tokens_of", lambda *_: pytest.fail("it is in the cache"))
        assert json.loads(mdsmix(*command).out)["overlap"] == first
    assert (old / "mdsmix.manifest").read_bytes() == manifest
    assert not list(old.glob("*.side"))
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "another"))
    shard = next(old.glob("*.mds"))
    content = shard.read_bytes()
    shard.write_bytes(bytes(len(content)))
    answer = mdsmix("check", old, "--eval", new)
    assert (answer.code, answer.out.count("not all of its shards can be read")) == (0, 1)
    shard.write_bytes(content)
    monkeypatch.setattr(overlap, "OFFHAND_BYTES", 100)
    answer = mdsmix("check", old, "--eval", new)
    assert "overlap not looked at: " in answer.out
    assert "`mdsmix check --deep` reads them" in answer.out
    write_jsonl(tmp_path / "web.jsonl", [{"text": text(i)} for i in range(13)])
    run_recipe(recipe, only=("whole",))
    index = read_index(locate(old))
    assert parse(mark_of(old)), "of the unit that is new"
    assert stored.read_mark(locate(old), index, manifest_of(old)) is None, "not of all"


def test_a_check_says_what_is_shared_and_refuses_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = mdsmix("check", recipe)
    assert answer.code == 0
    assert answer.out.count("note overlap-streams") == 1, "of two that are alike, one"
    assert "100.0% (± " in answer.out
    assert "overlap-evaluation" not in answer.out
    page = tmp_path / "report.html"
    assert mdsmix("report", recipe, "--no-preview", "-o", page).code == 0
    assert page.read_text("utf-8").count("<code>overlap-streams</code>") == 1
    told = mdsmix("check", tmp_path / "out/whole", "--eval", tmp_path / "out/packed")
    assert "warning overlap-evaluation [packed, whole]: about 100.0%" in told.out
    assert f"mdsmix leaks {tmp_path}/out/whole/train --eval {tmp_path}/out/packed/train" in told.out
    assert "lower bound, of one tokenizer" in told.out
    assert told.code == 0
    other = tmp_path / "out/packed/train/mdsmix.manifest"
    content = other.read_bytes()
    hash = manifest_of(other.parent).tokenizer.hash
    other.write_bytes(content.replace(hash.encode(), b"0" * len(hash)))
    answer = mdsmix("check", tmp_path / "out/whole", "--eval", tmp_path / "out/packed")
    assert "overlap not looked at: packed: its ids are of another tokenizer" in answer.out
    other.write_bytes(content)
    monkeypatch.setattr(estimate, "FEW", 100_000)
    answer = mdsmix("check", tmp_path / "out/whole", "--eval", tmp_path / "out/packed")
    assert "overlap: too little text for an estimate of packed, which" in answer.out
    assert "overlap-evaluation" not in answer.out


def test_a_damaged_mark_is_none(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out/whole/train"
    (side,) = folder.glob("*.grams.side")
    content = side.read_bytes()
    for damaged in (content[:-1], b"", content[:-1] + bytes([content[-1] ^ 1])):
        side.write_bytes(damaged)
        manifest, index = manifest_of(folder), read_index(locate(folder))
        assert stored.read_mark(locate(folder), index, manifest) is None
    assert mdsmix("verify", folder).code == 3


@pytest.mark.parametrize(("true", "halvings"), [(0.0, 0), (0.1, 0), (0.1, 3), (1.0, 0)])
def test_an_estimate_is_within_its_error(true: float, halvings: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A mark of 1 in 256 of two million tokens, against the share of rows that was put into the other stream."""
    monkeypatch.setattr(grams, "_KEPT", np.uint16(256))
    rng = np.random.default_rng(5)
    mine, other = rng.integers(0, 30_000, (2, 2000, 500), np.uint16)
    other[: int(true * 2000)] = mine[: int(true * 2000)]
    both = []
    for rows in (mine, other):
        marking = Marking()
        marking.add(Ragged(rows.reshape(-1), np.arange(0, rows.size + 1, 500)))
        mark = marking.finish("k")
        assert mark
        both.append(Merged(marks.below(mark.hashes, halvings), halvings))
    found = containment(*both)
    assert abs(found.of - 2000 * 493 / 256 / 2**halvings) < 5 * found.of**0.5
    assert abs(found.share - true) <= 4 * found.error
    assert found.error < 0.03


def numbers(seed: int, alphabet: int, word: int) -> NDArray[np.uint16]:
    """300 rows of words that begin alike and go on with a few ids in any order, as numbers, tables and sequences of letters do."""
    ids = np.random.default_rng(seed).integers(40, 40 + alphabet, (300, 60, word), np.uint16)
    return np.concatenate([np.full((300, 60, 1), 7, np.uint16), ids], axis=2).reshape(300, -1)


@pytest.mark.parametrize(("alphabet", "word"), [(10, 3), (4, 9), (16, 2)])
def test_an_estimate_holds_for_text_of_few_tokens_in_any_order(
    alphabet: int, word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the grams themselves: which are kept follows from what stands where, not from which few tokens a gram is made of."""
    monkeypatch.setattr(grams, "_KEPT", np.uint16(256))
    both, exact = [], []
    for seed in (1, 2):
        rows = numbers(seed, alphabet, word)
        marking = Marking()
        marking.add(Ragged(rows.reshape(-1), np.arange(0, rows.size + 1, rows.shape[1])))
        mark = marking.finish("k")
        assert mark
        both.append(Merged(mark.hashes, 0))
        windows = np.ascontiguousarray(sliding_window_view(rows, grams.GRAM, 1))
        exact.append(set(windows.view("V16").reshape(-1).tolist()))
    found = containment(*both)
    true = len(exact[0] & exact[1]) / len(exact[0])
    assert abs(found.of - len(exact[0]) / 256) < 5 * found.of**0.5
    assert abs(found.share - true) <= 4 * found.error, (true, found.share)


def test_the_error_of_none_or_all_is_not_none() -> None:
    assert 0 < Estimate(found=0, of=100).error < 0.02
    assert Estimate(found=0, of=100).error == pytest.approx(Estimate(found=100, of=100).error)
    assert [Estimate(found=0, of=n).is_few for n in (99, 100)] == [True, False]
