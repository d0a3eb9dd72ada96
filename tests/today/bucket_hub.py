"""A server on the loopback that answers huggingface_hub and hf_xet as the Hugging Face hub does for
storage buckets.

Both parts of the hub are here, as far as clients use them for buckets: the API (trees, paths, the
batch of changes, the redirect to a file's bytes), and Xet, the store of contents (xorbs, which are
blocks of compressed chunks, and shards, which tell of which chunks a file consists). hf_xet, a
program in Rust, cuts and compresses what is uploaded; the server only puts files together again.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from struct import unpack, unpack_from
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pyarrow as pa

BUCKET = "org/name"
TOKEN = "hf_test"
_ENTRY = 48
"Bytes of each entry of a shard, and of its header."
_BOOKEND = b"\xff" * 32
"The hash after the last file of a shard."
_HAS_VERIFICATION = 1 << 31
_HAS_METADATA = 1 << 30
_FOOTER = b"XETBLOB"
_NONE, _LZ4, _GROUPED_LZ4 = range(3)
"How a chunk is compressed."
_API = re.compile(r"/api/buckets/([^/]+/[^/]+)(?:/(.*))?")
_RESOLVE = re.compile(r"/buckets/([^/]+/[^/]+)/resolve/(.*)")


class Segment(NamedTuple):
    """Some successive chunks of a xorb. A file consists of segments."""

    xorb: str
    size: int
    "Bytes when decompressed."
    start: int
    "The number of the first chunk in the xorb."
    end: int
    "The number after that of the last chunk."


class Chunk(NamedTuple):
    """A part of a xorb: where it begins and ends there, and its decompressed bytes."""

    start: int
    end: int
    content: bytes


@dataclass(frozen=True)
class Entry:
    """A file in a bucket."""

    xet_hash: str
    size: int
    uploaded: float = field(default_factory=time.time)


class Request(NamedTuple):
    """A request as the test sees it."""

    method: str
    path: str
    body: bytes


Fault = Callable[[Request], "int | None"]
"Returns the status with which a request is refused; None: it is answered."


class BucketHub(ThreadingHTTPServer):
    """The server, with its buckets and contents in memory."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.buckets: dict[str, dict[str, Entry]] = {BUCKET: {}}
        self.xorbs = dict[str, bytes]()
        self.files = dict[str, list[Segment]]()
        self.requests = list[Request]()
        self.ranges = list[str]()
        "The Range of each GET of a file's bytes."
        self.fault: Fault = lambda request: None
        self.broken = 0
        "So many times the connection breaks in the middle of a file's bytes."
        self.failing = set[str]()
        "Paths whose next change fails. The other changes of its batch are made."
        self.page = 1000
        "Entries of a page of a listing."
        self.sends_hash = True
        "Whether the redirect to a file's bytes names the file's hash."

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that was killed."""

    def read_chunks(self, xorb: str) -> list[Chunk]:
        """Return the chunks of a xorb."""
        data = self.xorbs[xorb]
        chunks = list[Chunk]()
        start = 0
        while start < len(data) and not data.startswith(_FOOTER, start):
            packed = int.from_bytes(data[start + 1 : start + 4], "little")
            size = int.from_bytes(data[start + 5 : start + 8], "little")
            end = start + 8 + packed
            content = _decompress(data[start + 4], data[start + 8 : end], size)
            assert len(content) == size
            chunks.append(Chunk(start, end, content))
            start = end
        return chunks

    def read_content(self, xet_hash: str) -> bytes:
        """Return the bytes of the file with this hash."""
        parts = list[bytes]()
        for segment in self.files.get(xet_hash, []):
            chunks = self.read_chunks(segment.xorb)[segment.start : segment.end]
            part = b"".join(chunk.content for chunk in chunks)
            assert len(part) == segment.size
            parts.append(part)
        return b"".join(parts)

    def add_shard(self, shard: bytes) -> None:
        """Keep the list of segments of each file in an uploaded shard."""
        position = _ENTRY
        while shard[position : position + 32] != _BOOKEND:
            xet_hash = _show_hash(shard[position : position + 32])
            flags, count = unpack_from("<II", shard, position + 32)
            position += _ENTRY
            segments = list[Segment]()
            for _ in range(count):
                xorb = _show_hash(shard[position : position + 32])
                _, size, start, end = unpack_from("<IIII", shard, position + 32)
                segments.append(Segment(xorb, size, start, end))
                position += _ENTRY
            if flags & _HAS_VERIFICATION:
                position += count * _ENTRY
            if flags & _HAS_METADATA:
                position += _ENTRY
            self.files[xet_hash] = segments


def _show_hash(raw: bytes) -> str:
    """Return a hash as the hub shows it: four little-endian numbers in hexadecimal digits."""
    return "".join(f"{number:016x}" for number in unpack("<4Q", raw))


def _decompress(scheme: int, packed: bytes, size: int) -> bytes:
    """Return the bytes of a chunk.

    Args:
        scheme: how the chunk is compressed.
        packed: its compressed bytes.
        size: how many bytes it has.
    """
    if scheme == _NONE:
        return packed
    plain = pa.Codec("lz4").decompress(packed, size).to_pybytes()
    if scheme == _LZ4:
        return plain
    # Every fourth byte of the chunk, from the first on, then from the second on, and so on.
    assert scheme == _GROUPED_LZ4
    ordered = bytearray(size)
    position = 0
    for group in range(4):
        length = len(range(group, size, 4))
        ordered[group::4] = plain[position : position + length]
        position += length
    return bytes(ordered)


class _Handler(BaseHTTPRequestHandler):
    server: BucketHub
    protocol_version = "HTTP/1.1"
    # An answer in two packets would wait 40 ms for the client to confirm the first.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        """Read the request, and send the answer of the API or of Xet."""
        url = urlsplit(self.path)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self._read_chunked())
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(url.path)
        request = Request(self.command, path, body)
        self.server.requests.append(request)
        status = self.server.fault(request)
        if status is not None:
            self._send(status, b'{"error": "a fault of the test"}')
        elif match := _API.fullmatch(path):
            self._answer_api(match[1], match[2] or "", parse_qs(url.query), body)
        elif match := _RESOLVE.fullmatch(path):
            self._redirect_to_content(match[1], match[2])
        elif path.startswith("/content/"):
            self.server.ranges.append(self.headers.get("Range", ""))
            self._send_range(self.server.read_content(path.removeprefix("/content/")))
        else:
            self._answer_xet(path, body)

    def _read_chunked(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    # The API of the hub

    def _answer_api(
        self, bucket: str, action: str, query: dict[str, list[str]], body: bytes
    ) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send_error(401, "Invalid username or password.")
        elif bucket not in self.server.buckets:
            self._send_error(404, "Bucket not found", "RepoNotFound")
        elif not action:
            details = {"private": False, "createdAt": _show_time(0), "size": 0, "totalFiles": 0}
            self._send_json({"id": bucket, **details})
        elif action.partition("/")[0] == "tree":
            self._send_tree(bucket, action.partition("/")[2], query)
        elif action == "paths-info":
            files = self.server.buckets[bucket]
            paths = json.loads(body)["paths"]
            self._send_json([_describe(path, files[path]) for path in paths if path in files])
        elif action == "batch":
            self._change(bucket, [json.loads(line) for line in body.splitlines()])
        elif action in ("xet-read-token", "xet-write-token"):
            expires = int(time.time()) + 3600
            access = {"casUrl": self.server.endpoint, "exp": expires, "accessToken": "xet"}
            headers = {
                "X-Xet-Cas-Url": self.server.endpoint,
                "X-Xet-Token-Expiration": str(expires),
                "X-Xet-Access-Token": "xet",
            }
            self._send(200, json.dumps(access).encode(), headers)
        else:
            self._send_error(404, f"no such action: {action}")

    def _send_tree(self, bucket: str, prefix: str, query: dict[str, list[str]]) -> None:
        """Send one page of the files whose paths begin with the prefix, which need not end at a
        slash. Unless the query says `recursive=false`, files in inner folders are included.
        """
        is_deep = query.get("recursive", ["true"])[0].lower() == "true"
        entries = dict[str, dict[str, Any]]()
        for path, entry in self.server.buckets[bucket].items():
            if not path.startswith(prefix):
                continue
            start = len(prefix) + 1 if path.startswith(f"{prefix}/") else len(prefix)
            slash = path.find("/", start) if prefix else path.find("/")
            if is_deep or slash < 0:
                entries[path] = _describe(path, entry)
            else:
                folder = path[:slash]
                entries[folder] = {"type": "directory", "path": folder}
        after = query.get("cursor", [""])[0]
        names = [name for name in sorted(entries) if name > after]
        headers = {}
        if len(names) > self.server.page:
            names = names[: self.server.page]
            place = f"{self.server.endpoint}/api/buckets/{bucket}/tree"
            place += f"/{quote(prefix, safe='')}" if prefix else ""
            options = f"recursive={str(is_deep).lower()}&cursor={quote(names[-1])}"
            headers["Link"] = f'<{place}?{options}>; rel="next"'
        self._send(200, json.dumps([entries[name] for name in names]).encode(), headers)

    def _change(self, bucket: str, changes: list[dict[str, Any]]) -> None:
        """Add, copy and delete files. A file whose bytes were not uploaded is not added."""
        files = self.server.buckets[bucket]
        failed = list[dict[str, str]]()
        for change in changes:
            path = change["path"]
            if path in self.server.failing:
                self.server.failing.remove(path)
                failed.append({"path": path, "error": "Internal error"})
            elif change["type"] == "deleteFile":
                if files.pop(path, None) is None:
                    failed.append({"path": path, "error": "File not found"})
            elif change["xetHash"] not in self.server.files:
                failed.append({"path": path, "error": "Unknown Xet hash"})
            else:
                xet_hash = change["xetHash"]
                size = sum(segment.size for segment in self.server.files[xet_hash])
                files[path] = Entry(xet_hash, size)
        report = {
            "success": not failed,
            "processed": len(changes),
            "succeeded": len(changes) - len(failed),
            "failed": failed,
        }
        status = 422 if len(failed) == len(changes) else 200
        self._send(status, json.dumps(report).encode())

    def _redirect_to_content(self, bucket: str, path: str) -> None:
        """Redirect to the bytes of the file as it is now."""
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send_error(401, "Invalid username or password.")
            return
        entry = self.server.buckets.get(bucket, {}).get(path)
        if entry is None:
            self._send_error(404, "Entry not found", "EntryNotFound")
            return
        # The bytes are on another host, as at the hub.
        host = self.server.endpoint.replace("127.0.0.1", "localhost")
        headers = {"Location": f"{host}/content/{entry.xet_hash}"}
        if self.server.sends_hash:
            token = f"{self.server.endpoint}/api/buckets/{bucket}/xet-read-token"
            headers["X-Xet-Hash"] = entry.xet_hash
            headers["X-Linked-Size"] = str(entry.size)
            headers["Link"] = f'<{token}>; rel="xet-auth"'
        self._send(302, b"", headers)

    # Xet

    def _answer_xet(self, path: str, body: bytes) -> None:
        if self.headers.get("Authorization") != "Bearer xet" and not path.startswith("/xorb/"):
            self._send_error(401, f"no token for {path}")
            return
        # hf_xet 1.4 posts shards without the version of the API.
        kind = path.removeprefix("/v1").split("/")[1]
        name = path.rpartition("/")[2]
        if path.startswith("/xorb/"):
            self._send_range(self.server.xorbs[name])
        elif kind == "xorbs" and self.command == "POST":
            is_new = name not in self.server.xorbs
            self.server.xorbs[name] = body
            self._send_json({"was_inserted": is_new})
        elif kind == "shards":
            self.server.add_shard(body)
            self._send_json({"result": 1})
        elif kind == "reconstructions" and name in self.server.files:
            self._send_reconstruction(self.server.files[name])
        elif kind == "telemetry":
            self._send_json({})
        else:  # also: no chunk is known from other uploads, and no version 2 of the API
            self._send_error(404, "not found")

    def _send_reconstruction(self, segments: list[Segment]) -> None:
        """Send where the chunks of a file lie, or of the range of the file that is requested."""
        first, last = self._read_range(sum(segment.size for segment in segments))
        terms = list[dict[str, Any]]()
        places = dict[str, list[dict[str, Any]]]()
        offset = 0
        position = 0  # of a chunk in the file
        for segment in segments:
            chunks = self.server.read_chunks(segment.xorb)
            numbers = list[int]()
            for number in range(segment.start, segment.end):
                end = position + len(chunks[number].content)
                if position <= last and end > first:
                    if not terms and not numbers:
                        offset = first - position
                    numbers.append(number)
                position = end
            if numbers:
                span = {"start": numbers[0], "end": numbers[-1] + 1}
                size = sum(len(chunks[number].content) for number in numbers)
                terms.append({"hash": segment.xorb, "unpacked_length": size, "range": span})
                url_range = {"start": chunks[numbers[0]].start, "end": chunks[numbers[-1]].end - 1}
                url = f"{self.server.endpoint}/xorb/{segment.xorb}"
                place = {"range": span, "url": url, "url_range": url_range}
                places.setdefault(segment.xorb, []).append(place)
        self._send_json({"offset_into_first_range": offset, "terms": terms, "fetch_info": places})

    # Answers

    def _read_range(self, size: int) -> tuple[int, int]:
        """Return the first and the last byte that the request asks for."""
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        return int(first or 0), min(int(last or size - 1), size - 1)

    def _send_range(self, content: bytes) -> None:
        """Send the bytes that the request asks for."""
        if not self.headers.get("Range"):
            self._send(200, content)
            return
        first, last = self._read_range(len(content))
        if first >= len(content):
            self._send(416, b"")
            return
        headers = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        self._send(206, content[first : last + 1], headers)

    def _send_json(self, tree: Any) -> None:
        self._send(200, json.dumps(tree).encode())

    def _send_error(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.broken and self.path.startswith("/content/"):
            self.server.broken -= 1
            self.close_connection = True
            body = body[: len(body) // 2]
        if self.command != "HEAD":
            self.wfile.write(body)


def _describe(path: str, entry: Entry) -> dict[str, Any]:
    """Return a file as the hub describes it."""
    uploaded = _show_time(entry.uploaded)
    times = {"mtime": uploaded, "uploadedAt": uploaded}
    return {"type": "file", "path": path, "size": entry.size, "xetHash": entry.xet_hash, **times}


def _show_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


@contextmanager
def run_hub() -> Iterator[BucketHub]:
    """Run a hub with one empty bucket until the block ends."""
    with BucketHub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
