"""Images from a server that is slow, answers 404, cuts off, sends too much, or sends something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from mdsmix.images import fetching as http
from mdsmix.images.fetching import fetch
from mdsmix.images.judge import Bad
from tests.alarm import at_most
from tests.pictures import drawing

DRAWING = drawing()


class Server(ThreadingHTTPServer):
    """On the loopback. A request that nobody waits for any more is heard of all the same, on a busy machine later."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked = list[str]()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Not on the terminal."""

    def was_asked(self, times: int) -> bool:
        """Whether it was asked so often, once all that came has been heard of."""
        with at_most(IN_TIME):
            while len(self.asked) < times:
                time.sleep(0.01)
        return len(self.asked) == times


class Answers(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        what, _, times = urlsplit(self.path).path.strip("/").partition("-")
        if times and self.server.asked.count(self.path) > int(times):
            what = "good"
        getattr(self, what)()

    def good(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(DRAWING)))
        self.end_headers()
        self.wfile.write(DRAWING)

    def missing(self) -> None:
        self.send_error(404)

    def busy(self) -> None:
        self.send_error(503)

    def cut(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(DRAWING)))
        self.end_headers()
        self.wfile.write(DRAWING[:100])
        self.close_connection = True

    def slow(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(20 * IN_TIME):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.05)

    def silent(self) -> None:
        time.sleep(IN_TIME)

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(100):
            self.wfile.write(bytes(100_000))

    def refuses(self) -> None:
        """With a page that has no end."""
        self.send_response(404)
        self.end_headers()
        while True:
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.05)

    def disk(self) -> None:
        self.send_response(302)
        self.send_header("Location", "file:///etc/passwd")
        self.end_headers()

    def elsewhere(self) -> None:
        self.send_response(302)
        self.send_header("Location", "/good")
        self.end_headers()

    def nowhere(self) -> None:
        self.send_response(302)
        self.send_header("Location", "http://[nowhere/x.jpg")
        self.end_headers()

    def circle(self) -> None:
        self.send_response(302)
        self.send_header("Location", "/circle")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


IN_TIME = 60
"Seconds, much more than anything here takes on a busy machine, and less than a server that says nothing or drips."


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.01)


@pytest.mark.parametrize("path", ["good", "elsewhere", "busy-1", "cut-2"])
def test_what_passes_is_asked_again(server: Server, path: str) -> None:
    assert fetch(f"{server.url}/{path}") == DRAWING


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing", "image_not_found"),
        ("busy", "image_not_fetched"),
        ("cut", "image_not_fetched"),
        ("silent", "image_not_fetched"),
        ("refuses", "image_not_found"),
        ("disk", "image_not_found"),
        ("circle", "image_not_fetched"),
    ],
)
def test_what_does_not_pass_is_a_bad_image(
    server: Server, path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "silent":
        monkeypatch.setattr(http, "QUIET_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(Bad) as bad:
        fetch(f"{server.url}/{path}")
    assert bad.value.reason == reason
    assert time.monotonic() - began < IN_TIME
    tries = http.TRIES if reason == "image_not_fetched" else 1
    sent_on = http.REDIRECTS + 1 if path == "circle" else 1
    assert server.was_asked(tries * sent_on), server.asked


def test_a_server_that_drips_is_given_up_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "SECONDS", 0.4)
    began = time.monotonic()
    with pytest.raises(Bad) as bad:
        fetch(f"{server.url}/slow")
    assert bad.value.reason == "image_not_fetched"
    assert time.monotonic() - began < IN_TIME


def test_more_than_an_image_may_have_is_not_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HTTP_BYTES", 1_000_000)
    with pytest.raises(Bad) as bad:
        fetch(f"{server.url}/endless")
    assert bad.value.reason == "image_file_too_large"


def test_a_port_where_nobody_listens_is_a_bad_image() -> None:
    with pytest.raises(Bad) as bad:
        fetch("http://127.0.0.1:9/x.jpg")
    assert bad.value.reason == "image_not_fetched"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:9/x", "[Errno 111] Connection refused"),
        ("/circle", "too many redirects"),
        ("/nowhere", "Invalid IPv6 URL"),
        ("/cut-9", "IncompleteRead(100 bytes read"),
    ],
)
def test_why_nothing_came_is_said_without_pools_and_retries(
    server: Server, url: str, why: str
) -> None:
    with pytest.raises(Bad) as bad:
        fetch(url if "//" in url else server.url + url)
    assert bad.value.why.startswith(why)


def test_a_proxy_of_the_environment_is_asked_but_for_what_it_excepts(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert fetch("http://images.invalid/good") == DRAWING
    assert fetch(f"{server.url}/good") == DRAWING
    assert server.asked == ["http://images.invalid/good", "/good"]


@pytest.mark.parametrize(
    ("proxy", "headers"),
    [
        ("proxy:3128", {}),
        ("http://me:p%40ss@proxy:3128", {"proxy-authorization": "Basic bWU6cEBzcw=="}),
    ],
)
def test_a_proxy_may_be_named_without_its_scheme_and_with_a_password(
    proxy: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    found = http._pool(http._proxy("http://images.invalid/good"))
    assert (found.proxy.host, found.proxy.port, found.proxy_headers) == ("proxy", 3128, headers)
