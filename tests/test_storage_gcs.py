"""Requests to Google Cloud Storage without a server: what its refusals say, which address and
credentials are used, and what a request contains. Real servers are in `tests/stores`.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
from urllib3.exceptions import ProtocolError

from mdsmix.errors import Denied, NoSuchPlace, RecipeError, Unreachable
from mdsmix.storage import Location, Stat, gcs, gcs_client, locate, retries, store_addresses
from mdsmix.storage.gcs_client import Session, stat_from_entry
from mdsmix.storage.gcs_reader import Body
from tests.clock import Clock
from tests.fake_gcs import write_service_account

NINE = b"123456789"
CRC32C_OF_NINE = base64.b64encode((0xE3069283).to_bytes(4, "big")).decode()
"The check value of CRC-32C (RFC 3720, ISCSI)."


@pytest.fixture(autouse=True)
def _no_own_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No login of the user is found, and no metadata server of a cloud is asked for."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no login"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    for name in ("_answered", "_given_up", "_waited_for"):
        monkeypatch.setattr(retries, name, set())
    monkeypatch.setattr(retries, "time", Clock())


class Answers:
    """Stands in for google-auth's session: gives these answers or raises these errors, one after
    the other and the last again and again, and keeps the requests.
    """

    def __init__(self, *answers: Any) -> None:
        self._answers = [*answers]
        self.requests: list[SimpleNamespace] = []

    def request(self, method: str, url: str, params: Any, **options: Any) -> requests.Response:
        params = dict(params or {})
        options["data"] = options["data"].read() if options["data"] else None
        self.requests.append(SimpleNamespace(method=method, url=url, params=params, **options))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        status, content = answer
        response = requests.Response()
        response.status_code = status
        response._content = json.dumps(content).encode()
        return response


def answer_with(
    monkeypatch: pytest.MonkeyPatch, *answers: Any, access: str = "credentials of a user"
) -> Answers:
    """Let the store give these answers: (status, JSON), or an exception."""
    http = Answers(*answers)
    session = Session(http, "https://storage.googleapis.com", access)
    monkeypatch.setattr(gcs_client, "open_session", lambda url: session)
    return http


def refusal(status: int, reason: str, message: str = "") -> tuple[int, Any]:
    """Return an answer as Google gives it."""
    errors = [{"domain": "global", "reason": reason, "message": message}]
    return status, {"error": {"code": status, "message": message, "errors": errors}}


ENTRY = {"size": "9", "generation": "17", "timeCreated": "2026-11-29T18:40:00.123Z"}
REFUSALS: list[tuple[Any, type[Unreachable], bool, str]] = [
    (refusal(403, "forbidden"), Denied, False, "access denied; give these credentials"),
    (refusal(403, "insufficientPermissions"), Denied, False, "without access to Cloud Storage"),
    (refusal(403, "rateLimitExceeded"), Unreachable, True, "the store asks to slow down"),
    (refusal(403, "accountDisabled"), Unreachable, False, "no active billing account"),
    (refusal(403, "retentionPolicyNotMet"), Unreachable, False, "retention policy forbids it"),
    (refusal(401, "authError"), Unreachable, False, "the store does not accept the credentials"),
    (refusal(429, "rateLimitExceeded"), Unreachable, True, "the store asks to slow down"),
    (refusal(404, "notFound"), NoSuchPlace, False, "the bucket does not exist; create it"),
    (refusal(400, "invalid", "Provided CRC32C"), Unreachable, True, "differ from those that were"),
    (refusal(400, "required", "requester pays"), Unreachable, False, "GOOGLE_CLOUD_QUOTA_PROJECT"),
    (refusal(400, "invalid"), NoSuchPlace, False, "the store refuses the request; check the"),
    (refusal(500, "backendError"), Unreachable, True, "the store failed inside"),
    ((503, "no JSON object"), Unreachable, True, "the store is overloaded or down (503)"),
    ((501, None), Unreachable, False, "the store cannot do this"),
    ((418, [1]), Unreachable, False, "the request failed (418)"),
    (RefreshError("invalid_grant"), Unreachable, False, "credentials have expired or are refused"),
    (TransportError("x"), Unreachable, True, "the server that renews the credentials does not"),
    (requests.ConnectionError("x"), Unreachable, True, "the store closed the connection"),
    (requests.ReadTimeout("x"), Unreachable, True, "the store stopped answering"),
    (requests.exceptions.SSLError("x"), Unreachable, False, "the TLS connection failed"),
    (requests.exceptions.ProxyError("x"), Unreachable, True, "the proxy does not answer"),
    (OSError("TLS CA bundle"), Unreachable, False, "a file of TLS certificates is missing"),
    (ConnectionResetError("x"), Unreachable, True, "the request failed (ConnectionResetError)"),
    (ProtocolError("x"), Unreachable, True, "the connection broke in the middle"),
]
"What a write is answered, the class of the error, whether the write is sent again, and words."


@pytest.mark.parametrize(("answer", "kind", "is_tried", "words"), REFUSALS)
def test_a_refusal_is_a_sentence_and_only_a_temporary_one_is_tried_again(
    answer: Any, kind: type, is_tried: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = answer_with(monkeypatch, answer)
    with pytest.raises(Unreachable) as error:
        locate("gs://bucket/x").write(b"1")
    message = str(error.value)
    assert message.startswith("cannot reach gs://bucket/x at Google Cloud Storage")
    assert (type(error.value), words in message) == (kind, True), message
    assert (len(http.requests) > 3) is is_tried
    http = answer_with(monkeypatch, answer, (200, ENTRY))
    if is_tried:
        locate("gs://bucket/x").write(b"1")
        assert len(http.requests) == 2


def test_expired_credentials_are_read_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (RefreshError("expired"), refusal(401, "authError")):
        http = answer_with(monkeypatch, answer, (200, ENTRY))
        locate("gs://bucket/x").write(b"1")
        assert len(http.requests) == 2


def test_conditions_name_generations_and_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    file = locate("gs://bucket/a b/ü")
    http = answer_with(monkeypatch, (200, ENTRY), refusal(412, "conditionNotMet"))
    stat = file.create(NINE)
    assert stat == stat_from_entry(ENTRY)
    assert (stat.stamp, stat.size, round(stat.modified, 3)) == ("17", 9, 1795977600.123)
    assert file.replace("17", NINE) is None
    conditions = [request.params["ifGenerationMatch"] for request in http.requests]
    assert conditions == ["0", "17"]
    first = http.requests[0]
    assert first.url == "https://storage.googleapis.com/upload/storage/v1/b/bucket/o"
    assert (first.params["name"], first.params["uploadType"]) == ("a b/ü", "multipart")
    assert first.timeout == (5, 30)
    boundary = first.headers["content-type"].partition("boundary=")[2].encode()
    parts = first.data.split(b"--" + boundary)
    assert parts[0] == b""
    assert json.loads(parts[1].partition(b"\r\n\r\n")[2]) == {"crc32c": CRC32C_OF_NINE}
    assert parts[2].partition(b"\r\n\r\n")[2] == NINE + b"\r\n"
    assert parts[3] == b"--\r\n"


def test_the_store_of_google_is_not_tried_for_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    http = answer_with(monkeypatch, (500, None))
    monkeypatch.setattr(gcs, "open_session", gcs_client.open_session)
    assert locate("gs://bucket/x").try_conditions() is True
    assert http.requests == []


def test_a_copy_is_continued_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = {"done": False, "rewriteToken": "token"}
    http = answer_with(monkeypatch, (200, unfinished), (200, unfinished), (200, {"done": True}))
    locate("gs://a/x y").copy_to(locate("gs://b/z"))
    tokens = [request.params.get("rewriteToken") for request in http.requests]
    assert tokens == [None, "token", "token"]
    assert {request.url for request in http.requests} == {
        "https://storage.googleapis.com/storage/v1/b/a/o/x%20y/rewriteTo/b/b/o/z"
    }


def test_a_read_names_the_generation_and_refuses_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google refuses the condition, which fake-gcs-server does not know."""
    http = answer_with(monkeypatch, refusal(412, "conditionNotMet"))
    file = locate("gs://bucket/x")
    for read in (lambda: file.open(5, 8, "17"), lambda: file.open_random(Stat(9, "17")).read(2)):
        with pytest.raises(Unreachable, match="gs://bucket/x was changed while it was being read"):
            read()
    assert [request.params["ifGenerationMatch"] for request in http.requests] == ["17", "17"]
    assert [request.headers["range"] for request in http.requests] == ["bytes=5-7", "bytes=0-8"]


