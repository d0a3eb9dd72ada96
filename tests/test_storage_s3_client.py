"""How patiently a store is asked, by a clock that the tests turn; no server is needed."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError

from mdsmix.errors import Unreachable
from mdsmix.storage import Stat, locate, s3_client, s3_conditions, s3_reader
from mdsmix.storage.s3_client import ask

REFUSED = EndpointConnectionError(endpoint_url="http://127.0.0.1:9")
SILENT = ReadTimeoutError(endpoint_url="http://127.0.0.1:9")
SLOW_DOWN = ClientError(
    {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "PutObject"
)


class Clock:
    """Time passes where mdsmix sleeps, and by `work` with every request."""

    def __init__(self) -> None:
        self.now, self.slept = 1000.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def failing_until(self, end: float, error: Exception, work: float) -> Callable[[Any], str]:
        def request(client: object) -> str:
            self.now += work
            if self.now - 1000 < end:
                raise error
            return "done"

        return request


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """And an endpoint that never answered."""
    clock = Clock()
    monkeypatch.setattr(s3_client, "time", clock)
    for known in ("_answered", "_given_up"):
        monkeypatch.setattr(s3_client, known, set())
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return clock


@pytest.fixture
def known(clock: Clock) -> Clock:
    """The endpoint has answered before."""
    ask("s3://b/x", lambda client: None)
    return clock


@pytest.mark.parametrize("error", [REFUSED, SLOW_DOWN, SILENT])
def test_a_store_that_is_gone_for_a_minute_is_waited_for(error: Exception, known: Clock) -> None:
    assert ask("s3://b/x", known.failing_until(75, error, 0.01)) == "done"
    assert max(known.slept) <= 8
    assert len(set(known.slept)) == len(known.slept), "no two wait for the same time"
    assert 8 < len(known.slept) < 60


@pytest.mark.parametrize(("error", "work", "most"), [(REFUSED, 0, 91), (SILENT, 30, 151)])
def test_a_store_that_stays_away_is_given_up_in_bounded_time(
    error: Exception, work: float, most: float, known: Clock
) -> None:
    with pytest.raises(Unreachable, match=r"\(tried \d+ times in \d+ s\): ") as refusal:
        ask("s3://b/x", known.failing_until(1e9, error, work))
    assert 90 <= known.now - 1000 < most
    assert str(refusal.value).startswith("cannot reach s3://b/x at http://127.0.0.1:9 (tried ")


@pytest.mark.parametrize(("error", "work", "most"), [(REFUSED, 0, 4), (SILENT, 30, 31)])
def test_a_store_that_never_answered_is_given_up_soon(
    error: Exception, work: float, most: float, clock: Clock
) -> None:
    with pytest.raises(Unreachable):
        ask("s3://b/x", clock.failing_until(1e9, error, work))
    assert clock.now - 1000 < most


def test_a_wait_is_said_once_and_again_after_the_store_has_answered(
    known: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that ends within five seconds: a server that restarts is no news."""
    said = list[str]()
    monkeypatch.setattr(s3_client, "_told", set())
    before = s3_client._say
    with s3_client.said_by(said.append):
        ask("s3://b/x", known.failing_until(4, SLOW_DOWN, 0))
        assert said == []
        for away in (60, 120):
            ask("s3://b/x", known.failing_until(away, SLOW_DOWN, 0))
    assert s3_client._say is before
    assert (
        said
        == [
            "waiting for http://127.0.0.1:9: the store asks to slow down; each request is asked again for up to 90 s"
        ]
        * 2
    )


def test_what_is_asked_after_that_is_given_up_soon_until_the_store_answers(known: Clock) -> None:
    with pytest.raises(Unreachable):
        ask("s3://b/x", known.failing_until(1e9, SLOW_DOWN, 0))
    before = known.now
    with pytest.raises(Unreachable):
        ask("s3://b/lease", known.failing_until(1e9, SLOW_DOWN, 0))
    assert known.now - before < 4
    ask("s3://b/x", lambda client: None)
    away = known.now - 1000 + 60
    assert ask("s3://b/x", known.failing_until(away, REFUSED, 0)) == "done"


def test_patience_begins_with_the_first_failure(known: Clock) -> None:
    """An upload that took two minutes before it broke is tried again."""
    assert ask("s3://b/x", known.failing_until(200, REFUSED, 120)) == "done"
    assert len(known.slept) == 1


