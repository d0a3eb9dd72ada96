"""Whole runs through a store that fails: what passes costs time and not a byte, what lasts is one sentence and no loss."""

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest

from mdsmix.convert.garbage import find_garbage
from mdsmix.storage import locate, s3_client
from tests.alarm import SECONDS
from tests.converting import (
    Answer,
    documents,
    files,
    lying_at,
    mdsmix,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.faults import Proxy, Rule, failing
from tests.minio import own_minio

TEXTS = [{"text": f"Document {n} is about the number {n}. " * 3} for n in range(120)]
WINDOW = 6000
HASH = "[0-9a-f]{32}"
IN_TIME = 60
"Seconds: more than any command takes on a busy machine, less than the 90 s that a store which has answered is waited for."
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


@pytest.fixture
def recipe(
    bucket: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Sources and target in the bucket; the second source holds what the first does, so shards are copied."""
    windows(monkeypatch, WINDOW)
    raw = write_jsonl(tmp_path / "raw" / "a.jsonl", [*TEXTS, {"text": 5}]).read_bytes()
    for name in ("a", "b"):
        (tmp_path / "raw" / f"{name}.jsonl").write_bytes(raw)
        locate(f"s3://{bucket}/raw/{name}.jsonl").write(raw)
    streams = {"web": documents(f"s3://{bucket}/raw/*.jsonl")}
    settings = {"remote": f"s3://{bucket}/mix", "streams": streams}
    return write_recipe(tmp_path, tokenizer_folder, **settings)


@pytest.fixture
def undisturbed(
    recipe: Path, tmp_path: Path, minio: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, bytes]:
    """What a run writes on a disk, from the same sources past the proxy."""
    with monkeypatch.context() as past_the_proxy:
        past_the_proxy.setenv("S3_ENDPOINT_URL", minio)
        run_recipe(recipe, "remote=null")
    return files(tmp_path / "out" / "web")


def published(bucket: str) -> dict[str, bytes]:
    return lying_at(f"s3://{bucket}/mix/web")


def read_by_streaming(found: dict[str, bytes]) -> dict[str, bytes]:
    """Shards and index: of sources in another bucket all else names that bucket."""
    return {name: data for name, data in found.items() if name.endswith((".mds", "index.json"))}


def sentence(answer: Answer) -> str:
    """What the command said: one line, no traceback, no key."""
    assert answer.code == 4, answer.err
    (line,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in answer.err
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert os.environ[name] not in answer.err
    return line


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("faults", [TRIED, *([last] for last in TAKEN), ["silence"]])
def test_what_passes_costs_no_byte_wherever_it_hits(
    faults: list[str],
    proxy: Proxy,
    recipe: Path,
    undisturbed: dict[str, bytes],
    bucket: str,
) -> None:
    """Each place meets every fault, one after the other, and a shard a silence."""
    places = [PLACES["a shard"]] if "silence" in faults else PLACES.values()
    proxy.rules = [Rule(fault, *place) for place in places for fault in faults]
    run_recipe(recipe)
    assert [rule for rule in proxy.rules if rule.times] == [], "every place met its faults"
    assert published(bucket) == undisturbed


LASTING = [
    ("400", "reading a source", 2, "the request failed (InvalidRequest)", False),
    ("reset", "a shard", 1, "the store closed the connection", True),
    ("403 AccessDenied", "a shard", 1, "access denied; give these credentials the right", False),
    (
        "503",
        "a unit record",
        0,
        "the store asks to slow down; run the same command again later",
        True,
    ),
    ("400 ExpiredToken", "a unit record", 0, "the credentials have expired; renew", False),
    ("500", "the index", 0, "the store failed inside; run the same command again later", True),
]
"What lasts, where, and behind how many requests; the words for it, and whether it is tried again."


def test_a_fault_that_lasts_is_a_sentence_and_the_next_run_goes_on(
    proxy: Proxy,
    recipe: Path,
    undisturbed: dict[str, bytes],
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3_client, "_LATER_SECONDS", 0.3)
    folder = locate(f"s3://{bucket}/mix/web/train")
    for fault, place, skip, words, is_tried in LASTING:
        met, began = len(proxy.met()), time.monotonic()
        proxy.rules = [Rule(fault, *PLACES[place], times=999, skip=skip)]
        line = sentence(mdsmix("convert", recipe, "--workers", "1"))
        assert time.monotonic() - began < IN_TIME
        key = PLACES[place][1].rstrip("$")
        assert re.search(rf"cannot reach s3://{bucket}/\S*{key}\S* at {proxy.endpoint}", line), (
            fault
        )
        assert (words in line, "tried " in line) == (True, is_tried), line
        count = len(proxy.met()) - met
        assert count > 3 if is_tried else count <= 2, (
            fault,
            count,
        )  # 2: with credentials read anew
        proxy.rules = []
        written = published(bucket).keys()
        assert "train/index.json" not in written
        found = {f"train/{garbage.name}" for garbage in find_garbage(folder, 0)}
        named = undisturbed.keys() if place == "the index" else set()
        left = written - found - named
        assert left <= {"train/.mdsmix/lease", "train/mdsmix.manifest"}, "else gc finds it"
    (outcome,) = run_recipe(recipe)
    assert outcome.reused >= 2, "finished units are kept"
    assert published(bucket) == undisturbed
    assert find_garbage(folder, 0) == []


def test_every_command_gives_up_in_a_sentence_and_in_time(
    proxy: Proxy, recipe: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipe(recipe)
    monkeypatch.setattr(s3_client, "_LATER_SECONDS", 0.3)
    monkeypatch.setattr(s3_client, "_FIRST_SECONDS", 0.1)
    stream = f"s3://{bucket}/mix/web"
    commands: list[tuple[object, ...]] = [
        ("convert", recipe, "--workers", "2", "max_seq_len=8"),
        ("verify", stream),
        ("check", recipe),
        ("render-yaml", recipe),
        ("gc", stream),
        ("gc", stream, "--older-than", "0s", "--delete"),
        ("repair", stream, "--recipe", recipe),
        ("inspect", stream),
    ]
    for arguments in commands:
        proxy.rules = []
        locate(f"{stream}/train/.mdsmix/lease").delete()  # its holder lives: these tests
        proxy.rules = [Rule("500", times=9999, skip=2)]
        began = time.monotonic()
        line = sentence(mdsmix(*arguments))
        assert time.monotonic() - began < IN_TIME
        assert "the store failed inside; run the same command again later" in line, arguments
        assert line.count(f"cannot reach s3://{bucket}/") == 1


def test_credentials_that_are_renewed_in_their_file_in_mid_run_are_taken(
    proxy: Proxy,
    recipe: Path,
    undisturbed: dict[str, bytes],
    bucket: str,
    minio: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real ones of MinIO, each for a session; the proxy says of the first in two ways that it has expired."""
    file = tmp_path / "credentials"
    sessions = [_session(minio) for _ in range(3)]
    keys = [session.split()[3] for session in sessions]
    file.write_text(sessions[0])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    proxy.rules = [
        Rule(
            code,
            skip=20,
            times=9999,
            when=lambda request, key=key: key in request.headers["authorization"],
            then=lambda following=following: file.write_text(following),
        )
        for code, key, following in (
            ("400 ExpiredToken", keys[0], sessions[1]),
            ("403 InvalidTokenId", keys[1], sessions[2]),
        )
    ]
    run_recipe(recipe)
    assert {request.fault for request in proxy.met()} == {"400 ExpiredToken", "403 InvalidTokenId"}
    assert len(proxy.met()) <= 64, "those that were under way"
    assert published(bucket) == undisturbed


def _session(minio: str) -> str:
    """A credentials file with a key of 15 minutes."""
    made = boto3.client("sts", endpoint_url=minio).assume_role(
        RoleArn="arn:aws:iam::1:role/any", RoleSessionName="tests", DurationSeconds=900
    )["Credentials"]
    return (
        f"[default]\naws_access_key_id = {made['AccessKeyId']}\n"
        f"aws_secret_access_key = {made['SecretAccessKey']}\naws_session_token = {made['SessionToken']}\n"
    )


def test_a_store_that_has_answered_and_is_away_for_a_while_is_waited_for(
    recipe: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real stop and start, in the moment in which the third shard is written: it lasts twice as long as a store is waited for
    that never answered."""
    monkeypatch.setattr(s3_client, "_FIRST_SECONDS", 1)
    stopped = threading.Event()
    with (
        own_minio(tmp_path / "own") as server,
        failing(server.settings["S3_ENDPOINT_URL"]) as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        store = boto3.client("s3", endpoint_url=server.settings["S3_ENDPOINT_URL"])
        store.create_bucket(Bucket="away")
        for name in ("a", "b"):
            raw = (tmp_path / "raw" / f"{name}.jsonl").read_bytes()
            store.put_object(Bucket="away", Key=f"raw/{name}.jsonl", Body=raw)
        monkeypatch.setenv("S3_ENDPOINT_URL", proxy.endpoint)
        stop = Rule(
            "reset", *PLACES["a shard"], skip=2, then=lambda: (server.stop(), stopped.set())
        )
        proxy.rules = [stop]
        source = "streams.web.source.path=s3://away/raw/*.jsonl"
        run = pool.submit(run_recipe, recipe, "remote=s3://away/mix", source)
        assert stopped.wait(SECONDS)
        time.sleep(2 * s3_client._FIRST_SECONDS)
        assert not run.done()
        server.start()
        run.result(SECONDS)
        assert len(proxy.requests) > 60
        monkeypatch.setenv("S3_ENDPOINT_URL", server.settings["S3_ENDPOINT_URL"])
        found = published("away")
        assert read_by_streaming(found) == read_by_streaming(undisturbed)
