"""Images from a server that is slow, answers 404, closes the connection early, sends too much, or
sends something else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from mdsmix.images import fetching as http
from mdsmix.images.fetching import fetch_url
from mdsmix.images.judge import BadImage
from tests.alarm import fail_after
from tests.pictures import drawing

DRAWING = drawing()
IN_TIME = 60
"""Seconds: much more than anything here takes on a busy machine, and less than the tests' silent or
slow server takes.
"""


class Server(ThreadingHTTPServer):
    """A server on the loopback that records its requests. A request whose client has given up may
    be recorded later on a busy machine.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.requested, self.url = list[str](), f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Print nothing."""

    def was_requested(self, times: int) -> bool:
        """Wait for as many requests, and check that there were no more."""
        while len(self.requested) < times:
            time.sleep(0.01)
        return len(self.requested) == times


class Answers(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """Answer as the path says: `busy-1` is busy once and then sends the drawing."""
        self.server.requested.append(self.path)
        answer, _, times = urlsplit(self.path).path.strip("/").partition("-")
        if times and self.server.requested.count(self.path) > int(times):
            answer = "good"
        if answer in REDIRECTS:
            self.answer(302, Location=REDIRECTS[answer])
        elif answer in STATUSES:
            self.send_error(STATUSES[answer])
        else:
            getattr(self, answer)()

    def answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def good(self, length: int = len(DRAWING)) -> None:
        self.answer(200, Content_Length=str(len(DRAWING)))
        self.wfile.write(DRAWING[:length])

    def cut(self) -> None:
        self.good(100)
        self.close_connection = True

    def slow(self, status: int = 200, seconds: float = IN_TIME) -> None:
        self.answer(status)
        for _ in range(int(20 * seconds)):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.05)

    def refuses(self) -> None:
        """Answer 404 with a page that has no end."""
        self.slow(404, 1e9)

    def silent(self) -> None:
        time.sleep(IN_TIME)

    def endless(self) -> None:
        self.answer(200)
        for _ in range(100):
            self.wfile.write(bytes(100_000))

    def log_message(self, *_: object) -> None:
        """Print nothing."""


STATUSES = {"missing": 404, "busy": 503}
REDIRECTS = {
    "disk": "file:///etc/passwd",
    "elsewhere": "/good",
    "nowhere": "http://[nowhere/x.jpg",
    "circle": "/circle",
}


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.01)


def test_a_failure_that_may_pass_is_requested_again() -> None:
    with serving() as server:
        for path in ("good", "elsewhere", "busy-1", "cut-2", "good?é x%20"):
            assert fetch_url(f"{server.url}/{path}") == DRAWING
    assert server.requested[-1] == "/good?%C3%A9%20x%20"


FAILS: list[tuple[str, str, str, dict[str, float], int]] = [
    # path, reason, beginning of the detail, a limit, number of requests
    ("missing", "image_not_found", "the server answers 404", {}, 1),
    ("busy", "image_not_fetched", "the server answers 503", {}, http.TRIES),
    ("cut", "image_not_fetched", "IncompleteRead(100 bytes read", {}, http.TRIES),
    ("silent", "image_not_fetched", "", {"QUIET_SECONDS": 0.1}, http.TRIES),
    ("refuses", "image_not_found", "the server answers 404", {}, 1),
    ("disk", "image_not_found", "", {}, 1),
    ("nowhere", "image_not_found", "Invalid IPv6 URL", {}, 1),
    ("circle", "image_not_found", "the server answers 302", {}, 5),
    ("slow", "image_not_fetched", "", {"SECONDS": 0.2}, 1),
    ("endless", "image_file_too_large", "", {"HTTP_BYTES": 1_000_000}, 1),
]


def test_a_lasting_failure_is_a_bad_image_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadImage, match="Connection refused"):
        fetch_url("http://127.0.0.1:9/x")
    for path, reason, why, limit, requests in FAILS:
        with serving() as server, monkeypatch.context() as patch, fail_after(IN_TIME):
            for name, value in limit.items():
                patch.setattr(http, name, value)
            with pytest.raises(BadImage) as bad:
                fetch_url(f"{server.url}/{path}")
            assert (bad.value.reason, bad.value.why[: len(why)]) == (reason, why), path
            assert server.was_requested(requests), (path, server.requested)


def test_images_are_requested_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as server:
        for proxy in (server.url, server.url.removeprefix("http://")):
            monkeypatch.setenv("http_proxy", proxy)
            for url in ("http://images.invalid/good", f"{server.url}/good"):
                assert fetch_url(url) == DRAWING
            assert server.requested[-2:] == ["http://images.invalid/good", "/good"]