ANSWERS = {
    (502, "502"): (True, "the store is overloaded or down (502); run the same command again later"),
    (503, "SlowDownWrite"): (True, "the store is overloaded or down (SlowDownWrite)"),
    (429, "429"): (True, "the store is overloaded or down (429)"),
    (400, "RequestTimeout"): (True, "the request failed (RequestTimeout); look it up"),
    (400, "BadDigest"): (True, "the request failed (BadDigest); look it up"),
    (400, "InvalidRequest"): (False, "the request failed (InvalidRequest); look it up"),
    (403, "AccessDenied"): (False, "access denied; give these credentials the right"),
    (403, "RequestTimeTooSkewed"): (False, "this machine's clock is off by minutes"),
    (404, "NoSuchBucket"): (False, "the bucket does not exist; create it or correct its name"),
    (501, "NotImplemented"): (False, "the store cannot do this"),
    (507, "XMinioStorageFull"): (False, "the store's disk is full; free some space"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_only_what_may_pass_is_asked_again(answer: tuple[int, str], known: Clock) -> None:
    status, code = answer
    passes, words = ANSWERS[answer]
    said = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(Unreachable) as refusal:
        ask("s3://b/x", known.failing_until(1e9, ClientError(said, "PutObject"), 0))
    assert words in str(refusal.value)
    assert (len(known.slept) > 8) is passes


def test_a_forked_worker_knows_what_its_parent_knows(known: Clock) -> None:
    """But for its connections: two processes on one of them would read each other's answers."""
    parents = ask("s3://b/x", lambda client: client)
    assert ask("s3://b/y", lambda client: client) is parents
    child = os.fork()
    if not child:
        answer = ask("s3://b/x", known.failing_until(30, REFUSED, 0.1))
        own = ask("s3://b/x", lambda client: client)
        os._exit(0 if answer == "done" and own is not parents else 1)
    assert os.waitpid(child, 0)[1] == 0


class Body:
    """Of an object of five bytes: one comes in a minute, and then nothing."""

    def __init__(self, start: int, clock: Clock) -> None:
        self._left, self._clock = [b"abcde"[start : start + 1]], clock

    def read(self, size: int) -> bytes:
        if not self._left:
            raise SILENT
        self._clock.now += 60
        return self._left.pop()

    def close(self) -> None:
        pass


def test_patience_begins_anew_with_each_part_of_a_body_that_came(
    known: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(wanted: dict[str, str], client: object) -> dict[str, Any]:
        start = wanted.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        return {"ETag": "etag", "Body": Body(int(start), known), "ContentLength": 5}

    monkeypatch.setattr(s3_reader, "_get", get)
    assert locate("s3://b/x").read() == b"abcde"
    assert known.now - 1000 > 300


def test_fewer_bytes_than_an_object_had_are_another_object(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store that heeds no If-Match."""
    answer = {"ETag": "new", "Body": io.BytesIO(b"ab"), "ContentLength": 2}
    monkeypatch.setattr(s3_reader, "_get", lambda wanted, client: answer)
    with (
        locate("s3://b/x").open_random(Stat(9, "old", 0)) as file,
        pytest.raises(Unreachable, match="was changed while it was being read"),
    ):
        file.read(5)


NOW = datetime(2026, 11, 22, tzinfo=timezone.utc)


@pytest.mark.parametrize("etag", ['"abc"', "abc", 'W/"abc"'])
def test_an_etag_is_known_with_quotes_without_them_and_as_a_proxy_weakens_it(etag: str) -> None:
    for size in ("ContentLength", "Size"):
        said = {"ETag": etag, "LastModified": NOW, size: 5}
        assert s3_client.said_stat(said) == Stat(5, "abc", NOW.timestamp())


def test_a_store_that_does_not_say_which_version_or_when_is_refused() -> None:
    """But a listing may be without ETags: then the object itself is asked."""
    assert s3_client.said_stat({"LastModified": NOW, "Size": 5}).stamp == ""
    with pytest.raises(Unreachable, match="answers without ETag, so an object that was changed"):
        s3_client.said_stat({"LastModified": NOW, "ContentLength": 5})
    for size in ("ContentLength", "Size"):
        with pytest.raises(Unreachable, match="answers without Last-Modified"):
            s3_client.said_stat({"ETag": '"abc"', size: 5})


class Unknowing:
    """A client of a store that answers so to a PUT on a condition."""

    def __init__(self, word: str) -> None:
        self.meta = SimpleNamespace(endpoint_url="http://unknowing")
        self._word = word

    def put_object(self, **asked: Any) -> dict[str, str]:
        if {"IfNoneMatch", "IfMatch"} & asked.keys():
            raise refused(self._word)
        return {"ETag": '"new"'}

    def head_object(self, **asked: Any) -> dict[str, str]:
        raise refused("404")


def refused(word: str) -> ClientError:
    return ClientError({"Error": {"Code": word}}, "PutObject")


@pytest.mark.parametrize("word", ["NotImplemented", "MethodNotAllowed", "InvalidArgument"])
def test_a_store_that_does_not_know_conditions_keeps_none_unless_it_has_kept_them_before(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, place = ("http://unknowing", "b"), {"Bucket": "b", "Key": "x"}
    known = dict[tuple[str, str], bool]()
    monkeypatch.setattr(s3_conditions, "_kept", known)
    found = s3_conditions.put_if(Unknowing(word), place, b"1", None)
    assert (found and found.stamp, known) == ("new", {store: False})
    known[store] = True
    with pytest.raises(ClientError):
        s3_conditions.put_if(Unknowing(word), place, b"1", None)
    known.clear()
    with pytest.raises(ClientError):
        s3_conditions.put_if(Unknowing("AccessDenied"), place, b"1", None)
    assert known == {}


def test_a_bucket_is_in_the_path_but_at_aws_where_it_has_a_name_in_dns(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")

    def asked() -> tuple[str, str]:
        """Where a request goes, and when its body gets a checksum of 2025."""
        wanted = {"Params": {"Bucket": "bucket", "Key": "x"}}
        return ask(
            "s3://b/x",
            lambda client: (
                client.generate_presigned_url("get_object", **wanted).partition("?")[0],
                client.meta.config.request_checksum_calculation,
            ),
        )

    monkeypatch.setenv("S3_ENDPOINT_URL", "http://minio.example:9000")
    assert asked() == ("http://minio.example:9000/bucket/x", "when_required")
    monkeypatch.delenv("S3_ENDPOINT_URL")
    assert asked() == ("https://bucket.s3.amazonaws.com/x", "when_supported")


def test_a_store_that_takes_a_connection_and_is_silent_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3_client, "_READ_SECONDS", 0.2)
    monkeypatch.setattr(s3_client, "_FIRST_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
        with pytest.raises(Unreachable, match="the store stopped answering") as refusal:
            locate("s3://bucket/x").stat()
    assert "tried" not in str(refusal.value)
