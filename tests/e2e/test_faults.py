"""Whole runs through a store that fails: what passes costs time and not a byte, what lasts is one
sentence and no loss.
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
from mdsmix.storage import locate, s3_client
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
"Operation and key of what a run asks for."
TAKEN = ("500 after the work", "reset in the answer", "cut short", "lost answer")
"Behind one of these a place may be asked for nothing more: the store did the work."
TRIED = ["500", "503", "400 RequestTimeout", "429", "reset", "reset in the request", "damaged"]


@dataclass
class Far:
    """A stream of sources in the bucket, published there too."""

    project: Project
    bucket: str
    undisturbed: dict[str, bytes]
    "What a run writes on a disk."

    @property
    def published(self) -> dict[str, bytes]:
        return read_location(f"s3://{self.bucket}/mix/web")


@pytest.fixture
def far(bucket: str, project: Project) -> Far:
    """The second source holds what the first does, so shards are copied."""
    project.set_window_size(6000)
    raw = project.write_source([*TEXTS, {"text": 5}]).read_bytes()
    for name in ("a", "b"):
        locate(f"s3://{bucket}/raw/{name}.jsonl").write(raw)
    project.configure(documents(f"s3://{bucket}/raw/*.jsonl"), remote=f"s3://{bucket}/mix")
    project.run("remote=null")
    return Far(project, bucket, read_location(project.out / "web"))


def read_by_streaming(found: dict[str, bytes]) -> dict[str, bytes]:
    """Shards and index: of sources in another bucket all else names that bucket."""
    return {name: data for name, data in found.items() if name.endswith((".mds", "index.json"))}


def sentence(*arguments: object) -> str:
    """What the command said, soon: one line, no traceback, no key."""
    began, answer = time.monotonic(), mdsmix(*arguments)
    # More than any command takes on a busy machine, less than a store which has answered is waited
    # for.
    assert time.monotonic() - began < 60
    assert answer.code == 4, answer.err
    (line,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in answer.err
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert os.environ[name] not in answer.err
    return line


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("faults", [TRIED, *([last] for last in TAKEN), ["silence"]])
def test_what_passes_costs_no_byte_anywhere(faults: list[str], proxy: Proxy, far: Far) -> None:
    """Each place meets every fault, one after the other, and a shard a silence."""
    places = [PLACES["a shard"]] if "silence" in faults else PLACES.values()
    proxy.rules = [Rule(fault, *place) for place in places for fault in faults]
    far.web.run()
    assert [rule for rule in proxy.rules if rule.times] == [], "every place met its faults"
    assert far.published == far.undisturbed


LASTING = [
    ("400", "reading a source", 2, "the request failed (InvalidRequest)", False),
    ("reset", "a shard", 1, "the store closed the connection", True),
    ("403 AccessDenied", "a shard", 1, "access denied; give these credentials the right", False),
    ("503", "a unit record", 0, "the store asks to slow down; run the same command again", True),
    ("400 ExpiredToken", "a unit record", 0, "the credentials have expired; renew", False),
    ("500", "the index", 0, "the store failed inside; run the same command again later", True),
]
"What lasts, where, and behind how many requests; the words for it, and whether it is tried again."


def test_a_fault_that_lasts_is_a_sentence_and_the_next_run_goes_on(
    proxy: Proxy, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "_LATER_SECONDS", 0.3)
    folder = locate(f"s3://{far.bucket}/mix/web/train")
    for fault, place, skip, words, is_tried in LASTING:
        met, key = len(proxy.met()), PLACES[place][1].rstrip("$")
        proxy.rules = [Rule(fault, *PLACES[place], times=999, skip=skip)]
        line = sentence("convert", far.web.recipe, "--workers", "1")
        where = rf"cannot reach s3://{far.bucket}/\S*{key}\S* at {proxy.endpoint}"
        assert re.search(where, line), fault
        assert (words in line, "tried " in line) == (True, is_tried), line
        count = len(proxy.met()) - met  # 2: with credentials read anew
        assert count > 3 if is_tried else count <= 2, (fault, count)
        proxy.rules = []
        written = far.published.keys()
        assert "train/index.json" not in written
        found = {f"train/{garbage.name}" for garbage in find_garbage(folder, 0)}
        named = far.undisturbed.keys() if place == "the index" else set()
        left = written - found - named
        assert left <= {"train/.mdsmix/lease", "train/mdsmix.manifest"}, "else gc finds it"
    assert far.web.run().reused >= 2, "finished units are kept"
    assert far.published == far.undisturbed
    assert find_garbage(folder, 0) == []


def test_every_command_gives_up_in_a_sentence_and_in_time(
    proxy: Proxy, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.web.run()
    monkeypatch.setattr(s3_client, "_LATER_SECONDS", 0.3)
    monkeypatch.setattr(s3_client, "_FIRST_SECONDS", 0.1)
    stream, recipe = f"s3://{far.bucket}/mix/web", far.web.recipe
    for arguments in (
        ("convert", recipe, "--workers", "2", "max_seq_len=8"),
        *((command, recipe) for command in ("check", "render-yaml")),
        *((command, stream) for command in ("verify", "gc", "inspect")),
        ("gc", stream, "--older-than", "0s", "--delete"),
        ("repair", stream, "--recipe", recipe),
    ):
        proxy.rules = []
        locate(f"{stream}/train/.mdsmix/lease").delete()  # its holder lives: these tests
        proxy.rules = [Rule("500", times=9999, skip=2)]
        line = sentence(*arguments)
        assert "the store failed inside; run the same command again later" in line, arguments
        assert line.count(f"cannot reach s3://{far.bucket}/") == 1


def test_credentials_that_are_renewed_in_their_file_in_mid_run_are_taken(
    proxy: Proxy, far: Far, minio: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real ones of MinIO, each for a session; the proxy says of the first in two ways that it has
    expired.
    """
    file, sessions = tmp_path / "credentials", [_session(minio) for _ in range(3)]
    file.write_text(sessions[0])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    expiring = (("400 ExpiredToken", *sessions[:2]), ("403 InvalidTokenId", *sessions[1:]))
    proxy.rules = [_expires(file, *each) for each in expiring]
    far.web.run()
    assert {request.fault for request in proxy.met()} == {"400 ExpiredToken", "403 InvalidTokenId"}
    assert len(proxy.met()) <= 64, "those that were under way"
    assert far.published == far.undisturbed


