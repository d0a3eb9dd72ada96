"""`mdsmix verify`: each file that differs from the index or the manifest is one fault that names
it, and a whole stream has no fault.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdsmix.errors import Unreachable
from mdsmix.shards.index import read_index
from mdsmix.shards.verification import VerifyReport, verify
from mdsmix.storage import locate
from mdsmix.storage.local import LocalPath
from tests.converting import (
    Project,
    RecordingWatcher,
    chats,
    documents,
    flip_byte,
    mdsmix,
    run_ok,
    run_recipe,
)
from tests.published import CONCAT, TOKEN_ROW, edit, publish

PAIR = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}


def verify_folder(folder: Path, quick: bool = False) -> VerifyReport:
    return verify(locate(folder), RecordingWatcher(), quick)


def find_faults(folder: Path, quick: bool = False) -> list[tuple[str, str]]:
    """Return file and problem of each fault."""
    return [(fault.file, fault.problem) for fault in verify_folder(folder, quick).faults]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A stream of four shards."""
    return publish(tmp_path / "web", CONCAT, [TOKEN_ROW] * 8, card={}, shards=4) / "train"


def list_shards(folder: Path) -> list[Path]:
    return [folder / shard.stored.basename for shard in read_index(locate(folder)).shards]


def test_streams_that_convert_publishes_are_whole(project: Project, corpus_folder: Path) -> None:
    """All layouts and columns. The golden rows contain the totals of the manifests."""
    streams = {"web": documents(corpus_folder / "web.jsonl.zst")}
    streams["docs"] = documents(corpus_folder / "docs.jsonl", layout="document")
    with_chats = streams | {"flat": chats(corpus_folder / "chat.jsonl", columns="compact")}
    for loader, compression, converted in (
        ("text", None, streams),
        ("finetuning", "zstd", with_chats),
    ):
        settings = {"train_loader": {"name": loader}, "local": str(project.folder / loader)}
        project.configure(streams=converted, compression=compression, max_seq_len=64, **settings)
        for outcome in run_recipe(project.recipe):
            report = verify_folder(Path(outcome.target))
            assert report.faults == ()
            assert report.unchecked == 0
            assert report.samples == outcome.manifest.totals.samples > 0


def test_every_damaged_shard_is_named_once_with_what_was_expected_and_found(split: Path) -> None:
    gone, cut, flipped, _ = list_shards(split)
    gone.unlink()
    size = cut.stat().st_size
    os.truncate(cut, size - 1)
    flip_byte(flipped, -1)
    problems = dict(find_faults(split))
    assert problems.keys() == {gone.name, cut.name, flipped.name}
    assert problems[gone.name].endswith("found no such file")
    assert problems[cut.name] == f"expected {size:,} bytes, found {size - 1:,}"
    (digest,) = read_index(locate(split)).shards[2].stored.hashes.values()
    assert f"its index states {digest}" in problems[flipped.name]
    assert find_faults(split, quick=True) == [
        (name, problem) for name, problem in find_faults(split) if name != flipped.name
    ]


WRONG_COUNTS: list[tuple[Callable[[Any], object], str]] = [
    (lambda tree: tree["totals"].update(samples=1), "expected 1 samples in the index, divided"),
    (lambda tree: tree["parts"][0].update(samples=9_999), "samples in the index, divided"),
    (lambda tree: tree["parts"][0].update(shards=0), "samples in the index, divided"),
    (lambda tree: tree["parts"].clear(), "samples in the index, divided"),
    (lambda tree: tree["records"].update(read=9_999), "expected the number of read records"),
]


def test_counts_that_do_not_add_up_are_a_fault(split: Path) -> None:
    manifest = split / "mdsmix.manifest"
    whole = manifest.read_bytes()
    for change, sentence in WRONG_COUNTS:
        edit(manifest, change)
        (problem,) = [problem for _, problem in find_faults(split, quick=True)]
        assert sentence in problem
        manifest.write_bytes(whole)
    edit(manifest, lambda tree: tree["totals"].update(tokens=7))
    ((file, problem),) = find_faults(split)
    assert (file, problem[:26]) == ("mdsmix.manifest", "expected 7 tokens, counted")
    assert find_faults(split, quick=True) == []
    manifest.write_bytes(whole)
    edit(split / "index.json", lambda tree: tree.update(shards=tree["shards"][1:]))
    ((file, problem),) = find_faults(split)
    assert (file, "publication was interrupted" in problem) == ("index.json", True)


