"""Requests to Google Cloud Storage: its JSON API, through google-auth's session of requests.

google-cloud-storage, which Streaming reads with, brings google-auth, requests and the checksum. Its
own objects are not used: they retry by rules of their own, keep 10 connections for 16 threads, and
stream no body that could be continued where it broke.

Importing these packages takes 0.2 s, so they are imported only at the first request.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import re
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from mdsmix.storage.fork_locks import client_lock
from mdsmix.storage.gcs_errors import (
    ANONYMOUS,
    DAMAGED,
    EMULATOR_VARIABLE,
    NO_BUCKET,
    GoogleErrors,
    NotOfGoogle,
    Refused,
    read_endpoint,
)
from mdsmix.storage.location import Bytes, Stat
from mdsmix.storage.object_reader import make_parts_reader
from mdsmix.storage.retries import Connection, retry

T = TypeVar("T")
Answer = dict[str, Any]
"What the store answers, from JSON."
Parameters = Mapping[str, str]
"The parameters of a request's URL, such as `ifGenerationMatch`."

_CONNECT_SECONDS = 5
_READ_SECONDS = 30
_CONNECTIONS = 32
"""Connections that a process keeps open, for two pools of 16 threads. With the 10 of requests,
1,600 small reads in batches of 16 (`map_in_batches`) made 580 connections; with 32 they made 16.
"""
_NO_CREDENTIALS = "no credentials, so only public buckets can be read"
_FOR_EMULATOR = "no credentials, since it is an emulator"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_ENDPOINT = "https://storage.googleapis.com"
_SETTINGS = ("STORAGE_EMULATOR_", "API_ENDPOINT_", "GOOGLE_", "CLOUDSDK_", "NO_GCE_CHECK")
"Beginnings of the environment variables that set the session's options."
FIELDS = "name,size,generation,timeCreated"
"The fields of an object that are asked for."

_SEARCH_SECONDS = 30
"After so many seconds without credentials, they are searched for again."

_searched_at = -math.inf
"When the last search for credentials ended without any; -inf: none has, or some were found since."


class Session(NamedTuple):
    """A connection to the store, with credentials."""

    http: Any
    "google-auth's AuthorizedSession."
    endpoint: str
    "The beginning of each URL: `https://storage.googleapis.com`."
    access: str
    "The credentials in words: `credentials of a user`, or one of the two sentences above."

    def send(
        self,
        method: str,
        path: str,
        parameters: Parameters | None = None,
        headers: Mapping[str, str] | None = None,
        body: Sequence[Bytes] | None = None,
        is_streamed: bool = False,
    ) -> Any:
        """Send a request and return the answer, as requests gives it. Raises Refused if the store
        answers with an error.

        Args:
            path: the path after the endpoint: `/storage/v1/b/bucket/o`.
            body: parts of bytes, one after the other; None: no body.
            is_streamed: whether the caller reads the answer's body, and closes the answer.
        """
        # Bytes would be sent by one call of the socket, all of them within _CONNECT_SECONDS: 64 MiB
        # at 13 MB/s or more. A file is sent in parts of 16 KiB, each with that time.
        file = None if body is None else make_parts_reader(body)
        answer = self.http.request(
            method,
            self.endpoint + path,
            params=parameters,
            headers=headers,
            data=file,
            stream=is_streamed,
            timeout=(_CONNECT_SECONDS, _READ_SECONDS),
        )
        if answer.status_code < 400:
            return answer
        with answer:
            reason = _find_reason(answer.status_code, answer.content)
            if answer.status_code in (401, 403) and self.access == _NO_CREDENTIALS:
                reason = ANONYMOUS
            raise Refused(answer.status_code, reason)

    def ask(
        self,
        method: str,
        path: str,
        parameters: Parameters | None = None,
        headers: Mapping[str, str] | None = None,
        body: Sequence[Bytes] | None = None,
    ) -> Answer:
        """Send a request, and return the object of the answer's JSON. Raises Refused if the store
        answers with an error.
        """
        answer = self.send(method, path, parameters, headers, body).json()
        if not isinstance(answer, dict):
            raise NotOfGoogle
        return answer


def ask_google(url: str, request: Callable[[Session], T]) -> T:
    """Send a request to the store, and return its result. Temporary failures are retried.

    Args:
        url: what error messages name.
        request: called at each try with a session; returns the result.

    Raises Unreachable if the request fails for good.
    """

    def connect() -> Connection:
        session = open_session(url)
        return Connection(session, session.endpoint)

    return retry(url, _ERRORS, connect, request)


def get_unless_refused(status: int, request: Callable[[], T]) -> T | None:
    """Return the result of a request; None if the store refuses it with this HTTP status."""
    try:
        return request()
    except Refused as error:
        if error.status == status:
            return None
        raise


def refuse_missing_bucket(request: Callable[[], T]) -> T:
    """Return the result of a request for which no object can be missing. Raises Refused with a
    reason that names the bucket if the answer is 404.
    """
    try:
        return request()
    except Refused as error:
        if error.status == 404:
            raise Refused(404, NO_BUCKET) from None
        raise


def make_object_path(bucket: str, key: str) -> str:
    """Return the path of an object's URL: `/storage/v1/b/bucket/o/a%2Fb`."""
    return f"{make_objects_path(bucket)}/{quote(key, safe='')}"


