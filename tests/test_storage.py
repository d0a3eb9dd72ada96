"""Local files and files of a hub: a write is all or nothing, missing is an answer, and every failure is a sentence."""

import io
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.sources import find, plan, read
from mdsmix.storage import hub as storage_hub
from mdsmix.storage import locate
from mdsmix.storage.local import explained
from mdsmix.storage.location import path_matches
from tests.alarm import SECONDS
from tests.hub import Hub, serving


def test_what_is_written_is_read_in_full_and_in_part(tmp_path: Path) -> None:
    place = locate(tmp_path) / "new/folder" / "file.bin"
    place.write(b"ab", memoryview(b"cdef"), bytearray(b"g"))
    assert place.read() == b"abcdefg"
    assert place.read(2, 3) == b"cde"
    assert place.read(6, 10) == b"g"
    assert place.read(99, 1) == b""
    with place.open(5) as file:
        assert file.read() == b"fg"
    found = place.stat()
    assert found is not None
    assert found.size == 7
    place.write(b"1234567")
    assert place.stat() != found, "the stamp changes with every write"


def test_a_write_that_fails_leaves_the_old_bytes_and_no_other_file(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="the disk is full"), explained("write", "x"):
        Path("/dev/full").write_bytes(b"x" * 100_000)
    place = locate(tmp_path) / "a"
    place.write(b"old")
    with pytest.raises(TypeError):
        place.write(b"new", "text is not bytes")  # type: ignore[arg-type]
    assert place.read() == b"old"
    assert [name for name, _ in locate(tmp_path).list()] == ["a"]


def test_missing_is_an_answer_to_stat_delete_and_list_and_an_error_to_read(tmp_path: Path) -> None:
    place = locate(tmp_path) / "none" / "x"
    assert (place.stat(), place.fetch(), list(place.list()), place.expand()) == (None, None, [], [])
    place.delete()
    for act in (place.read, place.open, partial(place.copy_to, locate(tmp_path) / "copy")):
        with pytest.raises(Unreachable, match="no such file"):
            act()


def test_fetch_is_stat_and_read_of_one_file_and_a_folder_is_none(tmp_path: Path) -> None:
    place, folder = locate(tmp_path) / "a", locate(tmp_path)
    place.write(b"abc")
    for most, content in ((None, b"abc"), (3, b"abc"), (2, b"")):
        assert place.fetch(*filter(None, [most])) == (place.stat(), content)
    assert (folder.fetch(), folder.stat(), (place / "below").fetch()) == (None, None, None)
    os.mkfifo(tmp_path / "pipe")
    for act, said in (
        (folder.read, "it is a folder"),
        (lambda: (place / "below").write(b""), "is a file, not a folder"),
        ((folder / "pipe").fetch, "whose end cannot be known"),
    ):
        with pytest.raises(Unreachable, match=said):
            act()


def test_expand_finds_what_a_shell_would(tmp_path: Path) -> None:
    """A bucket is matched by the same rules."""
    root = locate(tmp_path)
    names = ["a.jsonl", "b.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl", "sub/deep/e.txt", "x[1].txt"]
    hidden = [".hidden.jsonl", ".git/f.jsonl", "sub/.cache/g.jsonl"]
    for name in names + hidden:
        (root / name).write(b"")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    for pattern, said in (
        ("*.jsonl", "a.jsonl b.jsonl"),
        ("?.jsonl", "a.jsonl b.jsonl"),
        ("[b-z].jsonl", "b.jsonl"),
        ("*/*.jsonl", "sub/c.jsonl"),
        ("**/*.jsonl", "a.jsonl b.jsonl sub/c.jsonl sub/deep/d.jsonl"),
        ("sub/**", "sub/c.jsonl sub/deep/d.jsonl sub/deep/e.txt"),
        ("a.jsonl", "a.jsonl"),
        ("s*/d*/e.txt", "sub/deep/e.txt"),
        ("x[1].txt", "x[1].txt"),
        ("*.csv", ""),
        ("sub", ""),
    ):
        expected = said.split()
        found = [place.url for place, _ in (root / pattern).expand()]
        assert found == [(root / name).url for name in expected], pattern
        if pattern != "x[1].txt":
            matching = [n for n in names + hidden if path_matches(n.split("/"), pattern.split("/"))]
            assert matching == expected, pattern


def test_a_name_from_an_index_cannot_lead_outside(tmp_path: Path) -> None:
    for name in ("../x", "a/../../x", "/etc/passwd", "a\0b"):
        with pytest.raises(Unreachable, match="leads out of"):
            _ = locate(tmp_path) / name


def test_what_cannot_be_opened_is_refused_by_its_url() -> None:
    for url in ("gs://bucket/x", "hf://set", "s3:///key", "s3://a*/b", "file://h/x"):
        with pytest.raises(RecipeError, match=re.escape(url)):
            locate(url)


def test_create_writes_where_nothing_is_and_replace_what_was_looked_at(tmp_path: Path) -> None:
    place = locate(tmp_path) / "new" / "a"
    first = place.create(b"one")
    assert first is not None
    assert first == place.stat()
    assert place.create(b"two") is None
    second = place.replace(first.stamp, b"three")
    assert second is not None
    assert place.replace(first.stamp, b"four") is None
    assert (place.read(), place.stat()) == (b"three", second)
    place.delete()
    assert place.replace(second.stamp, b"five") is None
    assert list(place.parent.list()) == []


