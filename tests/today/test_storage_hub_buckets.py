"""Storage buckets of the Hugging Face hub, as source and as target, with the huggingface_hub and
hf_xet that users have. A server on the loopback answers them as the hub does (`bucket_hub`).

Tests of other stores run here too, against this one.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem, constants

from mdsmix.errors import Denied, NoSuchPlace, RecipeError, Unreachable
from mdsmix.shards import lease
from mdsmix.storage import Location, hub_buckets, locate, retries
from mdsmix.storage import hub as storage_hub
from mdsmix.storage.hub_buckets import HubBucketPath
from mdsmix.storage.hub_errors import hide_retry_lines
from mdsmix.storage.notices import redirect_notices
from tests.converting import Project, documents, mdsmix, pairs, read_location
from tests.e2e import test_killed
from tests.e2e.test_killed import (
    WINDOW,
    Life,
    Runs,
    test_a_killed_run_that_is_started_again_publishes_the_same_bytes,  # noqa: F401
)
from tests.killed_run import Write
from tests.paused_run import assert_paused_run_publishes_nothing
from tests.stores.servers import Store
from tests.stores.test_stores import (
    ODD,
    TEXTS,
    test_a_stream_is_converted_mixed_repaired_changed_and_tidied,  # noqa: F401
    test_create_and_replace_keep_their_conditions,  # noqa: F401
)
from tests.today.bucket_hub import BUCKET, TOKEN, BucketHub, run_hub

ROOT = f"hf://buckets/{BUCKET}"
CHANGED = "was changed while it was being read"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[BucketHub]:
    """Run a hub for this process and those that it starts."""
    with run_hub() as server:
        settings = {
            "HF_ENDPOINT": server.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms",  # 3 s
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub_buckets._make_api.cache_clear()
        yield server
    hub_buckets._make_api.cache_clear()


@pytest.fixture
def root(hub: BucketHub) -> Location:
    return locate(ROOT)


@pytest.fixture
def store(hub: BucketHub) -> Store:
    """The hub as the tests of other stores know it."""
    return Store(name="hub", url=hub.endpoint, settings={}, keeps_conditions=False)


@pytest.fixture
def runs(hub: BucketHub, project: Project) -> Runs:
    """Return runs that are killed twice only, because an upload takes long: during the work, and
    before the index is replaced. `MDSMIX_TEST_KILLS` sets more.
    """
    kills = [Write("worker", "record", "after", 4), Write("main", "index.json", "before")]
    project.patch.setattr(test_killed, "plan_lives", lambda runs: [Life(False, kills)])
    project.set_window_size(WINDOW)
    sources = [project.folder / name for name in ("a.jsonl", "b.jsonl.zst")]
    project.configure(streams={"web": documents(sources), "faq": pairs(project.folder / "c.jsonl")})
    drop = "streams.web.duplicates=drop"
    return Runs(project.recipe, "remote", ROOT, 2, settings=(drop,), late=2)


def refuse(hub: BucketHub, status: int, part: str) -> None:
    """Let the hub refuse all requests whose path contains `part`."""
    hub.fault = lambda request: status if part in request.path else None


def count(hub: BucketHub, part: str) -> int:
    """Return how many requests have a path that contains `part`."""
    return sum(part in request.path for request in hub.requests)


def test_files_of_any_name_are_written_listed_read_copied_and_deleted(
    hub: BucketHub, root: Location
) -> None:
    hub.page = 5
    folder = root / "a folder"
    for name in ODD:
        (folder / name).write(name.encode(), b"-1234")
    listed = dict(folder.list())
    assert list(listed) == sorted(ODD)
    for name in ODD:
        file = folder / name
        content = name.encode() + b"-1234"
        size = len(content)
        assert (file.read(), file.read(size - 3, 2)) == (content, b"23")
        assert file.fetch() == (listed[name], content)
        assert file.fetch(max_bytes=3) == (listed[name], b"")
        assert file.stat() == listed[name]
    file.delete()
    file.delete()
    assert (file.stat(), file.fetch()) == (None, None)
    with pytest.raises(NoSuchPlace, match="there is no such file"):
        file.read()
    folder.delete_all([*ODD, "not there"])
    assert list(root.list(recursive=True)) == []
    for content in (b"", random.Random(1).randbytes(5_000_000) + b"abcd" * 90_000):
        file = root / "large ü"
        file.write(content[:1000], memoryview(content)[1000:])
        file.copy_to(root / "other" / "copy")
        assert (root / "other/copy").read() == content
        assert (root / "other/copy").stat() == file.stat()


def test_what_a_batch_has_not_deleted_is_deleted_afterwards(hub: BucketHub, root: Location) -> None:
    for name in "abc":
        (root / "folder" / name).write(name.encode())
    hub.failing = {"folder/b"}
    (root / "folder").delete_all(["a", "b", "missing"])
    assert [name for name, _ in root.list(recursive=True)] == ["folder/c"]
    hub.failing = {"folder/c"}
    with pytest.raises(Unreachable, match="refuses the change"):
        (root / "folder/c").delete()
    refuse(hub, 403, "/batch")
    with pytest.raises(Denied, match="access denied"):
        (root / "folder").delete_all(["c"])


def test_a_folder_has_no_files_of_folders_whose_names_only_begin_alike(
    hub: BucketHub, root: Location
) -> None:
    for name in ("logs/z", "logs/a", "logs/b/c", "logs.json", "logs_old/d", "x"):
        (root / name).write(name.encode())
    for page in (1, 1000):
        hub.page = page
        assert [name for name, _ in (root / "logs").list()] == ["a", "z"]
        assert [name for name, _ in (root / "logs").list(recursive=True)] == ["a", "b/c", "z"]
        assert list((root / "logs").folders()) == ["b"]
        assert list(root.folders()) == ["logs", "logs_old"]
        assert [name for name, _ in root.list()] == ["logs.json", "x"]
        assert list((root / "log").list()) == list((root / "none").list(recursive=True)) == []
    urls = [file.url for file, _ in (root / "logs*/**").expand()]
    assert urls == [f"{ROOT}/{name}" for name in ("logs/a", "logs/b/c", "logs/z", "logs_old/d")]
    assert (root / "logs").stat() is None


@pytest.mark.parametrize("sends_hash", [True, False])
def test_a_file_that_is_replaced_or_deleted_is_never_read_as_a_mixture(
    sends_hash: bool, hub: BucketHub, root: Location
) -> None:
    hub.sends_hash = sends_hash
    file = root / "a"
    file.write(b"1" * 5000)
    stat = file.stat()
    assert stat
    reader = file.open_random(stat, ahead=100)
    assert reader.read(10) == b"1" * 10
    file.write(b"2" * 5000)
    reader.seek(4000)
    with pytest.raises(Unreachable, match=CHANGED):
        reader.read(10)
    with pytest.raises(Unreachable, match=CHANGED):
        file.open(stamp=stat.stamp)
    # A whole read that was overtaken begins again.
    new = file.stat()
    file.write(b"3" * 5000)
    looks = iter([new])
    with pytest.MonkeyPatch.context() as patch:
        stat_now = type(file).stat
        patch.setattr(type(file), "stat", lambda self: next(looks, None) or stat_now(self))
        assert file.fetch() == (stat_now(file), b"3" * 5000)
    reader = file.open()
    file.delete()
    with pytest.raises(Unreachable, match=CHANGED):
        reader.read()


def test_of_a_large_file_only_ranges_are_requested(hub: BucketHub, root: Location) -> None:
    content = random.Random(2).randbytes(20_000_000)
    (root / "large").write(content)
    hub.requests.clear()
    assert (root / "large").read(12_345_678, 100) == content[12_345_678:12_345_778]
    assert [request.method for request in hub.requests] == ["POST", "GET", "GET"]
    assert hub.ranges == ["bytes=12345678-12345777"]
    with (root / "large").open() as reader:
        assert reader.read() == content
    assert len(hub.ranges) == 4


def test_a_body_that_breaks_is_requested_again(
    hub: BucketHub, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    content = random.Random(3).randbytes(1_000_000)
    file = root / "a"
    file.write(content)
    for read, expected in (
        (file.read, content),
        (lambda: file.read(500_000, 7), content[500_000:500_007]),
    ):
        hub.broken = 8
        assert read() == expected
        assert not hub.broken


def test_of_two_writers_at_the_same_moment_the_one_that_is_overwritten_notices(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked before either of them writes, and both have written before either of them
    looks again.
    """
    barrier = threading.Barrier(2)

    def wait_for_other(method: Callable[..., Any]) -> Callable[..., Any]:
        def wait_first(*arguments: Any) -> Any:
            barrier.wait(10)
            return method(*arguments)

        return wait_first

    file = root / "a"
    for name in ("_write_and_verify", "fetch"):
        monkeypatch.setattr(HubBucketPath, name, wait_for_other(getattr(HubBucketPath, name)))
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(file.create, [b"one", b"two"]))
    assert [result for result in results if result] == [file.stat()]


