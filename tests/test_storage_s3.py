"""How long a request to a store is retried, by a clock that the tests advance; and which requests a
file sends that is read in any order. No server is needed.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import threading
import tracemalloc
from contextlib import nullcontext
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import Mock

import botocore.exceptions
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError
from botocore.loaders import JSONFileLoader
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.storage import (
    Stat,
    locate,
    notices,
    retries,
    s3_client,
    s3_conditions,
    s3_reader,
)
from mdsmix.storage import s3_errors as errors_of_s3
from mdsmix.storage.object_reader import make_parts_reader, make_random_reader
from mdsmix.storage.s3_client import ask_s3
from tests.clock import Clock


def make_error(code: str, status: int = 400) -> ClientError:
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")


TRIED = r"cannot reach s3://b/x at http://127\.0\.0\.1:9 \(tried \d+ times in \d+ s\): "
REFUSED = EndpointConnectionError(endpoint_url="http://127.0.0.1:9")
SILENT = ReadTimeoutError(endpoint_url="http://127.0.0.1:9")
SLOW_DOWN = make_error("SlowDown", 503)


class Waiting(Clock):
    """A clock that advances when mdsmix sleeps, and by `work` with every request."""

    def __init__(self) -> None:
        self.slept = list[float]()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        super().sleep(seconds)

    def ask(self, seconds: float, error: Exception, work: float = 0) -> str:
        """Send a request to a store that fails for so many seconds."""
        end = self.now + seconds
        self.slept.clear()

        def request(client: object) -> str:
            self.now += work
            if self.now < end:
                raise error
            return "done"

        return ask_s3("s3://b/x", request)

    def ask_in_vain(self, error: Exception, work: float = 0) -> tuple[float, str]:
        """Send a request to a store that always fails. Return for how many seconds it is retried,
        and the message.
        """
        start = self.now
        with pytest.raises(Unreachable) as refusal:
            self.ask(1e9, error, work)
        return self.now - start, str(refusal.value)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """Replace the time of the client, whose endpoint has never answered."""
    clock = Waiting()
    monkeypatch.setattr(retries, "time", clock)
    for name in ("_answered", "_given_up", "_waited_for"):
        monkeypatch.setattr(retries, name, set())
    names = ("S3_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for name, value in zip(names, ("http://127.0.0.1:9", "us-east-1", "x", "y"), strict=True):
        monkeypatch.setenv(name, value)
    return clock


@pytest.fixture
def trusted(clock: Waiting) -> Waiting:
    """Replace the time of the client, whose endpoint has answered before."""
    ask_s3("s3://b/x", lambda client: None)
    return clock


def test_requests_are_retried_for_more_than_a_minute(trusted: Waiting) -> None:
    """Patience begins with the first failure: an upload that took two minutes before it broke is
    tried again.
    """
    for error in (REFUSED, SLOW_DOWN, SILENT):
        assert trusted.ask(75, error, 0.01) == "done"
        assert max(trusted.slept) <= 8
        assert len(set(trusted.slept)) == len(trusted.slept), "no two wait for the same time"
        assert 8 < len(trusted.slept) < 60
    assert trusted.ask(200, REFUSED, 120) == "done"
    assert len(trusted.slept) == 1


def test_a_store_that_stays_away_is_given_up_in_bounded_time(clock: Waiting) -> None:
    """It is given up soon if it never answered. After that, later requests are given up soon too,
    until it answers.
    """
    assert clock.ask_in_vain(REFUSED)[0] < 4
    assert clock.ask_in_vain(SILENT, 30)[0] < 31
    for error, work, limit in ((REFUSED, 0, 91), (SILENT, 30, 151)):
        ask_s3("s3://b/x", lambda client: None)
        seconds, message = clock.ask_in_vain(error, work)
        assert 90 <= seconds < limit
        assert re.match(TRIED, message)
        assert clock.ask_in_vain(SLOW_DOWN)[0] < 4


def test_a_header_that_cannot_be_sent_is_not_retried(trusted: Waiting) -> None:
    """The error's text quotes the header. If no variable has the line break, the credentials come
    from elsewhere. Another error of the same class is a broken connection.
    """
    cause = ValueError("Invalid header value b'KEY\\n/20261130'")
    error = botocore.exceptions.HTTPClientError(error=cause)
    seconds, message = trusted.ask_in_vain(error)
    assert (seconds, "KEY" in message) == (0, False)
    assert "the access key, the session token or the region contains a line break" in message
    other = botocore.exceptions.HTTPClientError(error=OSError("broken"))
    assert trusted.ask(4, other) == "done"


def test_a_notice_is_shown_once_and_again_after_the_store_has_answered(trusted: Waiting) -> None:
    """A wait of less than five seconds is not shown: many servers restart faster."""
    sentences = list[str]()
    functions = [*notices._functions]
    with notices.redirect_notices(sentences.append):
        trusted.ask(4, SLOW_DOWN)
        assert sentences == []
        for _ in range(2):
            trusted.ask(60, SLOW_DOWN)
    assert notices._functions == functions
    words = "the store asks to slow down; each request is retried for up to 90 s"
    assert sentences == [f"waiting for http://127.0.0.1:9: {words}"] * 2


def test_only_temporary_failures_are_retried(trusted: Waiting) -> None:
    down = "the store is overloaded or down"
    for status, code, is_temporary, words in (
        (502, "502", True, f"{down} (502); run the same command again later"),
        (503, "SlowDownWrite", True, f"{down} (SlowDownWrite)"),
        (429, "429", True, f"{down} (429)"),
        (400, "RequestTimeout", True, "the request failed (RequestTimeout); look it up"),
        (400, "BadDigest", True, "the request failed (BadDigest); look it up"),
        (400, "InvalidRequest", False, "the request failed (InvalidRequest); look it up"),
        (403, "AccessDenied", False, "access denied; give these credentials the permission"),
        (403, "RequestTimeTooSkewed", False, "this machine's clock is off by minutes"),
        (404, "NoSuchBucket", False, "the bucket does not exist; create it or correct its name"),
        (501, "NotImplemented", False, "the store cannot do this"),
        (507, "XMinioStorageFull", False, "the store's disk is full; free some space"),
    ):
        assert words in trusted.ask_in_vain(make_error(code, status))[1]
        assert (len(trusted.slept) > 8) is is_temporary, code
        ask_s3("s3://b/x", lambda client: None)


def test_a_forked_worker_trusts_the_endpoints_of_its_parent_but_has_its_own_client(
    trusted: Waiting,
) -> None:
    """Two processes on one connection would read each other's answers."""
    client_of_parent = ask_s3("s3://b/x", lambda client: client)
    assert ask_s3("s3://b/y", lambda client: client) is client_of_parent

    def check() -> None:
        assert trusted.ask(30, REFUSED, 0.1) == "done"
        assert ask_s3("s3://b/x", lambda client: client) is not client_of_parent

    child = get_context("fork").Process(target=check)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_a_client_is_made_without_pyopenssl_which_can_be_imported_later() -> None:
    code = (
        "import sys\n"
        "from mdsmix.storage import locate\n"
        "locate('s3://b/x').is_on_this_machine\n"
        "assert 'botocore.httpsession' in sys.modules and 'OpenSSL' not in sys.modules\n"
        "import urllib3.contrib.pyopenssl\n"
        "import botocore.httpsession, ssl\n"
        "assert botocore.httpsession.SSLContext is ssl.SSLContext\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_forked_worker_does_not_read_the_description_of_s3_again(
    clock: Waiting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A forked worker makes its client like one whose settings have changed. If AWS_DATA_PATH has
    changed, the files there are read.
    """
    reads = list[str]()
    read_description = s3_client._read_description

    def record(path: str) -> Any:
        content = read_description(path)
        assert content == JSONFileLoader().load_file(path)
        if content is not None:
            reads.append(path)
        return content

    monkeypatch.setattr(s3_client, "_read_description", record)

    def make_client() -> list[str]:
        """Make a new client. Return the names of the files that were read for it."""
        reads.clear()
        s3_client._make_client.cache_clear()
        assert s3_client.find_s3_endpoint("s3://b/x") == "http://127.0.0.1:9"
        return [*reads]

    s3_client._open_loader.cache_clear()
    paths = make_client()
    [description] = [path for path in paths if path.endswith("service-2")]
    folders = [*s3_client._open_loader(None).search_paths]
    assert make_client() == []
    assert s3_client._open_loader(None).search_paths == folders, "they grow with each client"

    # Another description of S3, which a user has put into a folder.
    copy = tmp_path / "s3" / "2030-01-01"
    copy.mkdir(parents=True)
    (copy / "service-2.json").mkdir()  # it is no file, so it does not count
    shutil.copy(f"{description}.json.gz", copy)
    monkeypatch.setenv("AWS_DATA_PATH", str(tmp_path))
    assert str(copy / "service-2") in make_client()
    assert make_client() == []


def test_each_part_of_a_body_has_its_own_patience(
    trusted: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object has five bytes. Each body returns one in a minute, and then nothing."""

    def get(request: dict[str, str], client: object) -> dict[str, Any]:
        start = int(request.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        remaining = [b"abcde"[start : start + 1]]

        def read(size: int) -> bytes:
            if not remaining:
                raise SILENT
            trusted.now += 60
            return remaining.pop()

        body = SimpleNamespace(read=read, close=lambda: None)
        return {"ETag": "etag", "Body": body, "ContentLength": 5}

    monkeypatch.setattr(s3_reader, "_get", get)
    assert locate("s3://b/x").read() == b"abcde"
    assert trusted.now > 300


@pytest.mark.parametrize(("stamp", "body"), [("new", b"abcde"), ("old", b"ab")])
def test_another_version_than_the_requested_one_is_not_read(
    stamp: str, body: bytes, clock: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that ignores If-Match sends the newest version, with its own ETag. Too few bytes are
    no other version's either.
    """
    answer = {"ETag": stamp, "Body": io.BytesIO(body), "ContentLength": len(body)}
    monkeypatch.setattr(s3_reader, "_get", lambda request, client: answer)
    file = locate("s3://b/x").open_random(Stat(9, "old", 0))
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        file.read(5)


def test_an_answer_without_version_or_time_is_refused() -> None:
    """An ETag may have no quotes, or be weakened by a proxy. A listing may have none: then the
    object itself is asked.
    """
    now = datetime(2026, 11, 22, tzinfo=timezone.utc)
    for etag in ('"abc"', "abc", 'W/"abc"'):
        answer = {"ETag": etag, "LastModified": now, "ContentLength": 5}
        assert s3_client.stat_from_answer(answer) == Stat(5, "abc", now.timestamp())
    assert s3_client.stat_from_answer({"LastModified": now, "Size": 5}) == Stat(
        5, "", now.timestamp()
    )
    for answer, missing in (({"ETag": "a"}, "Last-Modified"), ({"LastModified": now}, "ETag")):
        with pytest.raises(Unreachable, match=f"answers without {missing}"):
            s3_client.stat_from_answer({"ContentLength": 5, **answer})


def test_a_store_that_refuses_the_headers_keeps_no_conditions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each store answers so to a condition; the object does not exist yet."""
    store = ("http://store", "b")
    target = {"Bucket": "b", "Key": "x"}
    keeps = dict[Any, bool]()
    monkeypatch.setattr(s3_conditions, "_keeps", keeps)
    client = Mock(**{"head_object.side_effect": make_error("404")})
    client.meta.endpoint_url = store[0]
    for code, before, is_learnt in (
        ("NotImplemented", {}, True),
        ("MethodNotAllowed", {}, True),
        ("InvalidArgument", {}, True),
        ("NotImplemented", {store: True}, False),
        ("AccessDenied", {}, False),
    ):
        keeps.clear()
        keeps.update(before)
        client.put_object.side_effect = [make_error(code), {"ETag": '"new"'}]
        with nullcontext() if is_learnt else pytest.raises(ClientError):
            assert s3_conditions.put_if(client, target, b"1", None).stamp == "new"
        assert keeps == ({store: False} if is_learnt else before)


class ClockOfThreads(Waiting):
    """A clock for each thread, which only this thread's own waiting advances."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict[int, float]()
        "Thread -> how long it has waited."

    def sleep(self, seconds: float) -> None:
        self.seconds[threading.get_ident()] = self.monotonic() + seconds

    def monotonic(self) -> float:
        return self.seconds.get(threading.get_ident(), 0.0)


def test_the_trial_of_a_dead_endpoint_is_given_up_soon(
    clock: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look up the endpoint's address does not count as an answer of the store. Three writers
    and the deletion wait 3 s each, in threads of their own.
    """
    monkeypatch.setattr(s3_conditions, "_keeps", {})
    own_clocks = ClockOfThreads()
    monkeypatch.setattr(retries, "time", own_clocks)
    with pytest.raises(Unreachable, match="nothing answers there"):
        locate("s3://b/x").try_conditions()
    assert "http://127.0.0.1:9" not in retries._answered
    assert len(own_clocks.seconds) >= 4
    assert max(own_clocks.seconds.values()) < 4


def test_a_bucket_is_part_of_the_host_name_only_at_aws(
    clock: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint's own path stays before it, such as the owner's name in that of the Hugging Face
    hub. The checksum headers of 2025 are sent only to AWS.
    """

    def describe(client: Any) -> tuple[str, str]:
        target = {"Bucket": "bucket", "Key": "x"}
        url = client.generate_presigned_url("get_object", Params=target).partition("?")[0]
        return url, client.meta.config.request_checksum_calculation

    for endpoint, expected in (
        ("http://minio.example:9000", ("http://minio.example:9000/bucket/x", "when_required")),
        ("https://s3.example/org", ("https://s3.example/org/bucket/x", "when_required")),
        ("", ("https://bucket.s3.amazonaws.com/x", "when_supported")),
    ):
        monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
        assert ask_s3("s3://b/x", describe) == expected


def test_messages_name_the_endpoint_that_boto3_uses(
    clock: Waiting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A profile may set an endpoint, and a variable may let boto3 ignore what others set. The
    address of a VPC endpoint is not that of AWS for everybody. An address of AWS that a variable
    sets is shown too, since another machine may lack the variable.
    """
    profile = tmp_path / "config"
    url = "http://user:secret@store.example:9000"
    profile.write_text(f"[default]\nregion = eu-west-1\nendpoint_url = {url}\n")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    proxy = "https://s3.amazonaws.com.proxy.corp:8443"
    proxied = tmp_path / "proxied"
    proxied.write_text(f"[default]\nregion = eu-west-1\nendpoint_url = {proxy}\n")
    china = "https://s3.cn-north-1.amazonaws.com.cn"
    fips = "https://s3-fips.us-gov-west-1.amazonaws.com"
    inner = "https://bucket.vpce-1a-2b.s3.eu-west-1.vpce.amazonaws.com"
    ignore = {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}
    for settings, expected in (
        ({}, "http://store.example:9000"),
        ({"AWS_ENDPOINT_URL": "http://other.example"}, "http://other.example"),
        ({"AWS_ENDPOINT_URL_S3": inner}, inner),
        ({"S3_ENDPOINT_URL": china}, china),
        ({"AWS_ENDPOINT_URL": fips}, fips),
        ({"S3_ENDPOINT_URL": proxy}, proxy),
        ({"AWS_CONFIG_FILE": str(proxied)}, proxy),
        ({"S3_ENDPOINT_URL": "http://other.example", **ignore}, "http://other.example"),
        ({"AWS_ENDPOINT_URL": "http://other.example", **ignore}, "AWS"),
        ({"AWS_CONFIG_FILE": str(tmp_path / "missing"), "AWS_DEFAULT_REGION": "cn-north-1"}, "AWS"),
        ({"AWS_DEFAULT_REGION": "no region", "AWS_ENDPOINT_URL": "http://a"}, "http://a"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv("AWS_CONFIG_FILE", str(profile))
            patch.setenv("S3_ENDPOINT_URL", "")
            for name, value in settings.items():
                patch.setenv(name, value)
            assert s3_client.show_s3_endpoint() == expected
            access = locate("s3://b/x").describe_access()
            assert access == f"endpoint {expected}, credentials from env"
            command = locate("s3://b/x").fetch_command("copy")
            options = [] if expected == "AWS" else ["--endpoint-url", expected]
            assert command[4:-2] == options
            with pytest.raises(Unreachable, match=f"s3://b/x at {re.escape(expected)}") as refusal:
                clock.ask(1e9, make_error("AccessDenied", 403))
            assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"AWS_DEFAULT_REGION": "no region"},
            "the region's name is not valid; correct AWS_DEFAULT",
        ),
        ({"AWS_CONFIG_FILE": "{damaged}"}, "a configuration file of AWS cannot be read; correct"),
        ({"AWS_REQUEST_CHECKSUM_CALCULATION": "x"}, "a setting of boto3 is not valid; correct"),
        ({"AWS_S3_DISABLE_EXPRESS_SESSION_AUTH": "x"}, "a setting of boto3 is not valid; correct"),
        ({"AWS_DEFAULTS_MODE": "x"}, "a setting of boto3 is not valid; correct"),
        ({"S3_ENDPOINT_URL": "http://127.0.0.1:9?x=1"}, "the endpoint is not the address of a st"),
    ],
)
def test_a_setting_that_boto3_refuses_is_one_sentence(
    clock: Waiting,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, str],
    words: str,
) -> None:
    damaged = tmp_path / "config"
    damaged.write_text("[ no section\nx")
    for name, value in settings.items():
        monkeypatch.setenv(name, value.format(damaged=damaged))
    with pytest.raises(Unreachable, match=rf"^cannot reach s3://b/x at [^\n]*: {words}[^\n]*$"):
        locate("s3://b/x").stat()


def test_a_login_that_is_missing_is_one_sentence(
    clock: Waiting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first error with a new SSO profile."""
    profile = tmp_path / "config"
    profile.write_text(
        "[default]\nsso_session = a\nsso_account_id = 1\nsso_role_name = b\n"
        "[sso-session a]\nsso_region = us-east-1\nsso_start_url = https://sso.invalid/\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(profile))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(Unreachable, match="session is missing or has expired; run `aws sso login"):
        locate("s3://b/x").stat()


def test_errors_about_settings_exist_in_botocore() -> None:
    for name in errors_of_s3._SETTING_CLASSES:
        assert hasattr(botocore.exceptions, name), name


def test_a_head_with_expired_credentials_is_sent_again_with_new_ones(trusted: Waiting) -> None:
    """AWS answers it by status 400 alone. A second one is an error."""
    clients = list[Any]()

    def head(client: Any) -> str:
        clients.append(client)
        if client is clients[0]:
            raise make_error("400")
        return "done"

    assert ask_s3("s3://b/x", head) == "done"
    assert "the store refuses the request" in trusted.ask_in_vain(make_error("400"))[1]


READ = st.tuples(st.none(), st.integers(-1, 90))
SEEK = st.tuples(st.sampled_from([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END]), st.integers(-140, 140))


class RecordingFetch:
    """Returns ranges of some bytes, and records them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.ranges = list[tuple[int, int]]()

    def __call__(self, start: int, end: int) -> bytes:
        assert 0 <= start < end <= len(self.data)
        self.ranges.append((start, end))
        return self.data[start:end]


def compare_with_memory(
    file: BinaryIO, data: bytes, operations: list[tuple[int | None, int]]
) -> None:
    """Compare a reader of these bytes with BytesIO. A seek to before the beginning moves BytesIO
    there, and is refused by files.
    """
    memory = io.BytesIO(data)
    for whence, number in operations:
        if whence is None:
            assert file.read(number) == memory.read(number)
        elif (0, memory.tell(), len(data))[whence] + number < 0:
            with pytest.raises((OSError, ValueError)):
                file.seek(number, whence)
        else:
            assert file.seek(number, whence) == memory.seek(number, whence)
        assert file.tell() == memory.tell()


@given(st.binary(max_size=100), st.lists(st.one_of(READ, SEEK), max_size=25), st.integers(0, 120))
def test_a_random_reader_reads_as_a_file_in_memory(
    data: bytes, operations: list[tuple[int | None, int]], ahead: int
) -> None:
    compare_with_memory(
        make_random_reader(RecordingFetch(data), len(data), ahead), data, operations
    )


@given(
    st.lists(st.binary(max_size=40), max_size=6),
    st.lists(st.one_of(READ, SEEK), max_size=25),
)
def test_parts_are_read_as_their_joined_bytes(
    parts: list[bytes], operations: list[tuple[int | None, int]]
) -> None:
    file = make_parts_reader([memoryview(part) for part in parts])
    compare_with_memory(file, b"".join(parts), operations)


def test_an_upload_does_not_join_its_parts_in_memory(
    clock: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try reads them from the first byte on."""
    parts = [bytes([number]) * (2 << 20) for number in range(16)]
    expected = hashlib.sha256(b"".join(parts)).hexdigest()
    digests = list[str]()

    def put_object(**request: Any) -> None:
        hasher = hashlib.sha256()
        for piece in iter(lambda: request["Body"].read(16 << 10), b""):
            hasher.update(piece)
        digests.append(hasher.hexdigest())
        if len(digests) == 1:
            raise SLOW_DOWN

    client = SimpleNamespace(
        put_object=put_object, meta=SimpleNamespace(endpoint_url="http://127.0.0.1:9")
    )
    monkeypatch.setattr(s3_client, "_open_client", lambda: client)
    tracemalloc.start()
    try:
        locate("s3://b/x").write(*parts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert digests == [expected] * 2
    assert peak < 1 << 20


def test_each_byte_is_fetched_once_and_the_end_with_the_bytes_before_it() -> None:
    fetch = RecordingFetch(os.urandom(10_000))
    file = make_random_reader(fetch, 10_000, 1_000)
    assert b"".join(iter(lambda: file.read(300), b"")) == fetch.data
    assert fetch.ranges == [(n, n + 1_000) for n in range(0, 10_000, 1_000)]
    fetch.ranges.clear()
    file.seek(0)
    file.read(1)
    for back in (22, 900):
        file.seek(-back, io.SEEK_END)
        assert file.read() == fetch.data[-back:]
    assert fetch.ranges == [(0, 1_000), (9_000, 10_000)]
    fetch.ranges.clear()
    file.seek(10)
    assert file.read(5_000) + file.read(100) == fetch.data[10:5_110]
    assert [fetch.ranges[0][1]] == [start for start, _ in fetch.ranges[1:]], "no byte twice"
