"""The quarantine holds the bad records that the published stream has, and no others."""

from __future__ import annotations

import base64
import json
import re
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zstandard

from mdsmix.convert import run
from mdsmix.convert.bad_records import Tally, delete_stale_files, described
from mdsmix.errors import TooManyBadRecords, Unreachable
from mdsmix.shards.lease import Lease
from mdsmix.shards.published import read_lines
from mdsmix.sources import BadRecord, find, format, jsonl, plan, read
from mdsmix.sources.format import Origin
from mdsmix.storage import locate
from tests.converting import (
    documents,
    files,
    manifest_of,
    mdsmix,
    quarantined,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    windows(monkeypatch, 100)
    good = [{"text": f"a document, number {n}"} for n in range(20)]
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [*good[:10], {"name": name}, *good[10:]])
    streams = {"web": documents(tmp_path / "*.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


def test_a_record_that_was_mended_is_no_longer_there(recipe: Path, tmp_path: Path) -> None:
    run_recipe(recipe)
    published = tmp_path / "out" / "web" / "train"
    where = [(record["file"], record["line"]) for record in quarantined(published)]
    assert sorted(where) == [("a.jsonl", 11), ("b.jsonl", 11)]
    mended = (tmp_path / "a.jsonl").read_bytes().replace(b'"name"', b'"text"')
    (tmp_path / "a.jsonl").write_bytes(mended)
    run_recipe(recipe)
    assert [record["file"] for record in quarantined(published)] == ["b.jsonl"]
    assert manifest_of(published).records.bad == 1


def test_equal_files_have_bad_records_of_their_own(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    run_recipe(recipe)
    published = tmp_path / "out" / "web" / "train"
    where = sorted((record["file"], record["line"]) for record in quarantined(published))
    assert where == [("a.jsonl", 11), ("b.jsonl", 11)]
    assert manifest_of(published).records.bad == 2
    (tmp_path / "b.jsonl").rename(tmp_path / "c.jsonl")
    run_recipe(recipe)
    assert sorted(r["file"] for r in quarantined(published)) == ["a.jsonl", "c.jsonl"]


def test_a_file_behind_another_of_its_unit_is_named_as_it_is_named_now(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 1 << 20)
    run_recipe(recipe)
    published = tmp_path / "out" / "web" / "train"
    (tmp_path / "b.jsonl").rename(tmp_path / "c.jsonl")
    (outcome,) = run_recipe(recipe)
    assert outcome.units == 1
    assert [record["file"] for record in quarantined(published)] == ["a.jsonl", "c.jsonl"]


def test_lines_above_shift_the_number_of_a_record_that_is_not_done_again(
    recipe: Path, tmp_path: Path
) -> None:
    """Its unit is reused; what it is told by is the line that an editor shows now."""
    run_recipe(recipe)
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    first = lines[0].replace(b"document", b"d")
    filler = b"\n" * (len(lines[0]) - len(first))  # the bytes behind stay where they are
    (tmp_path / "a.jsonl").write_bytes(b"".join([first, filler, *lines[1:]]))
    (outcome,) = run_recipe(recipe)
    assert outcome.done == 1
    published = tmp_path / "out" / "web" / "train"
    (record,) = (r for r in quarantined(published) if r["file"] == "a.jsonl")
    assert record["line"] == 11 + len(filler)
    whole = (tmp_path / "a.jsonl").read_bytes()
    assert whole[record["offset"] :].startswith(b'{"name":"a"}')


def test_a_good_stream_has_no_quarantine(recipe: Path, tmp_path: Path) -> None:
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": "a good document of some words"}] * 9)
    run_recipe(recipe)
    assert not [name for name in files(tmp_path / "out") if "quarantine" in name]


def test_a_run_killed_before_it_forgot_the_old_records_is_completed(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is published by then, and its sources are known from before."""
    run_recipe(recipe)
    run_recipe(recipe, "max_seq_len=8", f"local={tmp_path / 'whole'}")
    with monkeypatch.context() as patch:
        patch.setattr(run, "delete_stale_files", lambda *_: None)
        run_recipe(recipe, "max_seq_len=8")
    published = tmp_path / "out" / "web" / "train"
    assert len(quarantined(published)) == 4
    run_recipe(recipe, "max_seq_len=8")
    assert quarantined(published) == quarantined(tmp_path / "whole" / "web" / "train")


def test_lost_bad_records_are_found_again_and_damaged_ones_are_named(
    recipe: Path, tmp_path: Path
) -> None:
    run_recipe(recipe)
    whole = files(tmp_path / "out")
    published = tmp_path / "out" / "web" / "train"
    (kept,) = (
        n for n in files(published) if n.endswith(".unit") and Path(n).stem in whose(published)
    )
    (published / "index.json").unlink()
    good = (published / kept).read_bytes()
    (published / kept).write_bytes(good[:-9] + b"no frame.")
    answer = mdsmix("convert", recipe)
    assert answer.code == 4
    assert f"{kept} is damaged" in answer.err
    assert mdsmix("convert", recipe, "--verify-target").code == 0
    (published / "index.json").unlink()
    (published / kept).unlink()
    assert run_recipe(recipe)[0].done == 1
    assert files(tmp_path / "out") == whole


def whose(published: Path) -> set[str]:
    """The name of the first file of bad records."""
    return {min((published / "quarantine").iterdir()).name.partition(".")[0]}


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_a_record_too_long_to_be_held_is_named_and_all_others_are_converted(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """1 GB in little: it crosses many windows, none of which holds another line of it."""
    monkeypatch.setattr(format, "LONGEST", 1000)
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 300)
    windows(monkeypatch, 500)
    good = b'{"text": "one two three four five six seven eight nine ten eleven twelve"}\n'
    long = b'{"text": "%s"}' % (b"word " * 2000)
    data = good * 9 + long + b"\n" + good * 9
    (tmp_path / f"a.jsonl{suffix}").write_bytes(zstandard.compress(data) if suffix else data)
    stream = documents(tmp_path / f"a.jsonl{suffix}")
    (outcome,) = run_recipe(write_recipe(tmp_path, tokenizer_folder, streams={"web": stream}))
    assert (outcome.manifest.records.read, outcome.manifest.records.written) == (19, 18)
    [bad] = quarantined(tmp_path / "out" / "web" / "train")
    place = {"line": 10, "offset": 9 * len(good), "length": len(long)}
    expected = {"file": f"a.jsonl{suffix}", **place, "reason": "line_too_long", "raw": ""}
    assert bad == expected


def bad(raw: bytes, detail: Any = None) -> BadRecord:
    names = tuple(f"field {number}" for number in range(70))
    origin = Origin("a.parquet", 3, {"row": 4}, len(raw), raw, names)
    told = SimpleNamespace(origin=origin, reason="missing_field", detail=detail)
    return cast(BadRecord, told)


def test_what_is_said_of_a_bad_record() -> None:
    """Of a table with very many columns the first ones; what the template said; bytes that are no text as base64."""
    said = json.loads(described(bad(b"\xff", detail={"template": "no"})))
    assert said == {
        "file": "a.parquet",
        "row": 4,
        "length": 1,
        "reason": "missing_field",
        "detail": {"template": "no"},
        "fields": [f"field {number}" for number in range(64)],
        "raw_base64": "/w==",
    }


def test_of_images_in_a_bad_record_the_bytes_are_left_out_and_of_words_none() -> None:
    image = base64.encodebytes(bytes(range(256)) * 8).decode()
    words = "\n".join(["words", "that", "stand", "below", "each", "other"] * 60)
    raw = json.dumps({"image": image, "text": words}).encode()
    kept = json.loads(json.loads(described(bad(raw), has_images=True))["raw"])
    assert kept["text"] == words
    assert re.fullmatch(
        r"<\d+ characters of base64 left out, xxh3_128 [0-9a-f]{32}>\n?", kept["image"]
    )
    assert json.loads(described(bad(raw)))["raw"] == raw.decode()


def test_bad_records_that_were_cut_off_are_not_taken_for_all(tmp_path: Path) -> None:
    at = locate(tmp_path) / "bad"
    frame = zstandard.ZstdCompressor().compress(b"one\ntwo\n")
    for cut in range(1, len(frame)):
        at.write(frame[:-cut])
        with pytest.raises(Unreachable, match="is damaged"):
            list(read_lines(at))
    at.write(frame)
    assert list(read_lines(at)) == [b"one", b"two"]


def test_who_lost_the_lease_deletes_no_bad_records(tmp_path: Path) -> None:
    """They may be another run's by then."""
    files = [locate(tmp_path) / "quarantine" / f"{name}.jsonl.zst" for name in ("old", "new")]
    for at in files:
        at.write(b"1")
    lost = SimpleNamespace(delete=lambda at: None)
    delete_stale_files(locate(tmp_path), ["new"], cast(Lease, lost))
    assert all(at.stat() for at in files)
    held = SimpleNamespace(delete=lambda at: at.delete())
    delete_stale_files(locate(tmp_path), ["new"], cast(Lease, held))
    assert [at.stat() is not None for at in files] == [False, True]


def test_of_two_runs_that_are_refused_the_second_ones_bad_records_are_there(
    recipe: Path, tmp_path: Path
) -> None:
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"max_bad": 0.001}))
    published = tmp_path / "out" / "web" / "train"
    good = [{"text": f"a document, number {n}"} for n in range(20)]
    write_jsonl(tmp_path / "a.jsonl", good)
    for number in range(2):
        write_jsonl(tmp_path / "b.jsonl", [*good, {"name": number}])
        with pytest.raises(TooManyBadRecords):
            run_recipe(recipe)
        assert [json.loads(each["raw"])["name"] for each in quarantined(published)] == [number]


def test_a_source_of_nothing_but_bad_records_is_not_held_as_objects(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """30,000 lines of two bytes: each took 1,600 bytes when all were described before the first was packed."""
    (tmp_path / "a.jsonl").write_bytes(b"{\n" * 30_000)
    [unit] = plan(find(["a.jsonl"], tmp_path))
    tally = Tally(False)
    tracemalloc.start()
    try:
        for batch in read(unit):
            tally.end(batch, ())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tally.records.quarantined == {"not_json": 30_000}
    assert peak < 20 << 20, f"{peak >> 20} MiB"