def test_of_many_that_replace_one_version_one_does(tmp_path: Path) -> None:
    place = locate(tmp_path) / "a"
    for number in range(10):
        place.write(b"%d" % number)
        before = place.stat()
        assert before is not None
        together = threading.Barrier(4)

        def replace(mine: int, stamp: str = before.stamp, at: threading.Barrier = together) -> bool:
            at.wait(SECONDS)
            return place.replace(stamp, b"%d" % mine) is not None

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(replace, range(4))) == 1


def test_unfinished_finds_what_a_killed_write_left_and_nothing_else(tmp_path: Path) -> None:
    root = locate(tmp_path)
    for name in ("a", "b/c.tmp", f"b/c.{'0' * 15}x.tmp", f"b/c.{'0' * 16}.tmp"):
        (root / name).write(b"1234")
    ((name, left),) = root.unfinished()
    assert (name, left.size) == (f"b/c.{'0' * 16}.tmp", 4)
    assert abs(left.modified - time.time()) < 60
    (root / name).delete()
    assert list(root.unfinished()) == []
    assert len(list(root.list(recursive=True))) == 3


def test_a_file_on_a_disk_that_was_replaced_since_it_was_found_is_refused(tmp_path: Path) -> None:
    place = locate(tmp_path / "a")
    place.write(b"before")
    found = place.stat()
    assert found is not None
    with place.open_random(found) as file:
        assert (file.seek(3), file.read()) == (3, b"ore")
    place.write(b"before")
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        place.open_random(found)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import HfFileSystem, constants

    with serving() as served:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        files = HfFileSystem(
            endpoint=served.url, token=False, use_listings_cache=False, skip_instance_cache=True
        )
        monkeypatch.setattr(storage_hub, "_files", lambda: files)
        yield served


def parquet(rows: int) -> bytes:
    out = io.BytesIO()
    texts, noise = [f"text {n}" for n in range(rows)], [f"{n:01000}" for n in range(rows)]
    pq.write_table(
        pa.table({"text": texts, "noise": noise}), out, compression="none", row_group_size=100
    )
    return out.getvalue()


def texts(tmp_path: Path, url: str) -> list[str]:
    units = plan(find([url], tmp_path), fields=("text",))
    return [r["text"] for unit in units for batch in read(unit) for r in batch.records]


def test_files_are_found_by_patterns_and_read_in_order(tmp_path: Path, hub: Hub) -> None:
    hub.files = {
        "data/b.jsonl": b'{"text": "two"}\n',
        "data/a.jsonl": b'{"text": "one"}\n',
        "README.md": b"#",
    }
    assert texts(tmp_path, "hf://datasets/org/name/data/*.jsonl") == ["one", "two"]
    assert texts(tmp_path, "hf://datasets/org/name/data/b.jsonl") == ["two"]
    assert [file.name for file in find(["hf://datasets/org/name/**/*.jsonl"], tmp_path)] == [
        "hf://datasets/org/name/data/a.jsonl",
        "hf://datasets/org/name/data/b.jsonl",
    ]


def test_of_a_parquet_only_ranges_are_fetched_and_one_that_is_replaced_is_noticed(
    tmp_path: Path, hub: Hub
) -> None:
    hub.files = {"a.parquet": parquet(1000)}
    assert texts(tmp_path, "hf://datasets/org/name/a.parquet") == [f"text {n}" for n in range(1000)]
    assert hub.ranges
    assert all(asked.startswith("bytes=") for _, asked in hub.ranges)
    units = plan(find(["hf://datasets/org/name/a.parquet"], tmp_path), fields=("text",))
    hub.files = {"a.parquet": parquet(1001)}
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        list(read(units[0]))


def test_stat_and_bytes_are_of_one_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    at, hub.files = locate("hf://datasets/org/name/a.jsonl"), {"a.jsonl": b"1\n"}
    found = at.stat()
    assert at.fetch() == (found, b"1\n")
    hub.files = {"a.jsonl": b"22\n"}
    monkeypatch.setattr(type(at), "stat", lambda self: found)
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        at.fetch()


def test_what_is_not_there_or_cannot_be_is_a_sentence(tmp_path: Path, hub: Hub) -> None:
    hub.files = {"a.jsonl": b"1\n"}
    with pytest.raises(RecipeError, match="matches no file"):
        find(["hf://datasets/org/name/none.jsonl"], tmp_path)
    for url in ("hf://org/name", "hf://datasets/org/name", "hf://models/org/name/a.jsonl"):
        with pytest.raises(RecipeError, match="names no file of a data set"):
            locate(url)
    with pytest.raises(Unreachable, match="cannot be written"):
        locate("hf://datasets/org/name/a.jsonl").write(b"x")
    with pytest.raises(Unreachable, match="cannot be read from the hub"):
        locate("hf://datasets/org/other/a.jsonl").open()


def test_a_hub_that_is_not_reached_is_said_with_what_to_look_at() -> None:
    for error in (TimeoutError("(Request ID: 1)"), OfflineModeIsEnabled("Cannot reach the hub")):
        said = rf"the hub \({type(error).__name__}\): .*HF_ENDPOINT and HF_HUB_OFFLINE"
        with pytest.raises(Unreachable, match=said), storage_hub._explained("hf://a"):
            raise error
