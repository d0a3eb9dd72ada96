"""Whatever is not as the index and the manifest say is one fault that names it; what is whole has none."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdsmix.errors import Unreachable
from mdsmix.shards.counts import histogram
from mdsmix.shards.index import read_index
from mdsmix.shards.verification import Report, verify
from mdsmix.storage import locate
from mdsmix.storage.local import LocalPath
from tests.converting import (
    Told,
    chats,
    documents,
    flip,
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
    return verify(locate(folder), Told(), quick)


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


def test_what_convert_publishes_is_whole(
    tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path
) -> None:
    """All layouts, columns and loaders: every total of the manifest is the one counted from the bytes."""
    streams = {
        "web": documents(corpus_folder / "web.jsonl.zst"),
        "docs": documents(corpus_folder / "docs.jsonl", layout="document"),
        "faq": pairs(corpus_folder / "faq.jsonl"),
        "chat": chats(corpus_folder / "chat.jsonl"),
        "flat": chats(corpus_folder / "chat.jsonl", columns="compact"),
    }
    loader = {"name": "finetuning"}
    for compression, names in ((None, ["web", "docs"]), ("zstd", streams)):
        folder = tmp_path / str(compression)
        folder.mkdir()
        settings = {"streams": {name: streams[name] for name in names}, "compression": compression}
        settings |= {"train_loader": loader if compression else {"name": "text"}}
        recipe = write_recipe(folder, tokenizer_folder, max_seq_len=64, **settings)
        for outcome in run_recipe(recipe):
            report, totals = look(Path(outcome.target)), outcome.manifest.totals
            lengths = np.array([len(row) for row in token_rows(outcome.target)])
            assert (totals.tokens, totals.longest) == (lengths.sum(), lengths.max())
            assert totals.lengths == histogram(lengths)
            assert totals.largest_id == max(map(max, token_rows(outcome.target)))
            assert (report.faults, report.blind) == ((), 0)
            assert report.samples == totals.samples > 0


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


Change = Callable[[Any], object]
SUMS: list[tuple[Change, str]] = [
    (lambda tree: tree["totals"].update(samples=1), "expected 1 samples, part by part"),
    (lambda tree: tree["parts"][0].update(samples=9_999), "samples, part by part"),
    (lambda tree: tree["parts"][0].update(shards=0), "samples, part by part"),
    (lambda tree: tree["parts"].clear(), "samples, part by part"),
    (lambda tree: tree["records"].update(read=9_999), "expected as many records read as"),
]


def test_sums_and_tokens_that_do_not_add_up(web: Path) -> None:
    manifest = web / "mdsmix.manifest"
    whole = manifest.read_bytes()
    for change, said in SUMS:
        edit(manifest, change)
        (problem,) = [problem for _, problem in faults(web, quick=True)]
        assert said in problem
        manifest.write_bytes(whole)
    edit(manifest, lambda tree: tree["totals"].update(tokens=7))
    ((file, problem),) = faults(web)
    assert (file, problem[:26]) == ("mdsmix.manifest", "expected 7 tokens, counted")
    assert faults(web, quick=True) == []
    manifest.write_bytes(whole)
    edit(web / "index.json", lambda tree: tree.update(shards=tree["shards"][1:]))
    ((file, problem),) = faults(web)
    assert (file, "publication was interrupted" in problem) == ("index.json", True)


def test_a_sample_that_is_not_as_long_as_it_says(tmp_path: Path) -> None:
    """Without a hash the layout of the rows alone tells it. And a file is in its index once."""
    home = publish(tmp_path / "pair", PAIR, [{"input_ids": [5, 6], "labels": [7, 8]}]) / "train"
    text = publish(tmp_path / "text", {"text": "str"}, [{"text": "a"}] * 2, shards=2) / "train"
    edit(text / "index.json", lambda tree: tree["shards"].append(tree["shards"][0]))
    assert faults(text) == [("shard.00000.mds", "expected once in the index, found 2 times")]
    _without_hashes(home)
    (shard,) = shards(home)
    whole = shard.read_bytes()
    head = whole.index(b"\x05\x02\x00")
    shard.write_bytes(whole[: head + 1] + b"\x03" + whole[head + 2 :])
    assert [problem for _, problem in faults(home)] == ["an array is not as long as its shape says"]
    stop = int.from_bytes(whole[4:8], "little") + 3
    shard.write_bytes(whole[:8] + stop.to_bytes(4, "little") + whole[12:stop])
    edit(home / "index.json", lambda t: t["shards"][0]["raw_data"].update(bytes=stop))
    ((_, problem),) = faults(home)
    assert problem == "a sample is too short to say how long its columns are"


def test_a_stream_of_another_tool_is_held_against_its_index(tmp_path: Path) -> None:
    columns = {"image": "bytes", "text": "str", "x": "json"}
    rows = [{"image": b"\xff", "text": "ä", "x": [1]}] * 5
    for packed in (None, "zstd"):
        home = publish(tmp_path / str(packed), columns, rows, shards=2, compression=packed)
        assert look(home / "train").faults == ()
        flip(shards(home / "train")[1], 40)
        ((file, problem),) = faults(home / "train")
        assert file == shards(home / "train")[1].name
        assert "xxh128" in problem


def _without_hashes(home: Path) -> None:
    def forget(tree: Any) -> None:
        for shard in tree["shards"]:
            for file in (shard["raw_data"], shard["zip_data"]):
                if file:
                    file["hashes"] = {}

    edit(home / "index.json", forget)


def test_the_command(web: Path) -> None:
    """0 whole, 3 not to be used, 4 could not look; one line for each fault; --json says the same."""
    answer = mdsmix("verify", web.parent)
    assert answer.code == 0
    assert re.fullmatch(rf"{web}: .*bytes: whole\n", answer.out)
    assert mdsmix("verify", "--quick", web).out.endswith("names and sizes are right\n")
    gone = shards(web)[0]
    gone.unlink()
    answer = mdsmix("verify", web)
    first, last = answer.out.splitlines()
    assert answer.code == 3
    assert first.startswith(f"fault {gone.name}: expected ")
    assert f": 1 fault, the stream may not be used; mdsmix repair {web} --recipe RECIPE" in last
    answer = mdsmix("verify", web, "--json")
    assert answer.code == 3
    assert [fault["file"] for fault in json.loads(answer.out)["faults"]] == [gone.name]
    answer = mdsmix("verify", web / "nowhere")
    assert (answer.code, answer.out) == (4, "")


def test_damage_that_a_second_read_does_not_find_is_told_as_damage_in_transit(
    web: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the disk does not give is no fault of the stream."""
    read, victim, times = LocalPath.read, shards(web)[0].name, Counter[str]()

    def flipped(self: LocalPath, *arguments: Any) -> bytes:
        data = read(self, *arguments)
        times[self.name] += 1
        bad = self.name == victim and times[self.name] == 1
        return bytes([data[0] ^ 1]) + data[1:] if bad else data

    def refused(self: LocalPath, *arguments: Any) -> bytes:
        if self.name == victim:
            raise Unreachable("the disk failed")
        return read(self, *arguments)

    monkeypatch.setattr(LocalPath, "read", flipped)
    answer = mdsmix("verify", web)
    assert answer.code == 0
    assert f"damaged on its way, and whole when it was read again: {victim}" in answer.err
    times.clear()
    assert "damage-in-transit" in mdsmix("check", web, "--deep").out
    monkeypatch.setattr(LocalPath, "read", refused)
    with pytest.raises(Unreachable, match="the disk failed"):
        look(web)