def test_a_run_does_not_write_what_another_run_is_writing(root: Location, project: Project) -> None:
    project.write_source(TEXTS)
    project.configure(remote=f"{ROOT}/mix")
    with lease.hold_lease(root / "mix/web/train", lambda sentence: None):
        answer = project.convert()
    assert answer.code == 4
    assert f"{ROOT}/mix/web/train is being written by process" in answer.err.splitlines()[-1]
    assert project.run().done


def test_a_paused_run_publishes_nothing_over_a_newer_one(root: Location, project: Project) -> None:
    project.configure(remote=f"{ROOT}/mix")
    assert_paused_run_publishes_nothing(project.recipe, root / "mix/web/train", "replace")


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, Unreachable, "does not accept the login.*HF_TOKEN"),
        (403, Denied, "access denied"),
        (404, NoSuchPlace, "no such bucket or file"),
        (413, Unreachable, "too large"),
        (418, Unreachable, r"the request failed \(418\)"),
        (422, Unreachable, "refuses the change"),
        (507, Unreachable, "storage of the account is full"),
    ],
)
def test_each_refusal_is_one_sentence(
    status: int, kind: type[Unreachable], words: str, hub: BucketHub, root: Location
) -> None:
    """The API or Xet may refuse, and in any step."""
    file = root / "a"
    file.write(b"1")
    message = rf"(?s)^cannot reach {root}(/a)? at {hub.endpoint}: [^\n]*{words}[^\n]*$"

    def assert_refused_at(part: str, *acts: Callable[[], Any]) -> None:
        refuse(hub, status, part)
        for act in acts:
            with pytest.raises(kind, match=message):
                act()

    assert_refused_at("/tree", lambda: list(root.list()))
    looks = (file.stat, file.open, file.fetch, lambda: file.create(b"2"))
    assert_refused_at("/paths-info", *looks)
    if status != 404:  # then the file was deleted after it was described
        assert_refused_at("/resolve", file.fetch, file.read)
    for part in ("-token", "/xorbs/", "/shards", "/batch"):
        content = f"{part} {status}".encode()  # hf_xet sends no content twice
        assert_refused_at(part, partial(file.write, content))


