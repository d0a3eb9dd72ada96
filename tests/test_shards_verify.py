"""Whatever is not as the index and the manifest say is one fault that names it; what is whole has none."""

from __future__ import annotations

import json
import os
import re
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from mdsmix.errors import Unreachable
from mdsmix.shards import verification as module
from mdsmix.shards.counts import histogram
from mdsmix.shards.index import read_index
from mdsmix.shards.verification import Report, verify
from mdsmix.storage import locate
from mdsmix.storage.local import LocalPath
from tests.converting import (
    chats,
    documents,
    mdsmix,
    pairs,
    run_recipe,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.published import edit, publish

PAIR = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}


def look(folder: Path, quick: bool = False) -> Report:
    return verify(locate(folder), quick=quick, begin=lambda *_: None, on_progress=lambda *_: None)


def faults(folder: Path, quick: bool = False) -> list[tuple[str, str]]:
    return [(fault.file, fault.problem) for fault in look(folder, quick).faults]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A pretraining stream of three shards and more."""
    folder = tmp_path_factory.mktemp("converted")
    records = [{"text": f"Document {n} is about the number {n}. " * 3} for n in range(60)]
    streams = {"web": documents(write_jsonl(folder / "a.jsonl", records), layout="document")}
    with pytest.MonkeyPatch.context() as patch:
        windows(patch, 2000)
        run_recipe(write_recipe(folder, tokenizer_folder, streams=streams))
    return folder / "out" / "web"


@pytest.fixture
def web(tmp_path: Path, converted: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(converted, tmp_path / "web") / "train"


def shards(folder: Path) -> list[Path]:
    return [folder / shard.stored.basename for shard in read_index(locate(folder)).shards]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)


def test_what_convert_publishes_is_whole(
    tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path
) -> None:
    """All layouts, columns and loaders: every total of the manifest is the one counted from the bytes."""
    plain = {
        "web": documents(corpus_folder / "web.jsonl.zst"),
        "docs": documents(corpus_folder / "docs.jsonl", layout="document"),
    }
    tuned = {
        "faq": pairs(corpus_folder / "faq.jsonl"),
        "chat": chats(corpus_folder / "chat.jsonl"),
        "flat": chats(corpus_folder / "chat.jsonl", columns="compact"),
    }
    for loader, streams, compression in (
        ("text", plain, None),
        ("finetuning", plain | tuned, "zstd"),
    ):
        folder = tmp_path / loader
        folder.mkdir()
        settings: dict[str, Any] = {"streams": streams, "train_loader": {"name": loader}}
        recipe = write_recipe(
            folder, tokenizer_folder, max_seq_len=64, compression=compression, **settings
        )
        for outcome in run_recipe(recipe):
            report, totals = look(Path(outcome.target)), outcome.manifest.totals
            assert report.faults == ()
            lengths = np.array([len(row) for row in token_rows(outcome.target)])
            assert (totals.tokens, totals.longest) == (lengths.sum(), lengths.max())
            assert totals.lengths == histogram(lengths)
            assert totals.largest_id == max(map(max, token_rows(outcome.target)))
            assert report.blind == 0
            assert report.samples == outcome.manifest.totals.samples > 0


def test_every_damaged_shard_is_named_once_with_what_was_expected_and_found(web: Path) -> None:
    gone, cut, flipped, *rest = shards(web)
    assert rest
    gone.unlink()
    size = cut.stat().st_size
    os.truncate(cut, size - 1)
    flip(flipped, -1)
    found = dict(faults(web))
    assert found.keys() == {gone.name, cut.name, flipped.name}
    assert found[gone.name].endswith("found no such file")
    assert found[cut.name] == f"expected {size:,} bytes, found {size - 1:,}"
    assert "xxh128" in found[flipped.name]
    assert flipped.stem in found[flipped.name]
    assert faults(web, quick=True) == [(n, p) for n, p in faults(web) if n != flipped.name]


def test_quick_reads_no_shard(web: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LocalPath.read

    def only_small(self: LocalPath, *arguments: Any) -> bytes:
        assert not self.name.endswith(".mds")
        return read(self, *arguments)

    monkeypatch.setattr(LocalPath, "read", only_small)
    assert faults(web, quick=True) == []


def test_tokens_that_the_manifest_counts_otherwise(web: Path) -> None:
    edit(web / "mdsmix.manifest", lambda tree: tree["totals"].update(tokens=7))
    ((file, problem),) = faults(web)
    assert file == "mdsmix.manifest"
    assert problem.startswith("expected 7 tokens, counted ")
    assert faults(web, quick=True) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tree: tree["totals"].update(samples=1), "expected 1 samples, part by part"),
        (lambda tree: tree["parts"][0].update(samples=9_999), "samples, part by part"),
        (lambda tree: tree["parts"][0].update(shards=0), "samples, part by part"),
        (lambda tree: tree["parts"].clear(), "samples, part by part"),
        (lambda tree: tree["records"].update(read=9_999), "expected as many records read as"),
    ],
)
def test_sums_that_do_not_add_up(web: Path, change: Callable[[Any], None], said: str) -> None:
    edit(web / "mdsmix.manifest", change)
    (problem,) = [problem for _, problem in faults(web, quick=True)]
    assert said in problem


def test_progress_is_of_the_shards_that_are_there(tmp_path: Path) -> None:
    home = publish(tmp_path, {"text": "str"}, [{"text": "a"}] * 3, shards=3) / "train"
    shards(home)[1].unlink()
    begun: list[tuple[str, int]] = []
    looked: list[int] = []
    verify(
        locate(home),
        quick=False,
        begin=lambda *what: begun.append(what),
        on_progress=lambda size, _: looked.append(size),
    )
    assert looked == [path.stat().st_size for path in (shards(home)[0], shards(home)[2])]
    assert begun == [(str(home), sum(looked))]


def test_an_index_that_is_not_the_manifests_is_one_fault(web: Path) -> None:
    edit(web / "index.json", lambda tree: tree.update(shards=tree["shards"][1:]))
    ((file, problem),) = faults(web)
    assert file == "index.json"
    assert "publication was interrupted" in problem


def test_an_index_or_a_manifest_that_cannot_be_read_is_one_fault_with_one_advice(web: Path) -> None:
    for name in ("index.json", "mdsmix.manifest"):
        whole = (web / name).read_bytes()
        for content in (b"", b"{", b"{}", b"[" * 10_000, b'{"shards": [{"version": 2}]}'):
            (web / name).write_bytes(content)
            report = look(web)
            (fault,) = report.faults
            assert str(fault) == f"{name}: {fault.problem}"
            assert re.search("publish|convert", fault.problem)
            assert ".;" not in fault.problem
            assert name != "index.json" or (report.shards, report.samples, report.bytes) == (
                0,
                0,
                0,
            )
        (web / name).write_bytes(whole)


def test_one_file_named_twice(tmp_path: Path) -> None:
    home = publish(tmp_path, {"text": "str"}, [{"text": "a"}] * 2, shards=2) / "train"
    edit(home / "index.json", lambda tree: tree["shards"].append(tree["shards"][0]))
    assert faults(home) == [("shard.00000.mds", "expected once in the index, found 2 times")]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_stream_of_another_tool_is_held_against_its_index(
    tmp_path: Path, compression: str | None
) -> None:
    columns = {"image": "bytes", "text": "str", "x": "json"}
    row = {"image": b"\xff", "text": "ä", "x": [1]}
    home = publish(tmp_path, columns, [row] * 5, shards=2, compression=compression) / "train"
    assert look(home).faults == ()
    flip(shards(home)[1], 40)
    ((file, problem),) = faults(home)
    assert file == shards(home)[1].name
    assert "xxh128" in problem


def _without_hashes(home: Path) -> None:
    def forget(tree: Any) -> None:
        for shard in tree["shards"]:
            for file in (shard["raw_data"], shard["zip_data"]):
                if file:
                    file["hashes"] = {}

    edit(home / "index.json", forget)


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({"text": "str", "x": "json"}, {"text": "a text", "x": {"a": [1, 2]}}),
        (PAIR, {"input_ids": [5, 6], "labels": [7]}),
        ({"tokens": "ndarray:uint16:4"}, {"tokens": [1, 2, 3, 4]}),
        ({"turns": "json"}, {"turns": [{"input_ids": [5, 6], "labels": [7, 0]}]}),
    ],
)
def test_no_flipped_byte_of_a_stream_without_hashes_brings_it_down(
    tmp_path: Path, columns: Mapping[str, str], row: Mapping[str, Any]
) -> None:
    """Each is a fault, or bytes of the same layout, which nothing can tell from the true ones."""
    home = publish(tmp_path, columns, [row] * 2) / "train"
    _without_hashes(home)
    assert look(home).blind == 1
    assert "no hash" not in mdsmix("verify", "--quick", home).out
    (shard,) = shards(home)
    whole = shard.read_bytes()
    found = 0
    for at in [*range(16), *range(16, len(whole), 5)]:
        shard.write_bytes(whole)
        flip(shard, at)
        problems = faults(home)
        assert len(problems) <= 1
        found += len(problems)
        if at < 16:
            assert problems, "the table of samples has no byte to spare"
    assert found >= 16


def test_the_size_of_an_array_is_held_against_its_shape(tmp_path: Path) -> None:
    home = publish(tmp_path, PAIR, [{"input_ids": [5, 6], "labels": [7, 8]}]) / "train"
    _without_hashes(home)
    (shard,) = shards(home)
    data = bytearray(shard.read_bytes())
    head = data.index(b"\x05\x02\x00")
    data[head + 1] = 3
    shard.write_bytes(data)
    ((_, problem),) = faults(home)
    assert problem == ("an array is not as long as its shape says")


def test_a_sample_too_short_for_the_sizes_of_its_columns(tmp_path: Path) -> None:
    home = publish(tmp_path, {"text": "str"}, [{"text": "a"}]) / "train"
    _without_hashes(home)
    (shard,) = shards(home)
    data = bytearray(shard.read_bytes())
    stop = int.from_bytes(data[4:8], "little") + 3
    data[8:12] = stop.to_bytes(4, "little")
    shard.write_bytes(data[:stop])
    edit(home / "index.json", lambda t: t["shards"][0]["raw_data"].update(bytes=stop))
    ((_, problem),) = faults(home)
    assert problem == "a sample is too short to say how long its columns are"


def _repacked(home: Path, packed: bytes, **changes: Any) -> None:
    """The only shard of the stream stored as these bytes."""
    (shard,) = shards(home)
    shard.write_bytes(packed)
    value = xxhash.xxh128_hexdigest(packed)

    def rename(tree: Any) -> None:
        tree["shards"][0]["zip_data"].update(bytes=len(packed), hashes={"xxh128": value})
        tree["shards"][0].update(changes)

    edit(home / "index.json", rename)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    home = publish(tmp_path, {"text": "str"}, [{"text": "a"}], compression="zstd") / "train"
    packer = zstandard.ZstdCompressor().compressobj()
    packed = b"".join(packer.compress(bytes(1 << 24)) for _ in range(64)) + packer.flush()
    assert len(packed) < 1 << 20
    _repacked(home, packed)
    tracemalloc.start()
    try:
        ((_, problem),) = faults(home)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert "decompressed it is not the" in problem


def test_a_compression_that_mdsmix_cannot_undo_is_hashed_and_told(tmp_path: Path) -> None:
    home = publish(tmp_path, {"text": "str"}, [{"text": "a"}], compression="zstd") / "train"
    _repacked(home, b"packed by another", compression="br:11")
    assert (look(home).faults, look(home).blind) == ((), 1)
    answer = mdsmix("verify", home)
    assert answer.code == 0
    assert "of 1 shard no hash or no decompressor is known" in answer.out
    flip(shards(home)[0], 3)
    assert len(faults(home)) == 1


def test_memory_sets_how_many_shards_are_looked_at_together(
    web: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = list(read_index(locate(web)).shards)
    looked_at = [(shard.stored, shard) for shard in listed]
    assert module._threads(looked_at) == module.MOST_THREADS
    monkeypatch.setattr(module, "IN_FLIGHT_BYTES", 1)
    assert module._threads(looked_at) == 1
    assert faults(web) == []


def test_the_command(web: Path) -> None:
    """0 whole, 3 not to be used, 4 could not look; one line for each fault; --json says the same."""
    answer = mdsmix("verify", web.parent)
    assert (answer.code, answer.out.count("\n")) == (0, 1)
    assert answer.out.startswith(f"{web}: ")
    assert answer.out.endswith("bytes: whole\n")
    assert mdsmix("verify", "--quick", web).out.endswith("names and sizes are right\n")
    gone = shards(web)[0]
    gone.unlink()
    answer = mdsmix("verify", web)
    first, last = answer.out.splitlines()
    assert answer.code == 3
    assert first.startswith(f"fault {gone.name}: expected ")
    assert f": 1 fault, the stream may not be used; mdsmix repair {web} --recipe RECIPE" in last
    assert last.endswith("the tool that made it")
    answer = mdsmix("verify", web, "--json")
    assert answer.code == 3
    assert [fault["file"] for fault in json.loads(answer.out)["faults"]] == [gone.name]
    answer = mdsmix("verify", web / "nowhere")
    assert (answer.code, answer.out) == (4, "")


def test_a_shard_that_the_disk_does_not_give_is_no_fault(
    web: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, victim = LocalPath.read, shards(web)[0]

    def hindered(self: LocalPath, *arguments: Any) -> bytes:
        if self.name == victim.name:
            raise Unreachable("the disk failed")
        return read(self, *arguments)

    monkeypatch.setattr(LocalPath, "read", hindered)
    with pytest.raises(Unreachable, match="the disk failed"):
        look(web)


def test_damage_that_a_second_read_does_not_find_is_told_as_damage_in_transit(
    web: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, victim, times = LocalPath.read, shards(web)[0].name, Counter[str]()

    def flipped(self: LocalPath, *arguments: Any) -> bytes:
        data = read(self, *arguments)
        times[self.name] += 1
        bad = self.name == victim and times[self.name] == 1
        return bytes([data[0] ^ 1]) + data[1:] if bad else data

    monkeypatch.setattr(LocalPath, "read", flipped)
    report = look(web)
    assert report.faults == ()
    ((told,),) = [report.in_transit]
    assert (told.file, "xxh128" in told.problem) == (victim, True)
    times.clear()
    answer = mdsmix("verify", web)
    assert answer.code == 0
    assert f"damaged on its way, and whole when it was read again: {victim}" in answer.err
    times.clear()
    assert "damage-in-transit" in mdsmix("check", web, "--deep").out


def test_bad_records_of_a_run_that_was_refused_since_are_no_fault(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """They lie beside those of the stream, which is as good as before."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a document"}\n' * 9 + b"not json\n")
    recipe = write_recipe(
        tmp_path, tokenizer_folder, streams={"web": documents(tmp_path / "a.jsonl")}
    )
    assert mdsmix("convert", recipe).code == 0
    assert mdsmix("convert", recipe, "streams.web.source.text=body").code == 5
    assert mdsmix("verify", tmp_path / "out/web").code == 0


