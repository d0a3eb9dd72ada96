"""A pattern may match pipes, devices, links, and names that would control a terminal. Bad records
are set aside with their place and reason, and their neighbours are converted.

A source is read through the links that its pattern names, and no command writes through a link in
its output. A `**` does not follow links to folders, so a link to a parent folder does no harm. It
follows links to files, since caches of downloaded data sets consist of them.
"""

from __future__ import annotations

import gzip
import lzma
import os
from pathlib import Path

import pytest
import zstandard

from mdsmix.errors import Unreachable
from mdsmix.sources import find_files, inflate, plan_units
from tests.abuse.conftest import Arena
from tests.alarm import WAIT_SECONDS
from tests.converting import manifest_of, read_quarantined, write_jsonl
from tests.processes import run_and_measure

RECORDS = [{"text": "one two three four five " * 9}] * 9
REFUSED = {
    "data/pipe.jsonl": "this is a pipe, a socket or a device",
    "data/*.jsonl": "this is a pipe, a socket or a device",
    "zero.jsonl": "this is a pipe, a socket or a device",
    "folders/*.jsonl": "matches no file",
    "folders/**/*.jsonl": "matches no file",
    "/*/nothing-*.jsonl": "matches no file",
    "/dev/*": "",
    "/proc/self/fd/*": "",
    "a\0.jsonl": "",
    "data/*\0.jsonl": "",
}
"""Path of a source -> a part of the message. No run waits for a pipe, or reads /dev/zero for ever.
"""


def test_a_path_that_names_no_file_of_records_is_refused(arena: Arena) -> None:
    write_jsonl(arena.home / "data" / "a.jsonl", RECORDS)
    os.mkfifo(arena.home / "data" / "pipe.jsonl")
    (arena.home / "zero.jsonl").symlink_to("/dev/zero")
    (arena.home / "folders" / "a.jsonl" / "b.jsonl").mkdir(parents=True)
    for path, message in REFUSED.items():
        assert message in arena.refused("convert", arena.recipe(path)), path
    for extra in (["--limit", 3], ["--dry-run"]):
        assert "a pipe" in arena.refused("convert", arena.recipe("data/*.jsonl"), *extra)
    for command in ("verify", "inspect", "check", "gc"):
        assert arena.refused(command, "a\0b")


NAMES = ["a\nb.jsonl", "\x1b]0;owned\x07.jsonl", "a b'\"$(id).jsonl", "-rf.jsonl", "é\u202e.jsonl"]


def test_a_file_s_name_controls_neither_a_shell_nor_a_terminal(arena: Arena) -> None:
    for name in NAMES:
        write_jsonl(arena.home / "data" / "c.jsonl" / name, [*RECORDS, {"no": "text"}])
    recipe = arena.recipe("data/**/*.jsonl")
    folder, read = arena.convert(recipe), {f"data/c.jsonl/{name}" for name in NAMES}
    assert {file.path for file in manifest_of(folder).sources} == read
    assert {bad["file"] for bad in read_quarantined(folder)} == read
    for name in NAMES:
        named = ((command, f"no {name}") for command in ("verify", "check"))
        for arguments in (("convert", recipe, "--only", name), *named):
            answer = arena.run(*arguments)
            assert answer.code in (2, 4)
            assert answer.err.rstrip("\n").isprintable(), answer.err


@pytest.fixture
def recipe(arena: Arena) -> Path:
    write_jsonl(arena.home / "data" / "a.jsonl", RECORDS)
    return arena.recipe("data/**/*.jsonl")


@pytest.fixture
def elsewhere(arena: Arena) -> Path:
    folder = arena.home.parent / "elsewhere"
    write_jsonl(folder / "b.jsonl", RECORDS)
    return folder