def test_a_sample_whose_length_contradicts_its_sizes_is_a_fault(tmp_path: Path) -> None:
    """Without a hash it is found by the layout of the rows. A shard that is in the index twice is a
    fault too.
    """
    home = publish(tmp_path / "pair", PAIR, [{"input_ids": [5, 6], "labels": [7, 8]}]) / "train"
    text = publish(tmp_path / "text", {"text": "str"}, [{"text": "a"}] * 2, shards=2) / "train"
    edit(text / "index.json", lambda tree: tree["shards"].append(tree["shards"][0]))
    assert find_faults(text) == [("shard.00000.mds", "expected once in the index, found 2 times")]
    edit(home / "index.json", lambda tree: tree["shards"][0]["raw_data"].update(hashes={}))
    (shard,) = list_shards(home)
    whole = shard.read_bytes()
    head = whole.index(b"\x05\x02\x00")
    shard.write_bytes(whole[: head + 1] + b"\x03" + whole[head + 2 :])
    assert [problem for _, problem in find_faults(home)] == [
        "the bytes of an array in the file are more or fewer than its shape states"
    ]
    stop = int.from_bytes(whole[4:8], "little") + 3
    shard.write_bytes(whole[:8] + stop.to_bytes(4, "little") + whole[12:stop])
    edit(home / "index.json", lambda t: t["shards"][0]["raw_data"].update(bytes=stop))
    ((_, problem),) = find_faults(home)
    assert problem == "a sample of the file is too short for the sizes of its columns"


def test_a_stream_of_another_tool_is_compared_with_its_index(tmp_path: Path) -> None:
    columns = {"image": "bytes", "text": "str", "x": "json"}
    rows = [{"image": b"\xff", "text": "ä", "x": [1]}] * 5
    for compression in (None, "zstd"):
        home = publish(
            tmp_path / str(compression), columns, rows, shards=2, compression=compression
        )
        assert verify_folder(home / "train").faults == ()
        flip_byte(list_shards(home / "train")[1], 40)
        ((file, problem),) = find_faults(home / "train")
        assert file == list_shards(home / "train")[1].name
        assert "xxh128" in problem


def test_the_command_prints_a_line_for_each_fault_and_exits_with_its_code(split: Path) -> None:
    """0: whole, 3: the stream may not be used, 4: it could not be read."""
    assert re.fullmatch(rf"{split}: .*bytes: whole\n", run_ok("verify", split.parent).out)
    assert run_ok("verify", "--quick", split).out.endswith("names and sizes are right\n")
    gone = list_shards(split)[0]
    gone.unlink()
    answer = mdsmix("verify", split)
    first, last = answer.out.splitlines()
    assert answer.code == 3
    assert first.startswith(f"fault {gone.name}: expected ")
    assert f": 1 fault, the stream may not be used; mdsmix repair {split} --recipe RECIPE" in last
    answer = mdsmix("verify", split, "--json")
    assert answer.code == 3
    assert [fault["file"] for fault in json.loads(answer.out)["faults"]] == [gone.name]
    answer = mdsmix("verify", split / "nowhere")
    assert (answer.code, answer.out) == (4, "")


def test_damage_in_transit_is_not_a_fault(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails is not a fault of the stream either."""
    real_read = LocalPath.read
    victim = list_shards(split)[0].name
    times = Counter[str]()

    def flip_at_first_read(self: LocalPath, *arguments: Any) -> bytes:
        data = real_read(self, *arguments)
        times[self.name] += 1
        if self.name == victim and times[self.name] == 1:
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    def refuse(self: LocalPath, *arguments: Any) -> bytes:
        if self.name == victim:
            raise Unreachable("the disk failed")
        return real_read(self, *arguments)

    monkeypatch.setattr(LocalPath, "read", flip_at_first_read)
    answer = run_ok("verify", split)
    assert f"damaged in transit, whole when read again: {victim}" in answer.err
    times.clear()
    assert "damage-in-transit" in mdsmix("check", split, "--deep").out
    monkeypatch.setattr(LocalPath, "read", refuse)
    with pytest.raises(Unreachable, match="the disk failed"):
        verify_folder(split)


def test_repair_restores_lost_bad_records(project: Project) -> None:
    """Bad records that a later, refused run has added are not a fault."""
    (project.folder / "a.jsonl").write_bytes(b'{"text": "a document"}\n' * 9 + b"not json\n")
    for way in ("replace", "versioned"):
        stream = project.folder / way / "web"
        project.configure(publish=way, local=str(project.folder / way)).convert_ok()
        (quarantine_file,) = stream.glob("train/quarantine/*.zst")
        before = quarantine_file.read_bytes()
        for content in (None, b"", b"not zstd", before[:-8] + b"\0" + before[-7:]):
            quarantine_file.unlink()
            if content is not None:
                quarantine_file.write_bytes(content)
            answer = mdsmix("verify", stream)
            assert (answer.code, answer.out[:18]) == (3, "fault quarantine: ")
            run_ok("check", stream)  # training reads none of them
            run_ok("repair", stream, "--recipe", project.recipe)
            assert [path.read_bytes() for path in stream.glob("train/quarantine/*")] == [before]
        run_ok("verify", stream)
    assert project.convert("streams.web.source.text=body").code == 5
    run_ok("verify", stream)
