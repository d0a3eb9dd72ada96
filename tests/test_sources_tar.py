"""Members of a tar archive as the fields of records, and what is no whole archive."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mdsmix.errors import Unreachable
from mdsmix.sources import RecordBatch, content_of, find, format, plan, read

MEMBERS = [
    ("a/1.txt", b"one"),
    ("a/1.meta.JSON", b'{"n": [1]}'),
    ("b/1.txt", b"two"),
    ("b/1.jpg", b"\xff"),
]


def pack(
    path: Path, members: list[tuple[str, bytes]] = MEMBERS, mode: str = "w", **settings: Any
) -> Path:
    with tarfile.open(path, mode, **settings) as archive:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def batches(
    folder: Path, *fields: str, name: str = "a.tar", parsed: tuple[str, ...] = ()
) -> list[RecordBatch]:
    units = plan(find([name], folder), fields=fields, parsed=parsed)
    return [batch for unit in units for batch in read(unit)]


def bad(found: list[RecordBatch]) -> list[tuple[str, str]]:
    return [(w.reason, w.origin.place["member"]) for b in found for w in b.bad]


def test_a_record_is_the_members_of_one_name_up_to_its_first_dot(tmp_path: Path) -> None:
    pack(tmp_path / "a.tar")
    (batch,) = batches(tmp_path)
    assert batch.records == [
        {"__key__": "a/1", "txt": "one", "meta.json": '{"n": [1]}'},
        {"__key__": "b/1", "txt": "two", "jpg": b"\xff"},
    ]
    (batch,) = batches(tmp_path, "meta.json", parsed=("meta.json",))
    assert batch.records[0] == {"__key__": "a/1", "txt": 3, "meta.json": {"n": [1]}}, (
        "the size of what is not read"
    )
    assert batch.origin(1).place == {"member": "b/1"}
    assert batch.origin(1).shown == "member b/1"


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_archives_of_every_kind_are_known_alike(tmp_path: Path, format: int) -> None:
    pack(tmp_path / "a.tar", [("./d/", b""), *MEMBERS])
    pack(tmp_path / "b.tar.xz", mode="w:xz", format=format)
    one, other = (
        content_of(plan([file], fields=("txt",))[0]) for file in find(["[ab].tar*"], tmp_path)
    )
    assert one.windows[0].digest != other.windows[0].digest, "there is a member without a suffix"
    pack(tmp_path / "a.tar")
    one = content_of(plan(find(["a.tar"], tmp_path), fields=("txt",))[0])
    assert one.windows[0].digest == other.windows[0].digest


def test_bad_members_cost_their_neighbours_nothing(tmp_path: Path) -> None:
    hostile = [("../up.txt", b"x"), ("/etc/passwd.txt", b"x"), ("name", b"x"), ("._a.txt", b"x")]
    wrong = [("c.txt", b"1"), ("c.txt", b"2"), ("d.txt", b"\xff"), ("e.txt", b"last")]
    pack(tmp_path / "a.tar", [MEMBERS[0], *hostile, *wrong])
    found = batches(tmp_path, "txt")
    assert [r["txt"] for b in found for r in b.records] == ["one", "last"]
    assert bad(found) == [
        ("unsafe_name", "../up.txt"),
        ("unsafe_name", "/etc/passwd.txt"),
        ("no_suffix", "name"),
        ("duplicate_member", "c"),
        ("invalid_utf8", "d"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar"]


def test_a_member_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    pack(tmp_path / "a.tar", [("a.txt", b"x" * 2000), ("b.txt", b"two")])
    with patch.object(format, "LONGEST", 1000):
        found = batches(tmp_path, "txt")
    assert [r["txt"] for b in found for r in b.records] == ["two"]
    assert bad(found) == [("record_too_long", "a")]


@pytest.mark.parametrize(
    "cut", ["in a member", "in a header", "between two", "a header overwritten", "no tar"]
)
def test_an_archive_that_is_not_whole_is_a_sentence(tmp_path: Path, cut: str) -> None:
    path = pack(tmp_path / "a.tar", [("a.txt", b"x" * 600), ("b.txt", b"y" * 600), ("c.txt", b"z")])
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        second = archive.getmember("b.txt").offset
    path.write_bytes(
        {
            "in a member": whole[: second + 700],
            "in a header": whole[: second + 100],
            "between two": whole[:second],
            "a header overwritten": whole[:second] + b"#" * 512 + whole[second + 512 :],
            "no tar": b"text " * 300,
        }[cut]
    )
    with pytest.raises(Unreachable, match=r"a\.tar is no whole tar archive"):
        batches(tmp_path, "txt")


def test_members_are_forgotten_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tarfile keeps a list of all of them."""
    from mdsmix.sources import tar

    monkeypatch.setattr(tar, "_FORGET", 10)
    pack(tmp_path / "a.tar", [(f"{n}.txt", b"x") for n in range(95)])
    with tar._opened(find(["a.tar"], tmp_path)[0], "", 1 << 30) as archive:
        assert sum(1 for _ in tar._files(archive)) == 95
        assert len(archive.members) < 10