def test_a_link_to_a_file_is_read_and_one_to_a_folder_only_if_the_pattern_names_it(
    arena: Arena, recipe: Path, elsewhere: Path
) -> None:
    data = arena.home / "data"
    (data / "b.jsonl").symlink_to(elsewhere / "b.jsonl")
    (data / "sub").symlink_to(elsewhere)
    # Without another file in it, all of the folder is read: by the link to b.jsonl.
    assert "data/sub" not in arena.run("convert", recipe, "--quiet", "--dry-run").err
    (elsewhere / "c.jsonl").write_bytes((elsewhere / "b.jsonl").read_bytes())
    (data / "up").symlink_to("..")
    (data / "self").symlink_to("self")
    unread = f"the files in data/sub (to {elsewhere}) are not read: to read them, name the link in"
    answer = arena.run("convert", recipe, "--quiet")
    assert (answer.code, "data/up" in answer.err) == (0, False)
    assert unread in answer.err
    sources = manifest_of(arena.convert(recipe)).sources
    assert [file.path for file in sources] == ["data/a.jsonl", "data/b.jsonl"]
    both = "streams.web.source.path=[data/**/*.jsonl, data/sub/**/*.jsonl]"
    assert unread not in arena.run("convert", recipe, both, "--dry-run").err
    (data / "disk").symlink_to("unmounted")
    assert "data/disk (to " in arena.run("convert", recipe, "--quiet").err
    (data / "disk").unlink()
    named = arena.recipe("data/sub/*.jsonl")
    sources = manifest_of(arena.convert(named, "--reencode")).sources
    assert [file.path for file in sources] == ["data/sub/b.jsonl", "data/sub/c.jsonl"]
    recipe = arena.recipe("data/**/*.jsonl")
    # Otherwise the link's target would be silently missing from the stream.
    for name, target, message in (
        ("self.jsonl", "self.jsonl", "self.jsonl"),
        ("gone.jsonl", "nowhere", "gone.jsonl: this is a link to"),
    ):
        (data / name).symlink_to(target)
        assert message in arena.refused("convert", recipe)
        (data / name).unlink()


def test_nothing_is_written_through_a_link_in_the_output(
    arena: Arena, recipe: Path, elsewhere: Path
) -> None:
    """Nor through a link in place of a version."""
    arena.convert(recipe, "publish=versioned", f"local={arena.out / 'first'}")
    (version,) = (arena.out / "first" / "web").glob("train-*")
    anyhow = ([], ["--reencode"], ["--dry-run"])
    links = dict.fromkeys(("", "train", "train/.mdsmix", "train/quarantine"), anyhow)
    for name, ways in (links | {version.name: (["publish=versioned"],)}).items():
        link = arena.out / "web" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        for target in ("elsewhere", "nowhere"):
            link.symlink_to(elsewhere.with_name(target))
            for options in ways:
                assert "is a link to" in arena.refused("convert", recipe, *options), name
            link.unlink()


def test_a_link_in_place_of_a_published_file_is_replaced_by_the_file(
    arena: Arena, recipe: Path
) -> None:
    folder = arena.convert(recipe)
    [shard] = folder.glob("*.mds")
    links = [shard, folder / "index.json", folder / "mdsmix.manifest"]
    for link in links:
        link.unlink()
        link.symlink_to(arena.home.parent / "precious.jsonl")
    arena.convert(recipe, "--reencode")
    assert not any(link.is_symlink() for link in links)
    assert arena.run("verify", folder).code == 0


def test_a_target_that_is_a_link_is_followed_and_gc_deletes_nothing_through_links(
    arena: Arena, recipe: Path, elsewhere: Path
) -> None:
    (arena.out / "disk").mkdir(parents=True)
    (arena.out / "link").symlink_to("disk")
    arena.convert(recipe, f"local={arena.out}/link")
    folder, old = arena.out / "disk" / "web" / "train", elsewhere / ("a" * 32 + ".mds")
    assert (folder / "index.json").exists()
    old.write_bytes(b"old")
    os.utime(old, (0, 0))
    (folder / "sub").symlink_to(elsewhere)
    (folder / ".mdsmix" / "old").symlink_to(elsewhere)
    assert arena.run("gc", folder, "--delete").code == 0