def test_times_may_have_a_fraction_or_an_offset() -> None:
    for text, fraction in (
        ("2026-11-29T18:40:00Z", 0.0),
        ("2026-11-29T18:40:00.5Z", 0.5),
        ("2026-11-29T19:40:00.123456+01:00", 0.123456),
        ("2026-11-29T18:40:00.123456789Z", 0.123456),
    ):
        modified = stat_from_entry(ENTRY | {"timeCreated": text}).modified
        assert modified == pytest.approx(1795977600 + fraction, abs=1e-6)


@pytest.mark.parametrize(
    "changed",
    [{"timeCreated": None}, {"timeCreated": "today"}, {"size": "many"}, {"generation": None}],
)
def test_fields_of_another_form_are_not_an_answer_of_google(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"name": "a/x", **ENTRY, **changed}
    file = locate("gs://bucket/a")
    for answer, request in (
        (entry, file.stat),
        ({"kind": "storage#objects", "items": [entry]}, file.entries),
        ({"kind": "storage#objects", "items": None}, file.entries),
    ):
        answer_with(monkeypatch, (200, answer))
        with pytest.raises(Unreachable, match="or is not an answer of Google Cloud Storage"):
            request()


def make_body(content: bytes, length: int, crc32c: int | None) -> Body:
    """Return the body of an answer that announces this length and checksum."""
    remaining = [content[:4], content[4:]]

    def read(size: int, decode_content: bool) -> bytes:
        assert not decode_content
        return remaining.pop(0) if remaining else b""

    raw = SimpleNamespace(read=read)
    answer = SimpleNamespace(raw=raw, headers={"content-length": str(length)}, close=lambda: None)
    return Body(answer, None if crc32c is None else crc32c.to_bytes(4, "big"))


