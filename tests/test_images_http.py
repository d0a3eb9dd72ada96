"""Images from a server that is slow, answers 404, cuts off, sends too much, or sends something
else.
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
"""Seconds, much more than anything here takes on a busy machine, and less than a server that says
nothing or drips.
"""


class Server(ThreadingHTTPServer):
    """On the loopback. A request that nobody waits for any more is heard of all the same, on a busy
    machine later.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked, self.url = list[str](), f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Not on the terminal."""

    def was_asked(self, times: int) -> bool:
        """Whether it was asked so often, once all that came has been heard of."""
        while len(self.asked) < times:
            time.sleep(0.01)
        return len(self.asked) == times


class Answers(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """Does what the path says, and after so many times as it says sends the drawing."""
        self.server.asked.append(self.path)
        what, _, times = urlsplit(self.path).path.strip("/").partition("-")
        if times and self.server.asked.count(self.path) > int(times):
            what = "good"
        if what in SENT_ON:
            self.answer(302, Location=SENT_ON[what])
        elif what in STATUS:
            self.send_error(STATUS[what])
        else:
            getattr(self, what)()

    def answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def good(self, most: int = len(DRAWING)) -> None:
        self.answer(200, Content_Length=str(len(DRAWING)))
        self.wfile.write(DRAWING[:most])

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
        """With a page that has no end."""
        self.slow(404, 1e9)

    def silent(self) -> None:
        time.sleep(IN_TIME)

    def endless(self) -> None:
        self.answer(200)
        for _ in range(100):
            self.wfile.write(bytes(100_000))

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""


STATUS = {"missing": 404, "busy": 503}
SENT_ON = {
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
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.01)


def test_what_passes_is_asked_again() -> None:
    with serving() as server:
        for path in ("good", "elsewhere", "busy-1", "cut-2", "good?é x%20"):
            assert fetch_url(f"{server.url}/{path}") == DRAWING
    assert server.asked[-1] == "/good?%C3%A9%20x%20"


FAILS: list[tuple[str, str, str, dict[str, float], int]] = [
    # path, reason, how the detail begins, a limit, how often it is asked
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


def test_what_does_not_pass_is_a_bad_image_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadImage, match="Connection refused"):
        fetch_url("http://127.0.0.1:9/x")
    for path, reason, why, limit, asked in FAILS:
        with serving() as server, monkeypatch.context() as patch, fail_after(IN_TIME):
            for name, value in limit.items():
                patch.setattr(http, name, value)
            with pytest.raises(BadImage) as bad:
                fetch_url(f"{server.url}/{path}")
            assert (bad.value.reason, bad.value.why[: len(why)]) == (reason, why), path
            assert server.was_asked(asked), (path, server.asked)


def test_a_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as server:
        for proxy in (server.url, server.url.removeprefix("http://")):
            monkeypatch.setenv("http_proxy", proxy)
            for url in ("http://images.invalid/good", f"{server.url}/good"):
                assert fetch_url(url) == DRAWING
            assert server.asked[-2:] == ["http://images.invalid/good", "/good"]