def _expires(file: Path, code: str, old: str, new: str) -> Rule:
    """Requests with the old key meet that fault, behind the first ones, and the new one is there
    then.
    """
    rule = Rule(code, skip=20, times=9999, then=lambda: file.write_text(new))
    rule.when = lambda request: old.split()[3] in request.headers["authorization"]
    return rule


def _session(minio: str) -> str:
    """A credentials file with a key of 15 minutes."""
    made = boto3.client("sts", endpoint_url=minio).assume_role(
        RoleArn="arn:aws:iam::1:role/any", RoleSessionName="tests", DurationSeconds=900
    )["Credentials"]
    values = (made[name] for name in ("AccessKeyId", "SecretAccessKey", "SessionToken"))
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    return "\n".join(["[default]", *map(" = ".join, zip(names, values, strict=True)), ""])


def test_a_store_that_has_answered_and_is_away_for_a_while_is_waited_for(
    far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real stop and start, in the moment in which the third shard is written: it lasts twice as
    long as a store is waited for that never answered.
    """
    monkeypatch.setattr(s3_client, "_FIRST_SECONDS", 1)
    sources, stopped = read_location(f"s3://{far.bucket}/raw"), threading.Event()
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
            run = pool.submit(far.web.run, "remote=s3://away/mix", source)
            assert stopped.wait(WAIT_SECONDS)
            time.sleep(2 * s3_client._FIRST_SECONDS)
            assert not run.done()
            server.start()
            run.result(WAIT_SECONDS)
            assert len(proxy.requests) > 60
        monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
        found = read_location("s3://away/mix/web")
    assert read_by_streaming(found) == read_by_streaming(far.undisturbed)
