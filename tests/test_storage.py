"""Local files: a write is complete or has no effect, a missing file is an ordinary result, and
every failure is one sentence. URLs are opened or refused with a suggestion.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlparse

import pytest

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.storage import find_store, locate, retries
from mdsmix.storage.local import explain_errors
from mdsmix.storage.location import path_matches
from mdsmix.storage.urls import STORES
from tests import azurite, fake_gcs
from tests.alarm import WAIT_SECONDS
from tests.clock import Clock
from tests.converting import Project, assert_refused, mdsmix, read_files, run_ok
from tests.minio import S3_SETTINGS


def test_a_store_is_listed_with_the_scheme_of_its_class() -> None:
    """Each class is also found by a URL of its scheme, not hidden by a store before it."""
    for store in STORES:
        store_class = find_store(f"{store.scheme}bucket/key")
        assert store_class is store.import_class()
        assert store_class.scheme == store.scheme


def test_a_written_file_is_read_completely_and_in_parts(tmp_path: Path) -> None:
    file = locate(tmp_path) / "new/folder" / "file.bin"
    file.write(b"ab", memoryview(b"cdef"), bytearray(b"g"))
    assert (file.read(), file.read(2, 3), file.read(6, 10)) == (b"abcdefg", b"cde", b"g")
    assert (file.read(99, 1), file.open(5).read()) == (b"", b"fg")
    stat = file.stat()
    with file.open_random(stat) as reader:
        assert (reader.seek(5), reader.read()) == (5, b"fg")
    file.write(b"1234567")
    assert file.stat() != stat, "the stamp changes with every write"
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        file.open_random(stat)


def test_a_write_that_fails_leaves_the_old_bytes_and_no_other_file(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="the disk is full"), explain_errors("write", "x"):
        Path("/dev/full").write_bytes(b"x" * 100_000)
    file = locate(tmp_path) / "a"
    file.write(b"old")
    with pytest.raises(TypeError):
        file.write(b"new", "text is not bytes")  # type: ignore[arg-type]
    assert file.read() == b"old"
    assert [name for name, _ in locate(tmp_path).list()] == ["a"]


def test_a_missing_file_is_an_error_only_if_it_is_read(tmp_path: Path) -> None:
    file = locate(tmp_path) / "none" / "x"
    assert (file.stat(), file.fetch(), list(file.list()), file.expand()) == (None, None, [], [])
    file.delete()
    for act in (file.read, file.open, partial(file.copy_to, locate(tmp_path) / "copy")):
        with pytest.raises(Unreachable, match="no such file"):
            act()


def test_fetch_returns_stat_and_content_of_a_file_but_not_of_a_folder(tmp_path: Path) -> None:
    folder = locate(tmp_path)
    file = folder / "a"
    file.write(b"abc")
    assert file.fetch() == (file.stat(), b"abc")
    assert file.fetch(3) == (file.stat(), b"abc")
    assert file.fetch(2) == (file.stat(), b"")
    assert (folder.fetch(), folder.stat(), (file / "below").fetch()) == (None, None, None)
    os.mkfifo(tmp_path / "pipe")
    for act, message in (
        (folder.read, "it is a folder"),
        (lambda: (file / "below").write(b""), "is a file, not a folder"),
        ((folder / "pipe").fetch, "which may never end"),
    ):
        with pytest.raises(Unreachable, match=message):
            act()


def test_expand_finds_the_same_files_as_a_shell(tmp_path: Path) -> None:
    """`path_matches` has the same rules; a bucket uses it."""
    root = locate(tmp_path)
    names = ["a.jsonl", "b.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl", "sub/deep/e.txt", "x[1].txt"]
    hidden = [".hidden.jsonl", ".git/f.jsonl", "sub/.cache/g.jsonl"]
    for name in names + hidden:
        (root / name).write(b"")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    for pattern, matches in (
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
        expected = matches.split()
        urls = [file.url for file, _ in (root / pattern).expand()]
        assert urls == [(root / name).url for name in expected], pattern
        if pattern != "x[1].txt":
            parts = pattern.split("/")
            matching = [name for name in names + hidden if path_matches(name.split("/"), parts)]
            assert matching == expected, pattern


def test_names_that_lead_outside_and_unknown_urls_are_refused(tmp_path: Path) -> None:
    for name in ("../x", "a/../../x", "/etc/passwd", "a\0b"):
        with pytest.raises(Unreachable, match="leads out of"):
            _ = locate(tmp_path) / name
    for url in ("oci://bucket/x", "hf://set", "s3:///key", "s3://a*/b", "file://h/x"):
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
    "oci://bucket/x": "/container/key, hf://buckets/org/name/key, and reads hf://datasets/org/name/file; copy the data to one of these",
    "gs:/bucket/x": "did you mean gs://bucket/x?",
    "gcs://bucket/x": "did you mean gs://bucket/x?",
    "s3:bucket/x": "did you mean s3://bucket/x? Or write ./s3:bucket/x if it is a local path",
    "S3A:bucket/x": "did you mean s3://bucket/x?",
    "s3//bucket/x": "did you mean s3://bucket/x? Or write ./s3//bucket/x if it is a local path",
    "hf:datasets/a/b/c": "did you mean hf://datasets/a/b/c?",
    "hf//datasets/a/b/c": "did you mean hf://datasets/a/b/c?",
    "file:data/x": "did you mean file:///data/x?",
    "gs:bucket/x": "did you mean gs://bucket/x? Or write ./gs:bucket/x if it is a local path",
    "gs//bucket/x": "did you mean gs://bucket/x? Or",
    "oci:bucket/x": "did you mean oci://bucket/x, which",
    "azure:x": "did you mean azure://x? Or write ./azure:x if it is a local path",
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
    local = ("./s3:/bucket/x", "./s3:x", "./s3//x", "s3/x", "s3", "/data/dbfs:/x")
    for name in (*local, "a/s3:x", "a/b:/c", "a:b", "s3x:b", "12:/x"):
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
        ("convert", recipe, f"streams.web.source.path={place}/a.jsonl"),
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


def test_every_recipe_key_refuses_a_url_without_a_bucket(project: Project) -> None:
    project.write_source(["a text of some words"])
    for key in ("local", "remote", "tokenizer", "streams.web.source.path"):
        assert_refused(
            mdsmix("convert", project.recipe, f"{key}=s3:///x"),
            2,
            "s3:///x",
            " does not name a bucket",
        )
    assert_refused(mdsmix("check", "s3:/bucket/recipe.yaml"), 2, "is not a file of this machine")
    account = "azure://tests.blob.core.windows.net"
    # With the stream's name after such a URL, the name would be the bucket.
    for url in ("s3://", "s3:///", "gs://", "azure://", account, f"{account}/", "hf://buckets/org"):
        answer = mdsmix("check", project.recipe, f"remote={url}")
        assert_refused(answer, 2, url.rstrip("/"), "does not name a")
        assert "web" not in answer.err
    for url in ("s3://bucket/../x", "gs://bucket/..", "hf://buckets/org/name/./x"):
        assert_refused(mdsmix("check", project.recipe, f"remote={url}"), 2, url, "is not a folder")
    assert locate("s3://Bucket/a/b/").path == "Bucket/a/b"  # old buckets of AWS have such names


def test_create_needs_a_missing_file_and_replace_the_version_of_the_stamp(tmp_path: Path) -> None:
    file = locate(tmp_path) / "new" / "a"
    first = file.create(b"one")
    assert first == file.stat() is not None
    assert file.create(b"two") is None
    second = file.replace(first.stamp, b"three")
    assert file.replace(first.stamp, b"four") is None
    assert (file.read(), file.stat()) == (b"three", second)
    file.delete()
    assert file.replace(second.stamp, b"five") is None
    assert list(file.parent.list()) == []


def test_only_one_of_several_writers_replaces_a_version(tmp_path: Path) -> None:
    file = locate(tmp_path) / "a"
    barrier = threading.Barrier(4)

    def replace(stamp: str, content: bytes) -> bool:
        barrier.wait(WAIT_SECONDS)
        return file.replace(stamp, content) is not None

    for number in range(10):
        file.write(b"%d" % number)
        with ThreadPoolExecutor(4) as pool:
            stamp = file.stat().stamp
            assert sum(pool.map(partial(replace, stamp), [b"a", b"b", b"c", b"d"])) == 1


def test_unfinished_finds_the_temporary_files_of_killed_writes_and_nothing_else(
    tmp_path: Path,
) -> None:
    root = locate(tmp_path)
    for name in ("a", "b/c.tmp", f"b/c.{'0' * 15}x.tmp", f"b/c.{'0' * 16}.tmp"):
        (root / name).write(b"1234")
    ((name, stat),) = root.unfinished()
    assert (name, stat.size) == (f"b/c.{'0' * 16}.tmp", 4)
    assert abs(stat.modified - time.time()) < 60
    (root / name).delete()
    assert list(root.unfinished()) == []
    assert len(list(root.list(recursive=True))) == 3


def test_a_url_whose_key_streaming_would_cut_off_is_refused(project: Project) -> None:
    """`#` and `?` are refused in remote, in a stream's split, and in the folder of a mix."""
    for sign in "#?":
        for override in (f"remote=s3://bucket/c{sign}/mix", f"local=file:///mix/c{sign}"):
            answer = mdsmix("convert", project.recipe, override)
            assert_refused(answer, 2, f"contains `{sign}`")
        answer = mdsmix("mix", project.recipe, "-o", f"s3://bucket/c{sign}/mix")
        assert_refused(answer, 2, f"contains `{sign}`")
        url = f"https://bucket/c{sign}/mix/shard.mds"
        assert urlparse(url).path != f"/c{sign}/mix/shard.mds", "as Streaming parses it"
        long_text = "a text of more tokens than a row holds, which is sixteen of them"
        project.write_source([long_text] * 3)
        run_ok("convert", project.recipe, f"local={project.folder / sign}")