GOOD = b'{"text": "one two three four five six seven eight nine ten eleven twelve"}\n'
LINES: dict[str, tuple[bytes, str]] = {
    "deep lists": (b"[" * 100_000 + b"]" * 100_000, "too_deep"),
    "deep objects": (b'{"text":' * 20_000 + b"1" + b"}" * 20_000, "too_deep"),
    "deep and never closed": (b"[" * 1_000_000, "not_json"),
    "invalid UTF-8": (b'{"text": "\xff\xfe"}', "invalid_utf8"),
    "surrogates in bytes": (b'{"text": "\xed\xa0\x80"}', "invalid_utf8"),
    "half a pair": (b'{"text": "\\ud800"}', "lone_surrogate"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16-le"), "not_json"),
    "a mark inside": (b"\xef\xbb\xbf" + GOOD.strip(), "not_json"),
    "not a number": (b'{"text": NaN}', "not_json"),
    "without end": (b'{"text": Infinity}', "not_json"),
    "a million digits": (b'{"text": ' + b"9" * 1_000_000 + b"}", "unreadable_value"),
    "an exponent without end": (b'{"text": 1e999999}', "unreadable_value"),
    "a NUL": (b"\0", "not_json"),
    "two on a line": (GOOD.strip() + b"," + GOOD.strip(), "not_json"),
    "a code": (b'__import__("os").system("true")', "not_json"),
    "a list": (b'["text"]', "not_an_object"),
    "another key": (b'{"txet": "a"}', "missing_field"),
    "a text in a list": (b'{"text": ["a"]}', "field_not_text"),
}


def test_each_bad_line_is_set_aside_with_its_place(arena: Arena) -> None:
    """If a key occurs twice, the last one counts."""
    lines = b"".join(GOOD + line + b"\n" for line, _ in LINES.values())
    (arena.home / "a.jsonl").write_bytes(lines + b'{"text": 1, ' + GOOD[1:])
    folder = arena.convert(arena.recipe())
    records, bad = manifest_of(folder).records, read_quarantined(folder)
    assert (records.read, records.written) == (2 * len(LINES) + 1, len(LINES) + 1)
    by_line = {record["line"]: (record["reason"], record["length"]) for record in bad}
    for number, (name, (line, reason)) in enumerate(LINES.items()):
        given_reason, length = by_line[2 * number + 2]
        assert (
            given_reason in {reason, "too_deep"}
            if name == "deep and never closed"
            else given_reason == reason
        )
        assert length == len(line), name


def test_a_file_without_a_record_is_refused_with_one_sentence(arena: Arena) -> None:
    for content in (b"", b"\n" * 99, b"\xef\xbb\xbf", b"\0" * 4096, b"[]", b"\xff"):
        (arena.home / "a.jsonl").write_bytes(content)
        message = arena.refused("convert", arena.recipe())
        assert "its source gives no sample" in message, content


def test_a_decompression_bomb_takes_time_and_not_memory(arena: Arena) -> None:
    """A file expands more than 200-fold to hundreds of MB, while a line may have 256: the line is
    set aside without being kept.
    """
    for suffix, pack, byte in (
        (".gz", gzip.compress, b"\0"),
        (".zst", zstandard.compress, b" "),
        (".xz", lzma.compress, b"\0"),
    ):
        block = byte * (4 << 20)
        packed = pack(GOOD * 9) + pack(b"\n" + block) + pack(block) * 70 + pack(b"\n")
        assert 70 * len(block) > 200 * len(packed)
        (arena.home / f"a.jsonl{suffix}").write_bytes(packed)
        records = manifest_of(arena.convert(arena.recipe(f"a.jsonl{suffix}"))).records
        assert (records.written, records.quarantined) == (9, {"line_too_long": 1})
    [unit] = plan_units(find_files(["a.jsonl.xz"], arena.home))
    with (
        pytest.raises(Unreachable, match="was compressed with a window larger"),
        inflate.open_unpacked(unit.files[0], ".xz", memory=1 << 20) as stream,
    ):
        stream.read(1)


def test_a_line_of_300_megabytes_is_set_aside_by_its_place_and_length(arena: Arena) -> None:
    """The memory of all processes is bounded: a line is kept up to 256 MiB, in pieces that the
    allocator may keep twice.
    """
    source, length = arena.home / "a.jsonl", 300 << 20
    with source.open("wb") as file:
        file.write(GOOD * 9)
        file.seek(length, os.SEEK_CUR)  # a hole in the file, which is read as NULs
        file.write(b"\n" + GOOD * 9)
    _, peak = run_and_measure("convert", arena.recipe(source), "--workers", 2, seconds=WAIT_SECONDS)
    source.unlink()
    folder = arena.out / "web" / "train"
    assert manifest_of(folder).records.written == 18
    [bad] = read_quarantined(folder)
    assert (bad["reason"], bad["line"], bad["length"]) == ("line_too_long", 10, length)
    assert bad["raw"] == ""
    assert peak < 1 << 30, f"{peak >> 20} MiB"
