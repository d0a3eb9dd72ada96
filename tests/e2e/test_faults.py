"""Whole runs with a store that fails. Faults that pass cost time, but change no byte. Faults that
last lead to an error in one sentence, and no finished work is lost.
"""

from __future__ import annotations

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

from mdsmix.conversion.gc import find_garbage
from mdsmix.storage import locate, retries
from tests.alarm import WAIT_SECONDS
from tests.converting import Project, documents, mdsmix, read_location
from tests.faults import Proxy, Rule, make_failing_proxy
from tests.minio import start_own_minio

TEXTS = [f"Document {n} is about the number {n}. " * 3 for n in range(120)]
HASH = "[0-9a-f]{32}"
PLACES = {
    "the list of sources": ("GET list", ""),
    "reading a source": ("GET", r"raw/a\.jsonl$"),
    "taking the lease": ("PUT", "/lease$"),
    "a shard": ("PUT", rf"/{HASH}\.mds$"),
    "a unit record": ("PUT", rf"\.mdsmix/{HASH}-[0-9a-f]{{8}}\.unit$"),
    "a copy of an equal shard": ("PUT", r"-1\.mds$"),
    "quarantine": ("PUT", r"\.jsonl\.zst$"),
    "the manifest": ("PUT", r"mdsmix\.manifest$"),
    "the index": ("PUT", r"index\.json$"),
    "letting the lease go": ("DELETE", "/lease$"),
}
"What a run requests -> operation and pattern of the key."
DONE_BY_STORE = ("500 after the work", "reset in the answer", "cut short", "lost answer")
"After one of these faults a request may not be repeated: the store did the work."
REPEATED = ["500", "503", "400 RequestTimeout", "429", "reset", "reset in the request", "damaged"]


@dataclass
class InBucket:
    """A stream with sources in a bucket, published there too."""

    project: Project
    url: str
    "The bucket, such as `s3://bucket`."
    undisturbed: dict[str, bytes]
    "The files that an undisturbed run writes on a disk."

    @property
    def published(self) -> dict[str, bytes]:
        return read_location(f"{self.url}/mix/web")


@pytest.fixture
def far(bucket: str, project: Project) -> InBucket:
    return put_into_bucket(project, f"s3://{bucket}")


def put_into_bucket(project: Project, url: str) -> InBucket:
    """Write two sources of equal content into a bucket, so that shards are copied."""
    project.set_window_size(6000)
    raw = project.write_source([*TEXTS, {"text": 5}]).read_bytes()
    for name in ("a", "b"):
        locate(f"{url}/raw/{name}.jsonl").write(raw)
    project.configure(documents(f"{url}/raw/*.jsonl"), remote=f"{url}/mix")
    project.run("remote=null")
    return InBucket(project, url, read_location(project.out / "web"))