WHOLE = b"0123456789"
WHOLE_HEADERS = {
    "content-length": str(len(WHOLE)),
    "etag": '"0x1"',
    "last-modified": "Sun, 29 Nov 2026 19:02:09 GMT",
    "x-goog-generation": "17",
    "x-goog-stored-content-length": str(len(WHOLE)),
}
"The headers of an answer with WHOLE, from any of the stores."


@contextmanager
def serve_answer(headers: Mapping[str, str]) -> Iterator[str]:
    """Answer each GET with all of WHOLE and these headers, whatever its Range. Yield the address of
    the server.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(WHOLE)

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


STORES_ON_LOOPBACK = {
    "s3://bucket/x": S3_SETTINGS,
    "gs://bucket/x": fake_gcs.SETTINGS,
    f"azure://{azurite.HOST}/container/x": {azurite.VARIABLE: azurite.STRING},
}
"URL -> the environment variables that lead it to an address."


@pytest.mark.parametrize("url", STORES_ON_LOOPBACK)
def test_the_whole_object_in_place_of_a_part_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that ignores Range answers 200."""
    monkeypatch.setattr(retries, "time", Clock())
    with serve_answer(WHOLE_HEADERS) as address:
        for name, value in STORES_ON_LOOPBACK[url].items():
            monkeypatch.setenv(name, value.format(url=address))
        file = locate(url)
        assert file.read() == WHOLE
        for read in (lambda: file.read(4, 3), lambda: file.open(4).read()):
            with pytest.raises(Unreachable, match=r"not an answer of|with the whole object"):
                read()


