"""A hub on the loopback that answers what huggingface_hub's file system asks of a data set: what there is, and ranges of it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Hub:
    """The data set org/name: its files at its newest commit, and what was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: list[tuple[str, str]] = field(default_factory=list)
    "Path and Range of each GET of a file."
    url: str = ""

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}  # fmt: skip

    def tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        start = f"{folder}/" if folder else ""
        inside = [path for path in sorted(self.files) if path.startswith(start)]
        if recursive:
            return [self.entry(path) for path in inside]
        below = {path[len(start) :].partition("/")[0]: path for path in inside}
        return [self.entry(path) if path == start + name else {"type": "directory", "path": start + name, "oid": "0"} for name, path in below.items()]  # fmt: skip


class _Answers(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        asked, path = parse_qs(parts.query), unquote(parts.path)
        api, resolve = "/api/datasets/org/name", "/datasets/org/name/resolve/"
        if path.startswith(resolve):
            self._file(path[len(resolve) :].partition("/")[2])
        elif path == api or path.startswith(f"{api}/revision/"):
            said = {"private": False, "downloads": 0, "likes": 0, "tags": []}
            self._json({"id": "org/name", "sha": self.hub.commit, **said})
        elif path.startswith(f"{api}/tree/"):
            folder = path[len(f"{api}/tree/") :].partition("/")[2]
            self._json(self.hub.tree(folder, asked.get("recursive") in (["True"], ["true"])))
        else:
            self._answer(404, b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        said = json.loads(body) if body.startswith("{") else parse_qs(body)
        self._json([self.hub.entry(path) for path in said["paths"] if path in self.hub.files])

    def do_HEAD(self) -> None:
        self.do_GET()

    def _file(self, path: str) -> None:
        if path not in self.hub.files:
            return self._answer(404, b"")
        content, asked = self.hub.files[path], self.headers.get("Range", "")
        self.hub.ranges.append((path, asked))
        first, _, last = asked.removeprefix("bytes=").partition("-")
        end = int(last) + 1 if last else len(content)
        return self._answer(206 if asked else 200, content[int(first or 0) : end])

    def _json(self, tree: Any) -> None:
        self._answer(200, json.dumps(tree).encode())

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