def read_all(body: Body) -> bytes:
    return b"".join(iter(lambda: body.read(10), b""))


def test_a_body_that_ends_early_or_differs_from_its_checksum_is_noticed() -> None:
    for crc32c in (None, 0xE3069283):
        assert read_all(make_body(NINE, 9, crc32c)) == NINE
    assert read_all(make_body(b"", 0, 0)) == b""
    assert read_all(make_body(b"12345678x", 9, None)) == b"12345678x"
    for content, length, name in ((NINE, 10, "Broken"), (b"12345678x", 9, "Damaged")):
        with pytest.raises(Exception) as error:  # noqa: PT011
            read_all(make_body(content, length, 0xE3069283))
        assert type(error.value).__name__ == name


def describe() -> str:
    return type(locate("gs://b")).describe_access()


def test_address_and_credentials_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An emulator is sent no credentials."""
    store = locate("gs://b/x")
    assert describe() == f"endpoint Google Cloud Storage, {gcs_client._NO_CREDENTIALS}"
    assert gcs_client.open_session(store.url).endpoint == "https://storage.googleapis.com"
    file = write_service_account(tmp_path / "account.json")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    assert describe() == "endpoint Google Cloud Storage, credentials of a service account"
    monkeypatch.setenv("API_ENDPOINT_OVERRIDE", "https://user:PASSWORD@private.example/")
    assert describe() == "endpoint https://private.example, credentials of a service account"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    assert describe() == "endpoint http://127.0.0.1:1, no credentials, since it is an emulator"
    session = gcs_client.open_session(store.url)
    assert session.endpoint == "http://127.0.0.1:1"
    assert not hasattr(session.http.credentials, "service_account_email")
    assert gcs_client.open_session(store.url) is session


def test_wrong_credentials_and_addresses_are_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    unusable = "the credentials cannot be used; run `gcloud auth"
    missing = "the file that GOOGLE_APPLICATION_CREDENTIALS names does not exist; correct it"
    for name, words in (
        (str(broken), unusable),
        (str(tmp_path), unusable),
        (str(tmp_path / "missing.json"), missing),
        (f"{broken}\n", missing),
    ):
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", name)
        with pytest.raises(Unreachable, match=words):
            locate("gs://b/x").read()
    # The server that makes tokens of a service account's key does not answer.
    file = write_service_account(tmp_path / "account.json")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    with pytest.raises(Unreachable, match="the server that renews the credentials does not answer"):
        locate("gs://b/x").read()
    for address, words in (
        ("127.0.0.1:1", "does not start with http://"),
        ("localhost:1", "does not start with http://"),
        ("http://127.0.0.1:1\n", "or contains a line break"),
        ("http://127.0.0.1:1", "nothing answers there"),
        ("http://no-such-host.invalid", "the name of the server is not known"),
    ):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        with pytest.raises(Unreachable, match=words):
            locate("gs://b/x").read()


def test_other_nodes_get_addresses_and_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"STORAGE_EMULATOR_HOST": "http://x:1", "GOOGLE_CLOUD_QUOTA_PROJECT": "payer"}
    for name, value in {**values, "GOOGLE_APPLICATION_CREDENTIALS": "/secret.json"}.items():
        monkeypatch.setenv(name, value)
    assert values.items() <= store_addresses().items()
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in store_addresses()


def test_without_credentials_a_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for status in (401, 403):
        answer_with(monkeypatch, refusal(status, "required"), access=gcs_client._NO_CREDENTIALS)
        with pytest.raises(Unreachable, match="no credentials were found, and the bucket is not"):
            locate("gs://b/x").stat()


def test_after_a_refusal_credentials_are_searched_for_again_but_not_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod may start before the server that gives it credentials."""
    clock = Clock()
    monkeypatch.setattr(gcs_client, "time", clock)
    found = list[Any]()
    searches = list[float]()

    def search(scopes: list[str]) -> tuple[Any, str]:
        searches.append(clock.now)
        if not found:
            raise DefaultCredentialsError("none")
        return found[0], ""

    def request(session: Any, *words: Any, **options: Any) -> requests.Response:
        response = requests.Response()
        response.status_code = 200 if session.credentials in found else 401
        response._content = json.dumps(ENTRY).encode()
        return response

    monkeypatch.setattr("google.auth.default", search)
    monkeypatch.setattr("google.auth.transport.requests.AuthorizedSession.request", request)
    gcs_client._forget_credentials()
    file = locate("gs://b/x")
    for seconds in (0, 10, 10, 11, 10):
        clock.sleep(seconds)
        with pytest.raises(Unreachable, match="no credentials were found"):
            file.stat()
    assert searches == [0, 31]
    found.append(SimpleNamespace())
    clock.sleep(30)
    assert file.stat() == file.stat() == stat_from_entry(ENTRY)
    assert searches == [0, 31, 71]
    gcs_client._forget_credentials()