def make_objects_path(bucket: str) -> str:
    """Return the path of the URL of a bucket's objects: `/storage/v1/b/bucket/o`."""
    return f"/storage/v1/b/{quote(bucket, safe='')}/o"


def stat_from_entry(entry: Answer) -> Stat:
    """Return the Stat of an object, whose stamp is the object's generation.

    Raises NotOfGoogle if one of the fields is missing or has another form.

    Args:
        entry: the object, as the store describes it.
    """
    try:
        # 2026-11-29T18:40:00.5Z; the fraction may be missing, or have nanoseconds.
        text = re.sub(r"(\.\d{6})\d+", r"\1", entry["timeCreated"])
        form = "%Y-%m-%dT%H:%M:%S.%f%z" if "." in text else "%Y-%m-%dT%H:%M:%S%z"
        modified = datetime.strptime(text, form).timestamp()
        return Stat(int(entry["size"]), str(int(entry["generation"])), modified)
    except (LookupError, ValueError, TypeError):
        raise NotOfGoogle from None


def put(
    session: Session,
    bucket: str,
    key: str,
    parts: Sequence[Bytes],
    generation: str | None = None,
) -> Stat:
    """Write an object by one request, and return its Stat. The store compares the bytes with their
    CRC32C. Raises Refused with the status 412 if the condition does not hold.

    Args:
        parts: the content, one part after the other.
        generation: the generation that the object must have; "0": there must be no object; None:
            any.
    """
    boundary = secrets.token_hex(16)
    entry = json.dumps({"crc32c": _encode_crc32c(parts)}).encode()
    head = (
        f"--{boundary}\r\ncontent-type: application/json\r\n\r\n".encode()
        + entry
        + f"\r\n--{boundary}\r\ncontent-type: application/octet-stream\r\n\r\n".encode()
    )
    body = (head, *parts, f"\r\n--{boundary}--\r\n".encode())
    parameters = {"uploadType": "multipart", "name": key, "fields": FIELDS}
    if generation is not None:
        parameters["ifGenerationMatch"] = generation
    headers = {"content-type": f"multipart/related; boundary={boundary}"}
    path = f"/upload{make_objects_path(bucket)}"
    return stat_from_entry(
        refuse_missing_bucket(lambda: session.ask("POST", path, parameters, headers, body))
    )


def _encode_crc32c(parts: Sequence[Bytes]) -> str:
    """Return the CRC32C of the joined parts as the store writes it: 4 bytes in base 64."""
    import google_crc32c

    checksum = google_crc32c.Checksum()
    for piece in parts:
        checksum.update(bytes(piece))
    return base64.b64encode(checksum.digest()).decode()