@pytest.mark.parametrize("way", ["in place", "versioned"])
def test_bad_records_that_are_lost_or_garbled_are_a_fault_and_repair_brings_them_back(
    tmp_path: Path, tokenizer_folder: Path, way: str
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "a document"}\n' * 9 + b"not json\n")
    streams = {"web": documents(source)}
    publish = {"publish": "versioned"} if way == "versioned" else {}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, **publish)
    assert mdsmix("convert", recipe).code == 0
    stream = tmp_path / "out/web"
    (kept,) = stream.glob("train/quarantine/*.zst")
    before = kept.read_bytes()
    for change in (
        kept.unlink,
        lambda: kept.write_bytes(b""),
        lambda: kept.write_bytes(b"not zstd"),
        lambda: (kept.write_bytes(before), flip(kept, -8)),
    ):
        change()
        answer = mdsmix("verify", stream)
        assert answer.code == 3
        assert answer.out.startswith("fault quarantine: ")
        assert "mdsmix repair" in answer.out
    assert mdsmix("check", stream).code == 0, "training reads none of them"
    assert mdsmix("repair", stream, "--recipe", recipe).code == 0
    assert mdsmix("verify", stream).code == 0
    assert [path.read_bytes() for path in stream.glob("train/quarantine/*")] == [before]
