"""Files of a hub, asked of a server on the loopback that answers huggingface_hub's file system as
the hub does.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem, constants
from huggingface_hub.errors import OfflineModeIsEnabled

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.sources import find_files, plan_units, read_batches
from mdsmix.storage import hub as storage_hub
from mdsmix.storage import locate
from tests.formats import all_records

HOME = "hf://datasets/org/name"
REPLACED = "was changed while it was being read"


class Hub(ThreadingHTTPServer):
    """The data set org/name: its files at its newest commit, and the Range of each GET of
    a file.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files, self.ranges = dict[str, bytes](), list[str]()

    def entry(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}  # fmt: skip


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api, resolve = "/api/datasets/org/name", "/datasets/org/name/resolve/"
        if path.startswith(resolve):
            self.file(path.removeprefix(resolve).partition("/")[2])
        elif path.startswith(f"{api}/tree/"):
            start = path.removeprefix(f"{api}/tree/").partition("/")[2]
            self.say([self.server.entry(p) for p in self.server.files if p.startswith(start)])
        elif path == api or path.startswith(f"{api}/revision/"):
            commit = hashlib.sha1(repr(sorted(self.server.files.items())).encode()).hexdigest()
            rest = {"private": False, "downloads": 0, "likes": 0, "tags": []}
            self.say({"id": "org/name", "sha": commit, **rest})
        else:
            self.answer(404, b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        asked = (json.loads(body) if body.startswith("{") else parse_qs(body))["paths"]
        self.say([self.server.entry(path) for path in asked if path in self.server.files])

    def file(self, path: str) -> None:
        content, asked = self.server.files[path], self.headers.get("Range", "")
        self.server.ranges.append(asked)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        end = int(last) + 1 if last else len(content)
        self.answer(206 if asked else 200, content[int(first or 0) : end])

    def say(self, tree: Any) -> None:
        self.answer(200, json.dumps(tree).encode())

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with Hub() as served:
        threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True).start()
        url, fresh = f"http://127.0.0.1:{served.server_port}", {"use_listings_cache": False}
        files = HfFileSystem(endpoint=url, token=False, skip_instance_cache=True, **fresh)
        monkeypatch.setattr(storage_hub, "_file_system", lambda: files)
        yield served
        served.shutdown()


def texts(tmp_path: Path, name: str) -> list[str]:
    units = plan_units(find_files([f"{HOME}/{name}"], tmp_path), fields=("text",))
    return [
        record["text"] for record in all_records([b for unit in units for b in read_batches(unit)])
    ]


def test_files_are_found_by_patterns_and_read_in_order(tmp_path: Path, hub: Hub) -> None:
    one, two = b'{"text": "one"}\n', b'{"text": "two"}\n'
    hub.files = {"data/b.jsonl": two, "data/a.jsonl": one, "README.md": b"#"}
    assert texts(tmp_path, "data/*.jsonl") == ["one", "two"]
    assert texts(tmp_path, "data/b.jsonl") == ["two"]
    found = [file.name for file in find_files([f"{HOME}/**/*.jsonl"], tmp_path)]
    assert found == [f"{HOME}/data/{name}.jsonl" for name in "ab"]


def parquet(rows: int) -> bytes:
    forms = {"text": "text {}", "noise": "{:01000}"}
    columns = {name: [*map(form.format, range(rows))] for name, form in forms.items()}
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="none", row_group_size=100)
    return out.getvalue()


def test_of_a_file_that_is_replaced_no_other_bytes_are_read_and_of_a_parquet_only_ranges(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = {"a.parquet": parquet(1000), "a.jsonl": b"1\n"}
    assert texts(tmp_path, "a.parquet") == [f"text {n}" for n in range(1000)]
    assert hub.ranges
    assert all(asked.startswith("bytes=") for asked in hub.ranges)
    [unit] = plan_units(find_files([f"{HOME}/a.parquet"], tmp_path), fields=("text",))
    at = locate(f"{HOME}/a.jsonl")
    before = at.stat()
    assert at.fetch() == (before, b"1\n")
    hub.files = {"a.parquet": parquet(1001), "a.jsonl": b"22\n"}
    with pytest.raises(Unreachable, match=REPLACED):
        list(read_batches(unit))
    monkeypatch.setattr(type(at), "stat", lambda self: before)
    with pytest.raises(Unreachable, match=REPLACED):
        at.fetch()


def test_what_is_not_there_or_cannot_be_is_a_sentence(tmp_path: Path, hub: Hub) -> None:
    hub.files = {"a.jsonl": b"1\n"}
    with pytest.raises(RecipeError, match="matches no file"):
        find_files([f"{HOME}/none.jsonl"], tmp_path)
    for url in ("hf://org/name", HOME, "hf://models/org/name/a.jsonl"):
        with pytest.raises(RecipeError, match="does not name a file of a data set"):
            locate(url)
    with pytest.raises(Unreachable, match="cannot be written"):
        locate(f"{HOME}/a.jsonl").write(b"x")
    with pytest.raises(Unreachable, match="cannot be read from the hub"):
        locate("hf://datasets/org/other/a.jsonl").open()
    for error in (TimeoutError("(Request ID: 1)"), OfflineModeIsEnabled("Cannot reach the hub")):
        said = rf"the hub \({type(error).__name__}\): .*HF_ENDPOINT and HF_HUB_OFFLINE"
        with pytest.raises(Unreachable, match=said), storage_hub._explained("hf://a"):
            raise error
