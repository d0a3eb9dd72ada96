"""What was lost or damaged of a publication is completed by the same command, and what must not be published is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert import publish
from mdsmix.errors import MdsmixError, TooManyBadRecords, Unreachable
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.shards.index import read_index
from mdsmix.shards.published import current
from mdsmix.storage import locate
from tests.converting import (
    documents,
    files,
    manifest_of,
    run_recipe,
    times,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)

TEXTS = [{"text": f"The first version, document {n}."} for n in range(30)]


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    windows(monkeypatch, 300)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    return write_recipe(
        tmp_path, tokenizer_folder, streams={"web": documents(tmp_path / "a.jsonl")}
    )


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return tmp_path / "out" / "web" / "train"


@pytest.mark.parametrize("lost", ["index.json", "mdsmix.manifest"])
def test_a_lost_half_of_a_publication_is_completed(
    recipe: Path, published: Path, lost: str
) -> None:
    run_recipe(recipe)
    before = files(published)
    (published / lost).unlink()
    if lost == "mdsmix.manifest":  # then nothing says that the index is ours
        with pytest.raises(MdsmixError, match="--reencode to replace it"):
            run_recipe(recipe)
    outcome = run_recipe(recipe, reencode=lost == "mdsmix.manifest")[0]
    assert outcome.done == 0, "units that are done stay done"
    assert files(published) == before


def test_a_manifest_and_an_index_that_disagree_are_completed(recipe: Path, published: Path) -> None:
    run_recipe(recipe)
    before = files(published)
    index = published / "index.json"
    other = index.read_bytes().replace(b'"samples": ', b'"samples":  ', 1)
    index.write_bytes(other)
    run_recipe(recipe)
    after = files(published)
    assert {name: after.pop(name) for name in before} == before
    assert list(after.values()) == [other], (
        "an index that is replaced is kept, since jobs may read by it"
    )


def test_what_a_manifest_says_of_its_making_is_brought_up_to_date(
    recipe: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither another version of mdsmix nor another treatment of duplicates changes a shard."""
    run_recipe(recipe)
    shards = {name for name in files(published) if name.endswith(".mds")}
    monkeypatch.setattr(publish, "__version__", "99")
    run_recipe(recipe)
    assert manifest_of(published).tool_version == "99"
    for way in ("drop", "keep"):
        run_recipe(recipe, f"streams.web.duplicates={way}")
        assert manifest_of(published).encoding.duplicates == way
    assert shards == {name for name in files(published) if name.endswith(".mds")}


def test_shards_of_equal_bytes_are_files_of_their_own(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that evicts one of them must not evict the other."""
    windows(monkeypatch, 200)
    record = {"text": "the same text in every unit, as often as it may come"}
    for n in range(3):
        write_jsonl(tmp_path / f"{n}.jsonl", [record] * 2)
    streams = {"web": documents(tmp_path / "*.jsonl", layout="document")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, compression="zstd:3")
    run_recipe(recipe)
    published = tmp_path / "out" / "web" / "train"
    names = [shard.stored.basename for shard in read_index(locate(str(published))).shards]
    first = names[0].removesuffix(".mds.zstd")
    assert names == [f"{first}.mds.zstd", f"{first}-1.mds.zstd", f"{first}-2.mds.zstd"]
    assert len({(published / name).read_bytes() for name in names}) == 1
    rows = token_rows(published)
    assert rows == rows[: len(rows) // 3] * 3
    before = times(published)
    assert run_recipe(recipe)[0].state == "up to date"
    assert times(published) == before


@pytest.mark.parametrize(
    ("records", "layout", "sentence"),
    [
        ([], "concat", r"\(0 records: none\)"),
        (
            [{"text": "short"}],
            "concat",
            r"came of its source \(1 records: \d tokens, less than one row\)",
        ),
        ([{"text": ""}, {"x": 1}], "document", r"\(2 records: 1 empty, 1 missing_field\)"),
    ],
)
def test_a_stream_without_a_sample_is_refused_and_nothing_is_published(
    tmp_path: Path, tokenizer_folder: Path, records: list[object], layout: str, sentence: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", records)
    streams = {"web": documents(tmp_path / "a.jsonl", layout=layout)}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=512)
    with pytest.raises(TooManyBadRecords, match=sentence):
        run_recipe(recipe)
    published = tmp_path / "out" / "web" / "train"
    assert not {"index.json", "mdsmix.manifest"} & set(files(published))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content, other: content[:99],
        lambda content, other: content[:99] + bytes([content[99] ^ 1]) + content[100:],
        lambda content, other: b"",
        lambda content, other: other,
    ],
    ids=["cut", "flipped", "empty", "that of another unit"],
)
def test_a_damaged_unit_record_is_done_again(
    recipe: Path, published: Path, damage: Callable[[bytes, bytes], bytes]
) -> None:
    """What it says would be published without a look at the shards."""
    run_recipe(recipe)
    before = files(published)
    record, another, *_ = sorted((published / ".mdsmix").iterdir())
    content = record.read_bytes()
    damaged = damage(content, another.read_bytes())
    assert damaged != content
    record.write_bytes(damaged)
    (published / "index.json").unlink()
    outcome = run_recipe(recipe)[0]
    assert outcome.done == 1
    assert files(published) == before


@pytest.mark.parametrize("number", [0, -1], ids=["of a unit", "of the leftovers"])
@pytest.mark.parametrize("way", ["publish=replace", "publish=versioned"])
@pytest.mark.parametrize("was_published", [True, False])
def test_a_cut_shard_is_made_again(
    recipe: Path, published: Path, number: int, way: str, was_published: bool
) -> None:
    run_recipe(recipe, way)
    place = current(locate(published))
    assert place is not None
    before, folder = files(published.parent), Path(place.url)
    shard = folder / read_index(place).shards[number].stored.basename
    os.truncate(shard, shard.stat().st_size - 1)
    if not was_published:
        (folder / "index.json").unlink()
    outcome = run_recipe(recipe, way)[0]
    assert outcome.done == (number == 0)
    assert files(published.parent) == before


def test_a_manifest_of_a_newer_format_is_not_overwritten(recipe: Path, published: Path) -> None:
    run_recipe(recipe)
    manifest = published / "mdsmix.manifest"
    newer = manifest.read_bytes().replace(b'"format_version": 3', b'"format_version": 4')
    manifest.write_bytes(newer)
    with pytest.raises(Unreachable, match="format_version is 4"):
        run_recipe(recipe)
    assert manifest.read_bytes() == newer


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [
        ("concat", lambda records: records[1:]),
        ("concat", lambda records: records[:1] + records),
        ("document", lambda records: records[1:]),
    ],
)
def test_counts_that_do_not_add_up_are_never_published(
    recipe: Path,
    published: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    wrong: Callable[[list[Any]], list[Any]],
) -> None:
    """An encoder that loses a record, or writes it twice, without a word."""
    encode = Pretraining.encode
    monkeypatch.setattr(Pretraining, "encode", lambda self, records: encode(self, wrong(records)))
    with pytest.raises(MdsmixError, match=r"30 records read, but \d+ written, 0 filtered"):
        run_recipe(recipe, f"streams.web.layout={layout}")
    assert not {"index.json", "mdsmix.manifest"} & set(files(published))