@pytest.mark.parametrize(
    ("url", "changed"),
    [
        (f"azure://{azurite.HOST}/container/x", {"content-length": None}),
        ("gs://bucket/x", {"x-goog-stored-content-length": "many"}),
        ("gs://bucket/x", {"last-modified": "today"}),
        ("gs://bucket/x", {"x-goog-hash": "crc32c=????"}),
    ],
)
def test_an_answer_of_another_form_is_one_sentence(
    url: str, changed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "time", Clock())
    headers = {name: value for name, value in {**WHOLE_HEADERS, **changed}.items() if value}
    with serve_answer(headers) as address:
        for name, value in STORES_ON_LOOPBACK[url].items():
            monkeypatch.setenv(name, value.format(url=address))
        with pytest.raises(Unreachable, match="the store's answer was cut off, or is not an"):
            locate(url).fetch()


def test_a_search_names_the_inner_folder_that_it_could_not_list() -> None:
    for name, named in (("/a/b/c", "/a/b/c"), ("/a/b", "/a/b"), ("/a/bc", "/a/b"), (None, "/a/b")):
        with (
            pytest.raises(Unreachable, match=f"^cannot list {named}: permission denied;"),
            explain_errors("list", "/a/b"),
        ):
            raise PermissionError(errno.EACCES, "Permission denied", name)