def _find_reason(status: int, body: bytes) -> str:
    """Return the reason in an error's JSON, such as `rateLimitExceeded`; "" if it has none.

    Two faults have the same reason (`invalid`), and are recognized by their messages.
    """
    try:
        error = json.loads(body)["error"]
        message = str(error.get("message", ""))
        reason = str(error["errors"][0]["reason"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    if status == 400 and "CRC32C" in message:
        return DAMAGED
    if status == 400 and "requester pays" in message:
        return "userProjectMissing"
    return reason


def open_session(url: str) -> Session:
    """Return this process's session for requests to Google Cloud Storage. It has the credentials of
    the environment, and keeps connections open.

    Args:
        url: the location that is read or written, for the error message.

    Raises Unreachable if no session can be made.
    """
    # A new session is made if one of the variables that set its options has changed.
    settings = [(name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS)]
    settings.sort()
    try:
        with client_lock:  # otherwise each of 16 threads would make a session
            return _make_session(os.getpid(), tuple(settings))
    except _ERRORS.classes() as error:
        raise _ERRORS.make_refusal(url, error) from None


@lru_cache(maxsize=8)
def _make_session(pid: int, settings: tuple[tuple[str, str], ...]) -> Session:
    """Return a session, cached by process and settings.

    Args:
        pid: the process: a forked process must not share the sockets of its parent's session.
        settings: (name, value) of the environment variables that set the session's options.
    """
    from google.auth.transport.requests import AuthorizedSession
    from requests.adapters import HTTPAdapter

    credentials, access = _find_credentials(settings)
    # After the status 401 `retry` makes a new session. google-auth's own second try would send a
    # file that was read to its end, and fails without credentials.
    http = AuthorizedSession(credentials, refresh_status_codes=[])
    adapter = HTTPAdapter(pool_maxsize=_CONNECTIONS)
    http.mount("https://", adapter)
    http.mount("http://", adapter)
    return Session(http, read_endpoint() or _ENDPOINT, access)


@lru_cache(maxsize=8)
def _find_credentials(settings: tuple[tuple[str, str], ...]) -> tuple[Any, str]:
    """Return (credentials of google-auth, `Session.access`). An emulator is sent none. Forked
    workers use those of their parent, with its token.

    Args:
        settings: (name, value) of the environment variables that decide which are found.

    Raises DefaultCredentialsError if credentials were found that cannot be used.
    """
    global _searched_at
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError

    if os.environ.get(EMULATOR_VARIABLE):
        return AnonymousCredentials(), _FOR_EMULATOR
    # google-auth warns that a login has no quota project, and that there is no metadata server. If
    # a request fails for that, the sentence on it says so.
    logger = logging.getLogger("google.auth")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            credentials, _ = google.auth.default(scopes=[_SCOPE])
    except DefaultCredentialsError:
        if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            raise
        _searched_at = time.monotonic()
        return AnonymousCredentials(), _NO_CREDENTIALS
    finally:
        logger.setLevel(level)
    _searched_at = -math.inf
    kinds = {
        "google.oauth2.service_account": "a service account",
        "google.oauth2.credentials": "a user",
        "google.auth.compute_engine.credentials": "this machine",
    }
    name = type(credentials).__module__
    return credentials, f"credentials of {kinds.get(name, name.rpartition('.')[2])}"


def _forget_credentials() -> None:
    """Let the next request read the credentials again."""
    _find_credentials.cache_clear()
    _make_session.cache_clear()


class _SessionErrors(GoogleErrors):
    """The errors of requests of this process, which may have found no credentials."""

    def has_expired(self, error: Exception) -> bool:
        """Return whether the request may succeed after the credentials were read again: they have
        expired, or the last search found none. A pod may start before the server that gives it
        credentials.
        """
        if isinstance(error, Refused) and error.reason == ANONYMOUS:
            return time.monotonic() - _searched_at >= _SEARCH_SECONDS
        return super().has_expired(error)


_ERRORS = _SessionErrors(renew=_forget_credentials)
