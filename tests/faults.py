"""A store that fails: an HTTP proxy on loopback before a real MinIO or fake-gcs-server. Rules
choose which requests fail, and how.

It reads whole requests and whole answers, so it can do what a network does: lose an answer after
the store did the work, break a body in the middle, damage a byte, be silent. Every request is
recorded with its fault, so that a test can check that its fault happened at all.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO
from urllib.parse import parse_qsl, quote, unquote

from mdsmix.storage.conditions_trial import WRITERS
from tests.alarm import WAIT_SECONDS

GOOGLE = re.compile(r"/(?:upload/)?storage/v1/b/([^/?]+)/o(?:/.*/rewriteTo/b/([^/?]+)/o)?/?([^?]*)")
"Path of a request to Google Cloud Storage -> bucket; of a copy, the target's bucket; object."
JSON = (
    '{{"error": {{"code": {}, "message": "a fault of the tests", "errors": [{{"reason": "{}"}}]}}}}'
)
XML = (
    "<?xml version='1.0' encoding='UTF-8'?>"
    "<Error><Code>{}</Code><Message>a fault of the tests</Message></Error>"
)


class Broken(Exception):
    """The connection has to be closed."""


@dataclass(slots=True)
class Request:
    """One request as it arrived, and its fault."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    fault: str = ""
    status: int = 0
    "The store's answer; 0 if it was not asked, or did not answer."
    began: int = field(default_factory=time.monotonic_ns)
    ended: int = 0

    @property
    def google(self) -> re.Match[str] | None:
        """The match of GOOGLE, if it is a request to Google Cloud Storage."""
        return GOOGLE.match(self.path)

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the URL."""
        return dict(parse_qsl(self.path.partition("?")[2], keep_blank_values=True))

    @property
    def operation(self) -> str:
        """GET, PUT, ..., or `GET list`. A write of any store is a PUT."""
        if (
            "list-type=" in self.path
            or "comp=list" in self.path
            or (self.google and self.method == "GET" and not self.google[3])
        ):
            return "GET list"
        return "PUT" if self.google and self.method == "POST" else self.method

    @property
    def key(self) -> str:
        """Bucket and key."""
        if self.google:
            bucket, target_bucket, key = self.google.groups()
            return f"/{target_bucket or bucket}/{unquote(key) or self.query.get('name', '')}"
        return unquote(self.path.partition("?")[0])

    @property
    def conditions(self) -> set[str]:
        """The names of its conditions."""
        names = self.query if self.google else self.headers
        return CONDITIONS & set(names)


@dataclass(slots=True)
class Rule:
    """Which requests fail: `times` of an operation at a key, after the first `skip`."""

    fault: str
    operation: str = ".*"
    key: str = ""
    times: int = 1
    skip: int = 0
    when: Callable[[Request], bool] = lambda request: True
    then: Callable[[], object] = lambda: None
    "Called before the fault."

    def take(self, request: Request) -> bool:
        """Return whether this request fails, and count it."""
        is_meant = re.fullmatch(self.operation, request.operation) and self.when(request)
        if not is_meant or not re.search(self.key, request.key):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times <= 0:
            return False
        self.times -= 1
        return True


class Proxy:
    """Listens on a loopback port of its own; `rules` may be changed at any time."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._store = host, int(port)
        self.rules: list[Rule] = []
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._looks: dict[str, threading.Barrier] = {}
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def met(self, fault: str = "") -> list[Request]:
        """Return the requests with this fault, or with any."""
        with self._lock:
            return [r for r in self.requests if r.fault and fault in (r.fault, "")]

    def close(self) -> None:
        self._ended.set()
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as stream, contextlib.suppress(OSError, Broken):
            while (request := _read_head(stream)) is not None:
                self._exchange(client, stream, request)

    def _exchange(self, client: socket.socket, stream: BinaryIO, request: Request) -> None:
        fault, then = self._fault(request)
        size = int(request.headers.get("content-length", 0))
        if request.headers.get("expect", "").lower() == "100-continue":
            # boto3 waits for the permission to send a body
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault == "reset in the request":
            stream.read(size // 2)
            _reset(client)
        while fault == "slow" and len(request.body) < size - (1 << 20):
            request.body += stream.read(1 << 20)
            time.sleep(0.05)
        request.body += stream.read(size - len(request.body))
        then()
        self._answer(client, request, fault)

    def _fault(self, request: Request) -> tuple[str, Callable[[], object]]:
        with self._lock:
            rule = next((rule for rule in self.rules if rule.take(request)), None)
            request.fault = rule.fault if rule else ""
            self.requests.append(request)
        return request.fault, rule.then if rule else lambda: None

    def _answer(self, client: socket.socket, request: Request, fault: str) -> None:
        if fault == "reset":
            _reset(client)
        if fault == "silence":
            self._ended.wait(WAIT_SECONDS)
            raise Broken
        if fault == "a login page":
            return _send(client, request, 200, b"<html><p>Please log in", "text/html")
        if fault == "another answer":
            return _send(client, request, 200, b'{"kind": "another"}', "application/json")
        status = re.fullmatch(r"(\d{3}) ?(\w*)", fault)
        if status:
            code = status[2] or CODES.get(status[1], "")
            return _refuse(client, request, int(status[1]), code)
        if fault == "a 404 in broken XML":
            broken = "<Error><Code>NoSuchKey</Code><Key>ü".encode("latin-1")
            return _send(client, request, 404, broken)
        if fault in (IGNORES, RACES) and request.conditions:
            if fault == RACES and not self._condition_holds(request):
                return _refuse(client, request, 412, "PreconditionFailed")
            request = _drop_conditions(request)
        if fault == "damaged" and request.body:
            request.body = _damage(request)
        head, body = self._forward(request)
        if fault == "lost answer":
            _reset(client)
        if fault == "500 after the work":
            return _refuse(client, request, 500, "InternalError")
        if fault == "no time":
            head = re.sub(rb"(?i)last-modified: [^\r]*\r\n", b"", head)
        if fault == "no ETags":
            body = re.sub(rb"<ETag>.*?</ETag>", b"", body)
            head = re.sub(rb"content-length: \d+", b"content-length: %d" % len(body), head)
        if fault == "damaged answer" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        return _reply(client, head, body, fault)

    def _condition_holds(self, request: Request) -> bool:
        """Return whether the request's condition holds now; at the time of the write it may not."""
        if request.google:
            path = f"/storage/v1/b/{request.google[1]}/o/{quote(request.query['name'], safe='')}"
            head, _ = self._forward(Request("HEAD", path, {"host": request.headers["host"]}))
            wanted = request.query["ifGenerationMatch"]
        else:
            head, _ = self._forward(_sign_without_conditions(request, "HEAD", b""))
            wanted = request.headers.get("if-match", "").strip('"')
        if "-trial-" in request.key:  # all writers of a trial look before the first one writes
            with self._lock:
                looks = self._looks.setdefault(request.key, threading.Barrier(WRITERS))
            looks.wait(WAIT_SECONDS)
        else:
            time.sleep(0.1)
        if wanted in ("", "0"):
            return head.startswith(b"HTTP/1.1 404")
        return wanted.encode() in head

    def _forward(self, request: Request) -> tuple[bytes, bytes]:
        connection = http.client.HTTPConnection(*self._store, timeout=WAIT_SECONDS)
        no_own_headers = {"skip_host": True, "skip_accept_encoding": True}
        try:
            connection.putrequest(request.method, request.path, **no_own_headers)
            for name, value in request.headers.items():
                if name not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(request.body)
            answer = connection.getresponse()
            body = answer.read()
            request.status = answer.status
            request.ended = time.monotonic_ns()
        except (OSError, http.client.HTTPException):
            raise Broken from None
        finally:
            connection.close()
        dropped = ("connection", "transfer-encoding", "content-length")
        lines = [f"{k}: {v}" for k, v in answer.getheaders() if k.lower() not in dropped]
        size = answer.getheader("content-length") if request.method == "HEAD" else str(len(body))
        if answer.status not in (204, 304) and size:
            lines.append(f"content-length: {size}")
        return _head(answer.status, lines), body


CODES = {"500": "InternalError", "503": "SlowDown", "400": "InvalidRequest"}
IGNORES = "ignores conditions"
"As Garage and s3rver do: every PUT is answered with 200."
RACES = "looks first, then writes"
"As S3Mock and s3s-fs do: two writers at one moment both succeed."
CONDITIONS = {"if-match", "if-none-match", "ifGenerationMatch"}


def _drop_conditions(request: Request) -> Request:
    """Return the request without its conditions."""
    if not request.google:
        return _sign_without_conditions(request, request.method, request.body)
    path = re.sub(r"&?ifGenerationMatch=\d+", "", request.path)
    return Request(request.method, path, request.headers, request.body)


def _damage(request: Request) -> bytes:
    """Return the request's body with another byte in the object's content: the first, and in the
    two parts of a request to Google Cloud Storage the last.
    """
    place = request.body.rindex(b"\r\n--") - 1 if request.google else 0
    body = bytearray(request.body)
    body[place] ^= 1
    return bytes(body)


def _sign_without_conditions(request: Request, method: str, body: bytes) -> Request:
    """Return the request without its conditions, signed again, since the signature covers them."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    names = ("host", "content-type", "content-length") if body else ("host",)
    headers = {name: value for name, value in request.headers.items() if name in names}
    unsigned = AWSRequest(method, f"http://{headers['host']}{request.path}", headers, body)
    credentials = Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    S3SigV4Auth(credentials, "s3", os.environ["AWS_DEFAULT_REGION"]).add_auth(unsigned)
    signed = {name.lower(): value for name, value in unsigned.headers.items()}
    return Request(method, request.path, signed, body)


def make_failing_proxy(endpoint: str) -> contextlib.closing[Proxy]:
    """Return a proxy before this endpoint, which is closed with the block."""
    return contextlib.closing(Proxy(endpoint))


def _read_head(stream: BinaryIO) -> Request | None:
    first = stream.readline().decode("latin-1").split()
    if len(first) != 3:
        return None
    headers = {}
    while line := stream.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    assert "transfer-encoding" not in headers, "the proxy knows only bodies of a known length"
    return Request(first[0], first[1], headers)


def _refuse(client: socket.socket, request: Request, status: int, code: str) -> None:
    if request.google:
        _send(client, request, status, JSON.format(status, code).encode(), "application/json")
    else:
        _send(client, request, status, XML.format(code).encode() if code else b"")


def _send(
    client: socket.socket, request: Request, status: int, body: bytes, kind: str = "application/xml"
) -> None:
    """Send an answer instead of the store's; to a HEAD only its headers."""
    body = b"" if request.method == "HEAD" else body
    client.sendall(_head(status, [f"content-type: {kind}", f"content-length: {len(body)}"]) + body)


def _reply(client: socket.socket, head: bytes, body: bytes, fault: str) -> None:
    half = len(body) // 2
    if fault == "reset in the answer":
        client.sendall(head + body[:half])
        time.sleep(0.01)  # a reset overtakes bytes that were not read yet
        _reset(client)
    if fault == "cut short":
        client.sendall(head + body[:half])
        raise Broken
    client.sendall(head + body)


def _head(status: int, lines: list[str]) -> bytes:
    reason = http.client.responses.get(status, "")
    return "\r\n".join([f"HTTP/1.1 {status} {reason}", *lines, "", ""]).encode("latin-1")


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise Broken