@pytest.mark.parametrize("part", ["/paths-info", "/resolve", "-token", "/batch"])
def test_a_hub_that_fails_for_a_while_is_waited_for(
    part: str, hub: BucketHub, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than huggingface_hub itself waits: it sends a request at most 6 times."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    file = root / "a"
    file.write(b"1")
    statuses = iter([429, 500, 503] * 3)
    hub.fault = lambda request: next(statuses, None) if part in request.path else None
    file.write(part.encode())
    assert file.read() == part.encode()
    assert next(statuses, None) is None


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_hub_that_does_not_answer_is_given_up(
    has_answered: bool,
    root: Location,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """huggingface_hub repeats a listing for 23 s, and logs two lines for each retry. If the hub has
    answered before, the user gets one sentence. Otherwise nothing is repeated after _FIRST_SECONDS.
    """
    pauses = list[float]()
    monkeypatch.setattr("time.sleep", pauses.append)
    monkeypatch.setattr(retries, "_FIRST_SECONDS", 0)
    monkeypatch.setattr(retries, "_LATER_SECONDS", 0)
    endpoint = "http://user:secret@127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    hub_buckets._make_api.cache_clear()
    monkeypatch.setattr(retries, "_waited_for", set())
    monkeypatch.setattr(retries, "_answered", {endpoint} if has_answered else set())
    logger = logging.getLogger("huggingface_hub")
    monkeypatch.setattr(logger, "propagate", True)
    sentences = list[str]()
    with redirect_notices(sentences.append):
        for act in ((root / "a").stat, lambda: list(root.list()), (root / "a").open):
            with pytest.raises(Unreachable, match=r"does not answer.*HF_ENDPOINT") as caught:
                act()
            assert "secret" not in str(caught.value)
            assert "at http://127.0.0.1:9" in str(caught.value)
    assert caplog.messages == []
    reason = "the hub does not answer, or is overloaded; the request is sent again"
    assert sentences == [f"waiting for http://127.0.0.1:9: {reason}"] * has_answered
    assert bool(pauses) == has_answered


def test_other_lines_of_huggingface_hub_are_still_shown(
    root: Location, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A hub that takes no more requests may let huggingface_hub wait for minutes: that is shown at
    once.
    """
    assert list(root.list()) == []  # huggingface_hub's client is made
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    monkeypatch.setattr(retries, "_waited_for", set())
    logger = logging.getLogger("huggingface_hub.utils._http")
    sentences = list[str]()
    with redirect_notices(sentences.append), hide_retry_lines():
        logger.warning("You are not authenticated.")
        logger.warning("HTTP Error 429 thrown while requesting GET http://hub/x")
        logger.warning("Rate limited. Waiting 300s before retry [Retry 1/5].")
    assert caplog.messages == ["You are not authenticated."]
    [sentence] = sentences
    assert "the hub takes no more requests of this user for a while" in sentence


def test_a_data_set_of_a_hub_that_does_not_answer_is_one_sentence(
    hub: BucketHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HTTP client of huggingface_hub raises errors that are no OSError."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    file_system = HfFileSystem(endpoint="http://127.0.0.1:9", skip_instance_cache=True)
    monkeypatch.setattr(storage_hub, "_open_file_system", lambda: file_system)
    with pytest.raises(Unreachable, match=r"cannot be read from the hub \(ConnectError\)"):
        locate("hf://datasets/org/name/a.jsonl").stat()


def test_offline_nothing_is_sent(
    hub: BucketHub, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    for act in ((root / "a").stat, lambda: (root / "a").write(b"1"), lambda: list(root.list())):
        with pytest.raises(Unreachable, match="HF_HUB_OFFLINE is set"):
            act()
    assert hub.requests == []


def test_a_missing_hf_xet_is_named(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hf_xet", None)
    with pytest.raises(Unreachable, match="pip install hf-xet"):
        (root / "a").write(b"1")


def test_urls_that_name_no_bucket_are_refused() -> None:
    for url in ("hf://buckets/org", "hf://buckets/org/na*e/a", "hf://buckets/org/name@main/a"):
        with pytest.raises(RecipeError, match="does not name a bucket of the hub"):
            locate(url)
    location = locate(f"{ROOT}/a/b/")
    assert (location.url, location.container) == (f"{ROOT}/a/b", BUCKET)
    assert (location.parent.parent.url, location.name) == (ROOT, "b")


def test_sources_of_every_format_are_found_by_patterns_and_read_once(
    hub: BucketHub, root: Location, project: Project
) -> None:
    lines = [json.dumps(text).encode() + b"\n" for text in TEXTS]
    (root / "raw/a.jsonl").write(*lines[:20])
    (root / "raw/b.jsonl.gz").write(gzip.compress(b"".join(lines[20:40])))
    file = io.BytesIO()
    pq.write_table(pa.table({"text": [text["text"] for text in TEXTS[40:]]}), file)
    (root / "raw/c.parquet").write(file.getvalue())
    (root / "raw_old/d.jsonl").write(lines[0])
    project.configure(streams={"web": documents(f"{ROOT}/raw/*")})
    assert project.run().done
    rows = project.rows
    project.write_source(TEXTS)
    assert project.configure().convert_into(name="local").rows == rows
    # Nothing is read again, on this machine or on another one.
    project.configure(streams={"web": documents(f"{ROOT}/raw/*")})
    hub.requests.clear()
    assert project.run().state == "up to date"
    assert count(hub, "/resolve") == 0


def test_doctor_tries_the_bucket_and_warns_that_it_has_no_conditions(
    hub: BucketHub, project: Project
) -> None:
    project.write_source(TEXTS)
    project.configure(remote=f"{ROOT}/mix")
    answer = mdsmix("doctor", project.recipe)
    output = answer.out + answer.err
    assert f"hub {hub.endpoint}, login from HF_TOKEN" in output
    assert "listing, writing, reading, copying and deleting work" in output
    assert "does not support conditional writes" in output
    assert read_location(ROOT) == {}
    refuse(hub, 403, "/batch")
    answer = mdsmix("doctor", project.recipe)
    assert answer.code == 4
    assert "may not write (write access to the bucket): cannot reach" in answer.out + answer.err


def test_a_mix_is_not_rendered_with_a_bucket_that_streaming_takes_for_a_data_set(
    hub: BucketHub, project: Project
) -> None:
    project.write_source(TEXTS)
    project.configure(remote=f"{ROOT}/mix")
    project.run()
    answer = mdsmix("render-yaml", project.recipe)
    assert (answer.code, answer.out) == (3, "")
    assert f"error remote-hub-bucket [web]: the remote of web is {ROOT}/mix/web" in answer.err
