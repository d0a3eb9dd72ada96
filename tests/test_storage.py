"""Local files: a write is all or nothing, missing is an answer, and every failure is a sentence."""

from __future__ import annotations

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlparse

import pytest

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.storage import locate
from mdsmix.storage.local import explained
from mdsmix.storage.location import path_matches
from tests.alarm import WAIT_SECONDS
from tests.converting import Project, assert_refused, mdsmix, read_files, run_ok


def test_what_is_written_is_read_in_full_and_in_part(tmp_path: Path) -> None:
    place = locate(tmp_path) / "new/folder" / "file.bin"
    place.write(b"ab", memoryview(b"cdef"), bytearray(b"g"))
    assert (place.read(), place.read(2, 3), place.read(6, 10)) == (b"abcdefg", b"cde", b"g")
    assert (place.read(99, 1), place.open(5).read()) == (b"", b"fg")
    found = place.stat()
    with place.open_random(found) as file:
        assert (file.seek(5), file.read()) == (5, b"fg")
    place.write(b"1234567")
    assert place.stat() != found, "the stamp changes with every write"
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        place.open_random(found)


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
        ((folder / "pipe").fetch, "which may never end"),
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


def test_what_leads_outside_or_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for name in ("../x", "a/../../x", "/etc/passwd", "a\0b"):
        with pytest.raises(Unreachable, match="leads out of"):
            _ = locate(tmp_path) / name
    for url in ("gs://bucket/x", "hf://set", "s3:///key", "s3://a*/b", "file://h/x"):
        with pytest.raises(RecipeError, match=re.escape(url)):
            locate(url)


REFUSED = {
    "s3:/bucket/x": "did you mean s3://bucket/x?",
    "S3://bucket/x": "did you mean s3://bucket/x?",
    "s3a://bucket/x": "did you mean s3://bucket/x?",
    "hf:/datasets/a/b/c": "did you mean hf://datasets/a/b/c?",
    "file:/data/x": "did you mean file:///data/x?",
    "file://host/x": "did you mean file:///host/x?",
    "C:/data/x": "such as /mnt/c/data/x",
    "C:\\data": "such as /mnt/c/data",
    "dbfs:/Volumes/a/b/c": "or write ./dbfs:/Volumes/a/b/c if it is a local path",
    "gs://bucket/x": "copy the data to one of these",
    "s3:bucket/x": "did you mean s3://bucket/x? Or write ./s3:bucket/x if it is a local path",
    "S3A:bucket/x": "did you mean s3://bucket/x?",
    "s3//bucket/x": "did you mean s3://bucket/x? Or write ./s3//bucket/x if it is a local path",
    "hf:datasets/a/b/c": "did you mean hf://datasets/a/b/c?",
    "hf//datasets/a/b/c": "did you mean hf://datasets/a/b/c?",
    "file:data/x": "did you mean file:///data/x?",
    "gs:bucket/x": "did you mean gs://bucket/x, which",
    "gs//bucket/x": "did you mean gs://bucket/x, which",
    "oci:bucket/x": "did you mean oci://bucket/x, which",
    "azure:x": "did you mean azure://x, which",
    "azure-dl:x": "did you mean azure-dl://x, which",
    "dbfs:Volumes/a": "did you mean dbfs:/Volumes/a, which",
    "sftp:host/x": "did you mean sftp://host/x, which",
    "http:host/x": "did you mean http://host/x, which",
    "https:host/x": "or write ./https:host/x if it is a local path",
}


def test_a_name_that_begins_like_a_url_is_one_or_is_refused(tmp_path: Path) -> None:
    for name, words in REFUSED.items():
        with pytest.raises(RecipeError, match=f"^{re.escape(name)} cannot be opened: ") as error:
            locate(name)
        assert words in str(error.value)
    here = ("./s3:/bucket/x", "./s3:x", "./s3//x", "s3/x", "s3", "/data/dbfs:/x")
    for name in (*here, "a/s3:x", "a/b:/c", "a:b", "s3x:b", "12:/x"):
        assert locate(name).url == os.path.abspath(name)
    assert locate("file:///data/a%20b").url == "/data/a b"