def test_a_url_names_a_bucket() -> None:
    assert locate("gs://bucket/a/b/").path == "bucket/a/b"
    for url, words in (
        ("gs:///key", "does not name a bucket"),
        ("gs://b*/key", "does not name a bucket"),
        ("gs://Bucket/key", "names the bucket Bucket, but names of buckets have only lower-case"),
        ("gs://bucket/../key", "which is not a folder in a store"),
        ("gcs://bucket/key", "did you mean gs://bucket/key?"),
        ("GS://bucket/key", "did you mean gs://bucket/key?"),
    ):
        with pytest.raises(RecipeError, match=words):
            locate(url)


def test_the_command_for_other_nodes_gives_gcloud_the_right_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder that exists already gets the files too, and not a folder in it."""
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    gcloud.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gcloud.parent}:{os.environ['PATH']}")
    source: Location = locate("gs://bucket/the mix/tokenizer-0f3a9c21")
    folder = f"{tmp_path}/a folder/it's"
    for _ in range(2):
        words = subprocess.run(
            source.fetch_command(folder), check=True, capture_output=True, text=True
        ).stdout.splitlines()
        assert words == ["storage", "cp", "-r", f"{source.url}/*", f"{folder}/"]
        assert os.path.isdir(folder)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    assert source.fetch_command("copy") == ["mdsmix", "fetch", source.url, "copy"]