def select_shards(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return shards and index. The other files name the bucket of the sources."""
    return {name: data for name, data in files.items() if name.endswith((".mds", "index.json"))}


def fail_with_one_sentence(*arguments: object) -> str:
    """Run a command that must fail soon, with an error in one line, without a traceback or a key.
    Return the line.
    """
    began = time.monotonic()
    answer = mdsmix(*arguments)
    # Longer than any command takes on a busy machine, but shorter than mdsmix waits for a store
    # that has answered before.
    assert time.monotonic() - began < 60
    assert answer.code == 4, answer.err
    (line,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in answer.err
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert os.environ.get(name, "no secret is set") not in answer.err
    return line


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("faults", [REPEATED, *([last] for last in DONE_BY_STORE), ["silence"]])
def test_faults_that_pass_change_no_byte(faults: list[str], proxy: Proxy, far: InBucket) -> None:
    """Every request has every fault, one after the other. Only a shard has a silence."""
    places = [PLACES["a shard"]] if "silence" in faults else PLACES.values()
    proxy.rules = [Rule(fault, *place) for place in places for fault in faults]
    far.project.run()
    assert [rule for rule in proxy.rules if rule.times] == [], "every fault occurred"
    assert far.published == far.undisturbed


LASTING = [
    ("400", "reading a source", 2, "the request failed (InvalidRequest)", False),
    ("reset", "a shard", 1, "the store closed the connection", True),
    (
        "403 AccessDenied",
        "a shard",
        1,
        "access denied; give these credentials the permission",
        False,
    ),
    ("503", "a unit record", 0, "the store asks to slow down; run the same command again", True),
    ("400 ExpiredToken", "a unit record", 0, "the credentials have expired; renew", False),
    ("500", "the index", 0, "the store failed inside; run the same command again later", True),
]
"Fault, place, number of requests before it, words of the error, and whether it is tried again."


def test_a_fault_that_lasts_is_an_error_and_the_next_run_continues(
    proxy: Proxy, far: InBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_LATER_SECONDS", 0.3)
    folder = locate(f"{far.url}/mix/web/train")
    for fault, place, skip, words, is_tried in LASTING:
        met_before = len(proxy.met())
        key = PLACES[place][1].rstrip("$")
        proxy.rules = [Rule(fault, *PLACES[place], times=999, skip=skip)]
        line = fail_with_one_sentence("convert", far.project.recipe, "--workers", "1")
        where = rf"cannot reach {far.url}/\S*{key}\S* at {proxy.endpoint}"
        assert re.search(where, line), fault
        assert (words in line, "tried " in line) == (True, is_tried), line
        count = len(proxy.met()) - met_before  # 2: once more with credentials read again
        assert count > 3 if is_tried else count <= 2, (fault, count)
        proxy.rules = []
        written = far.published.keys()
        assert "train/index.json" not in written
        garbage = {f"train/{item.name}" for item in find_garbage(folder, 0)}
        used = far.undisturbed.keys() if place == "the index" else set()
        others = written - garbage - used
        assert others <= {"train/.mdsmix/lease", "train/mdsmix.manifest"}, "gc finds the others"
    assert far.project.run().reused >= 2, "finished units are kept"
    assert far.published == far.undisturbed
    assert find_garbage(folder, 0) == []


@pytest.mark.usefixtures("impatient")
def test_a_store_that_takes_a_shard_and_never_answers_ends_the_run(
    proxy: Proxy, far: InBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_LATER_SECONDS", 0.3)
    proxy.rules = [Rule("silence", *PLACES["a shard"], times=999)]
    line = fail_with_one_sentence("convert", far.project.recipe, "--workers", "1")
    assert re.search(rf"cannot reach {far.url}/mix/\S+\.mds at {proxy.endpoint} \(tried ", line)
    assert "the store stopped answering; run the same command again" in line
    assert "train/index.json" not in far.published


def test_every_command_gives_up_soon_with_one_sentence(
    proxy: Proxy, far: InBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.project.run()
    monkeypatch.setattr(retries, "_LATER_SECONDS", 0.3)
    monkeypatch.setattr(retries, "_FIRST_SECONDS", 0.1)
    stream, recipe = f"{far.url}/mix/web", far.project.recipe
    for arguments in (
        ("convert", recipe, "--workers", "2", "max_seq_len=8"),
        *((command, recipe) for command in ("check", "render-yaml")),
        *((command, stream) for command in ("verify", "gc", "inspect")),
        ("gc", stream, "--older-than", "0s", "--delete"),
        ("repair", stream, "--recipe", recipe),
    ):
        proxy.rules = []
        locate(f"{stream}/train/.mdsmix/lease").delete()  # its holder, this process, is alive
        proxy.rules = [Rule("500", times=9999, skip=2)]
        line = fail_with_one_sentence(*arguments)
        assert "the store failed inside; run the same command again later" in line, arguments
        assert line.count(f"cannot reach {far.url}/") == 1


def test_credentials_that_are_renewed_during_a_run_are_read_again(
    proxy: Proxy, far: InBucket, minio: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are real sessions of MinIO. The proxy answers in two ways that one has expired."""
    file = tmp_path / "credentials"
    sessions = [_make_session(minio) for _ in range(3)]
    file.write_text(sessions[0])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    proxy.rules = [
        _expire_key(file, "400 ExpiredToken", sessions[0], sessions[1]),
        _expire_key(file, "403 InvalidTokenId", sessions[1], sessions[2]),
    ]
    far.project.run()
    assert {request.fault for request in proxy.met()} == {"400 ExpiredToken", "403 InvalidTokenId"}
    assert len(proxy.met()) <= 64, "only the requests that were in progress"
    assert far.published == far.undisturbed


def _expire_key(file: Path, code: str, old: str, new: str) -> Rule:
    """Return a rule that answers requests with the old key with this code, after the first 20, and
    then writes the new key to the file.
    """
    rule = Rule(code, skip=20, times=9999, then=lambda: file.write_text(new))
    rule.when = lambda request: old.split()[3] in request.headers["authorization"]
    return rule


def _make_session(minio: str) -> str:
    """Return a credentials file with a key that is valid for 15 minutes."""
    credentials = boto3.client("sts", endpoint_url=minio).assume_role(
        RoleArn="arn:aws:iam::1:role/any", RoleSessionName="tests", DurationSeconds=900
    )["Credentials"]
    values = (credentials[name] for name in ("AccessKeyId", "SecretAccessKey", "SessionToken"))
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    return "\n".join(["[default]", *map(" = ".join, zip(names, values, strict=True)), ""])


def test_mdsmix_waits_for_a_store_that_answered_before(
    far: InBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store stops when the third shard is written, and starts again. This takes twice as long
    as mdsmix waits for a store that never answered.
    """
    monkeypatch.setattr(retries, "_FIRST_SECONDS", 1)
    sources = read_location(f"{far.url}/raw")
    stopped = threading.Event()
    with start_own_minio(tmp_path / "own") as server, ThreadPoolExecutor(1) as pool:
        endpoint = server.settings["S3_ENDPOINT_URL"]
        monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="away")
        for name, content in sources.items():
            locate(f"s3://away/raw/{name}").write(content)

        def stop() -> None:
            server.stop()
            stopped.set()

        with make_failing_proxy(endpoint) as proxy:
            monkeypatch.setenv("S3_ENDPOINT_URL", proxy.endpoint)
            proxy.rules = [Rule("reset", *PLACES["a shard"], skip=2, then=stop)]
            source = "streams.web.source.path=s3://away/raw/*.jsonl"
            run = pool.submit(far.project.run, "remote=s3://away/mix", source)
            assert stopped.wait(WAIT_SECONDS)
            time.sleep(2 * retries._FIRST_SECONDS)
            assert not run.done()
            server.start()
            run.result(WAIT_SECONDS)
            assert len(proxy.requests) > 60
        monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
        published = read_location("s3://away/mix/web")
    assert select_shards(published) == select_shards(far.undisturbed)