@pytest.mark.parametrize("place", ["s3:/bucket/x", "s3:bucket/x", "s3//bucket/x", "dbfs:Volumes"])
def test_no_command_takes_a_mistyped_url_for_a_folder(project: Project, place: str) -> None:
    project.write_source(
        ["a text of more tokens than a row of the stream holds, which is sixteen"] * 3
    )
    run_ok("convert", project.recipe)
    project.patch.chdir(project.folder)
    before = read_files(project.folder)
    stream, recipe = project.train, project.recipe
    for command in (
        ("convert", recipe, f"local={place}"),
        ("convert", recipe, f"remote={place}"),
        ("convert", recipe, f"tokenizer={place}"),
        ("convert", recipe, f"streams.project.source.path={place}/a.jsonl"),
        ("check", recipe, f"local={place}"),
        ("check", place),
        ("check", f"{place}/recipe.yaml"),
        ("plan", place, "--batch", 8),
        ("leaks", recipe, "--eval", place),
        ("init", place, "--tokenizer", project.tokenizer),
        ("init", project.folder / "a.jsonl", "--tokenizer", place),
        (
            "init",
            project.folder / "a.jsonl",
            "--tokenizer",
            project.tokenizer,
            "-o",
            f"{place}/r.yaml",
        ),
        ("inspect", place),
        ("inspect", stream, "--images", place),
        ("verify", place),
        ("quarantine", place),
        ("gc", place),
        ("repair", place, "--recipe", recipe),
        ("fetch", f"{place}/tokenizer-0f3a9c21", "tokenizer"),
        ("fetch", project.out / "tokenizer-0f3a9c21", place),
        ("render-yaml", recipe, "-o", f"{place}/train.yaml"),
        ("report", recipe, "-o", f"{place}/report.html"),
        ("mix", recipe, "-o", place),
        ("mix", recipe, "-o", "mixed", "--tmp", place),
    ):
        assert_refused(mdsmix(*command), 2, place)
    assert read_files(project.folder) == before


def test_every_key_says_that_a_url_names_no_bucket(project: Project) -> None:
    project.write_source(["a text of some words"])
    for key in ("local", "remote", "tokenizer", "streams.project.source.path"):
        assert_refused(
            mdsmix("convert", project.recipe, f"{key}=s3:///x"),
            2,
            "s3:///x",
            " does not name a bucket",
        )
    assert_refused(mdsmix("check", "s3:/bucket/recipe.yaml"), 2, "is not a file of this machine")


def test_create_writes_where_nothing_is_and_replace_what_was_looked_at(tmp_path: Path) -> None:
    place = locate(tmp_path) / "new" / "a"
    first = place.create(b"one")
    assert first == place.stat() is not None
    assert place.create(b"two") is None
    second = place.replace(first.stamp, b"three")
    assert place.replace(first.stamp, b"four") is None
    assert (place.read(), place.stat()) == (b"three", second)
    place.delete()
    assert place.replace(second.stamp, b"five") is None
    assert list(place.parent.list()) == []


def test_of_many_that_replace_one_version_one_does(tmp_path: Path) -> None:
    place, together = locate(tmp_path) / "a", threading.Barrier(4)

    def replace(stamp: str, mine: bytes) -> bool:
        together.wait(WAIT_SECONDS)
        return place.replace(stamp, mine) is not None

    for number in range(10):
        place.write(b"%d" % number)
        with ThreadPoolExecutor(4) as pool:
            stamp = place.stat().stamp
            assert sum(pool.map(partial(replace, stamp), [b"a", b"b", b"c", b"d"])) == 1


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


def test_a_place_at_which_streaming_would_end_the_key_is_refused(project: Project) -> None:
    """`#` and `?`, in remote, in the name of a stream's split, and in the place of a mix."""
    for sign in "#?":
        for override in (f"remote=s3://bucket/c{sign}/mix", f"local=file:///mix/c{sign}"):
            assert_refused(mdsmix("convert", project.recipe, override), 2, f"has a `{sign}`")
        assert_refused(
            mdsmix("mix", project.recipe, "-o", f"s3://bucket/c{sign}/mix"), 2, f"has a `{sign}`"
        )
        text = f"https://bucket/c{sign}/mix/shard.mds"
        assert urlparse(text).path != "/c" + sign + "/mix/shard.mds", "as Streaming parses it"
        project.write_source(
            ["a text of more tokens than a row holds, which is sixteen of them"] * 3
        )
        run_ok("convert", project.recipe, f"local={project.folder / sign}")
