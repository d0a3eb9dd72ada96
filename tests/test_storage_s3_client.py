"""How patiently a store is asked, by a clock that the tests turn; no server is needed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError

from mdsmix.errors import Unreachable
from mdsmix.storage import locate, s3_client
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
    (400, "RequestTimeout"): (True, "the store answers RequestTimeout"),
    (400, "BadDigest"): (True, "the store answers BadDigest"),
    (400, "InvalidRequest"): (False, "the store answers InvalidRequest; look it up in its log"),
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
    child = os.fork()
    if not child:
        answer = ask("s3://b/x", known.failing_until(30, REFUSED, 0.1))
        os._exit(0 if answer == "done" else 1)
    assert os.waitpid(child, 0)[1] == 0


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