def test_bad_records_that_are_lost_or_garbled_are_a_fault_and_repair_brings_them_back(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Those of a run that was refused since lie beside them, and are no fault."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "a document"}\n' * 9 + b"not json\n")
    for way in ("replace", "versioned"):
        stream, streams = tmp_path / way / "web", {"web": documents(source)}
        settings = {"streams": streams, "publish": way, "local": str(tmp_path / way)}
        recipe = write_recipe(tmp_path, tokenizer_folder, **settings)
        assert mdsmix("convert", recipe).code == 0
        (kept,) = stream.glob("train/quarantine/*.zst")
        before = kept.read_bytes()
        for content in (None, b"", b"not zstd", before[:-8] + b"\0" + before[-7:]):
            kept.unlink()
            if content is not None:
                kept.write_bytes(content)
            answer = mdsmix("verify", stream)
            assert (answer.code, answer.out[:18]) == (3, "fault quarantine: ")
            assert mdsmix("check", stream).code == 0, "training reads none of them"
            assert mdsmix("repair", stream, "--recipe", recipe).code == 0
            assert [path.read_bytes() for path in stream.glob("train/quarantine/*")] == [before]
        assert mdsmix("verify", stream).code == 0
    assert mdsmix("convert", recipe, "streams.web.source.text=body").code == 5
    assert mdsmix("verify", stream).code == 0
