"""How patiently a store is asked, by a clock that the tests turn, and how a file of which any part
may be read first asks it; no server is needed.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import nullcontext
from datetime import datetime, timezone
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.storage import Stat, locate, notices, s3_client, s3_conditions, s3_reader
from mdsmix.storage.s3_client import ask
from mdsmix.storage.s3_reader import make_random_reader
from tests.clock import Clock


def refused(code: str, status: int = 400) -> ClientError:
    said = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(said, "PutObject")


TRIED = r"cannot reach s3://b/x at http://127\.0\.0\.1:9 \(tried \d+ times in \d+ s\): "
REFUSED = EndpointConnectionError(endpoint_url="http://127.0.0.1:9")
SILENT = ReadTimeoutError(endpoint_url="http://127.0.0.1:9")
SLOW_DOWN = refused("SlowDown", 503)


class Waiting(Clock):
    """Time passes where mdsmix sleeps, and by `work` with every request."""

    def __init__(self) -> None:
        self.slept = list[float]()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        super().sleep(seconds)

    def ask(self, seconds: float, error: Exception, work: float = 0) -> str:
        """Asks a store that fails for so long."""
        end = self.now + seconds
        self.slept.clear()

        def request(client: object) -> str:
            self.now += work
            if self.now < end:
                raise error
            return "done"

        return ask("s3://b/x", request)

    def until_given_up(self, error: Exception, work: float = 0) -> tuple[float, str]:
        """How long a request is tried, and what is said then."""
        began = self.now
        with pytest.raises(Unreachable) as refusal:
            self.ask(1e9, error, work)
        return self.now - began, str(refusal.value)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """And an endpoint that never answered."""
    clock = Waiting()
    monkeypatch.setattr(s3_client, "time", clock)
    for known in ("_answered", "_given_up", "_waited_for"):
        monkeypatch.setattr(s3_client, known, set())
    names = ("S3_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for name, value in zip(names, ("http://127.0.0.1:9", "us-east-1", "x", "y"), strict=True):
        monkeypatch.setenv(name, value)
    return clock


@pytest.fixture
def known(clock: Waiting) -> Waiting:
    """The endpoint has answered before."""
    ask("s3://b/x", lambda client: None)
    return clock


def test_a_store_that_is_gone_for_a_minute_is_waited_for(known: Waiting) -> None:
    """Patience begins with the first failure: an upload that took two minutes before it broke is
    tried again.
    """
    for error in (REFUSED, SLOW_DOWN, SILENT):
        assert known.ask(75, error, 0.01) == "done"
        assert max(known.slept) <= 8
        assert len(set(known.slept)) == len(known.slept), "no two wait for the same time"
        assert 8 < len(known.slept) < 60
    assert known.ask(200, REFUSED, 120) == "done"
    assert len(known.slept) == 1


def test_a_store_that_stays_away_is_given_up_in_bounded_time(clock: Waiting) -> None:
    """Soon, where it never answered; and soon for what is asked after that, until it answers."""
    assert clock.until_given_up(REFUSED)[0] < 4
    assert clock.until_given_up(SILENT, 30)[0] < 31
    for error, work, most in ((REFUSED, 0, 91), (SILENT, 30, 151)):
        ask("s3://b/x", lambda client: None)
        seconds, said = clock.until_given_up(error, work)
        assert 90 <= seconds < most
        assert re.match(TRIED, said)
        assert clock.until_given_up(SLOW_DOWN)[0] < 4


def test_a_wait_is_said_once_and_again_after_the_store_has_answered(known: Waiting) -> None:
    """Not one that ends within five seconds: a server that restarts is no news."""
    said, before = list[str](), notices._say
    with notices.redirect_notices(said.append):
        known.ask(4, SLOW_DOWN)
        assert said == []
        for _ in range(2):
            known.ask(60, SLOW_DOWN)
    assert notices._say is before
    words = "the store asks to slow down; each request is retried for up to 90 s"
    assert said == [f"waiting for http://127.0.0.1:9: {words}"] * 2


def test_only_what_may_pass_is_asked_again(known: Waiting) -> None:
    down = "the store is overloaded or down"
    for status, code, passes, words in (
        (502, "502", True, f"{down} (502); run the same command again later"),
        (503, "SlowDownWrite", True, f"{down} (SlowDownWrite)"),
        (429, "429", True, f"{down} (429)"),
        (400, "RequestTimeout", True, "the request failed (RequestTimeout); look it up"),
        (400, "BadDigest", True, "the request failed (BadDigest); look it up"),
        (400, "InvalidRequest", False, "the request failed (InvalidRequest); look it up"),
        (403, "AccessDenied", False, "access denied; give these credentials the right"),
        (403, "RequestTimeTooSkewed", False, "this machine's clock is off by minutes"),
        (404, "NoSuchBucket", False, "the bucket does not exist; create it or correct its name"),
        (501, "NotImplemented", False, "the store cannot do this"),
        (507, "XMinioStorageFull", False, "the store's disk is full; free some space"),
    ):
        assert words in known.until_given_up(refused(code, status))[1]
        assert (len(known.slept) > 8) is passes, code
        ask("s3://b/x", lambda client: None)


def test_a_forked_worker_knows_what_its_parent_knows(known: Waiting) -> None:
    """But for its connections: two processes on one of them would read each other's answers."""
    parents = ask("s3://b/x", lambda client: client)
    assert ask("s3://b/y", lambda client: client) is parents

    def asked() -> None:
        assert known.ask(30, REFUSED, 0.1) == "done"
        assert ask("s3://b/x", lambda client: client) is not parents

    child = get_context("fork").Process(target=asked)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_each_part_of_a_body_is_awaited(known: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of five bytes, of which each body brings one in a minute, and then nothing."""

    def get(wanted: dict[str, str], client: object) -> dict[str, Any]:
        start = int(wanted.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        left = [b"abcde"[start : start + 1]]

        def read(size: int) -> bytes:
            if not left:
                raise SILENT
            known.now += 60
            return left.pop()

        body = SimpleNamespace(read=read, close=lambda: None)
        return {"ETag": "etag", "Body": body, "ContentLength": 5}

    monkeypatch.setattr(s3_reader, "_get", get)
    assert locate("s3://b/x").read() == b"abcde"
    assert known.now > 300


def test_fewer_bytes_are_another_object(clock: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store that heeds no If-Match."""
    answer = {"ETag": "new", "Body": io.BytesIO(b"ab"), "ContentLength": 2}
    monkeypatch.setattr(s3_reader, "_get", lambda wanted, client: answer)
    file = locate("s3://b/x").open_random(Stat(9, "old", 0))
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        file.read(5)


def test_a_store_says_which_version_and_when_or_is_refused() -> None:
    """An ETag may be without quotes, or weakened by a proxy. A listing may be without: then the
    object itself is asked.
    """
    now = datetime(2026, 11, 22, tzinfo=timezone.utc)
    for etag in ('"abc"', "abc", 'W/"abc"'):
        said = {"ETag": etag, "LastModified": now, "ContentLength": 5}
        assert s3_client.stat_from(said) == Stat(5, "abc", now.timestamp())
    assert s3_client.stat_from({"LastModified": now, "Size": 5}) == Stat(5, "", now.timestamp())
    for said, lacking in (({"ETag": "a"}, "Last-Modified"), ({"LastModified": now}, "ETag")):
        with pytest.raises(Unreachable, match=f"answers without {lacking}"):
            s3_client.stat_from({"ContentLength": 5, **said})


def test_who_knows_no_conditions_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answers so to a condition; nothing is there yet."""
    store, place, known = ("http://store", "b"), {"Bucket": "b", "Key": "x"}, dict[Any, bool]()
    monkeypatch.setattr(s3_conditions, "_keeps", known)
    client = Mock(**{"head_object.side_effect": refused("404")})
    client.meta.endpoint_url = store[0]
    for word, before, is_learnt in (
        *((word, {}, True) for word in ("NotImplemented", "MethodNotAllowed", "InvalidArgument")),
        ("NotImplemented", {store: True}, False),
        ("AccessDenied", {}, False),
    ):
        known.clear()
        known.update(before)
        client.put_object.side_effect = [refused(word), {"ETag": '"new"'}]
        with nullcontext() if is_learnt else pytest.raises(ClientError):
            assert s3_conditions.put_if(client, place, b"1", None).stamp == "new"
        assert known == ({store: False} if is_learnt else before)


def test_a_bucket_has_a_host_at_aws(clock: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a body gets a checksum of 2025 at AWS alone."""

    def asked(client: Any) -> tuple[str, str]:
        wanted = {"Bucket": "bucket", "Key": "x"}
        url = client.generate_presigned_url("get_object", Params=wanted).partition("?")[0]
        return url, client.meta.config.request_checksum_calculation

    for endpoint, found in (
        ("http://minio.example:9000", ("http://minio.example:9000/bucket/x", "when_required")),
        ("", ("https://bucket.s3.amazonaws.com/x", "when_supported")),
    ):
        monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
        assert ask("s3://b/x", asked) == found


READ = st.tuples(st.none(), st.integers(-1, 90))
SEEK = st.tuples(st.sampled_from([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END]), st.integers(-140, 140))


class Fetched:
    """Ranges of some bytes, and what was asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, list[tuple[int, int]]()

    def __call__(self, start: int, end: int) -> bytes:
        assert 0 <= start < end <= len(self.data)
        self.asked.append((start, end))
        return self.data[start:end]


@given(st.binary(max_size=100), st.lists(st.one_of(READ, SEEK), max_size=25), st.integers(0, 120))
def test_it_reads_as_a_file_in_memory(
    data: bytes, operations: list[tuple[int | None, int]], ahead: int
) -> None:
    """A seek to before the beginning moves BytesIO there, and is refused by files."""
    file, memory = make_random_reader(Fetched(data), len(data), ahead), io.BytesIO(data)
    for whence, number in operations:
        if whence is None:
            assert file.read(number) == memory.read(number)
        elif (0, memory.tell(), len(data))[whence] + number < 0:
            with pytest.raises((OSError, ValueError)):
                file.seek(number, whence)
        else:
            assert file.seek(number, whence) == memory.seek(number, whence)
        assert file.tell() == memory.tell()


def test_each_byte_is_fetched_once_and_with_the_end_what_lies_before_it() -> None:
    fetch = Fetched(os.urandom(10_000))
    file = make_random_reader(fetch, 10_000, 1_000)
    assert b"".join(iter(lambda: file.read(300), b"")) == fetch.data
    assert fetch.asked == [(n, n + 1_000) for n in range(0, 10_000, 1_000)]
    fetch.asked.clear()
    file.seek(0)
    file.read(1)
    for back in (22, 900):
        file.seek(-back, io.SEEK_END)
        assert file.read() == fetch.data[-back:]
    assert fetch.asked == [(0, 1_000), (9_000, 10_000)]
    fetch.asked.clear()
    file.seek(10)
    assert file.read(5_000) + file.read(100) == fetch.data[10:5_110]
    assert [fetch.asked[0][1]] == [start for start, _ in fetch.asked[1:]], "no byte twice"
