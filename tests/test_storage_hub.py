"""Files of a hub. A server on the loopback answers huggingface_hub's file system as the hub
does.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi, HfFileSystem, constants
from huggingface_hub.errors import OfflineModeIsEnabled

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.sources import find_files, plan_units, read_batches
from mdsmix.storage import hub as storage_hub
from mdsmix.storage import hub_buckets, hub_errors, locate, retries
from mdsmix.storage.hub_errors import hide_retry_lines
from mdsmix.storage.notices import redirect_notices
from tests.formats import all_records

HOME = "hf://datasets/org/name"
REPLACED = "was changed while it was being read"


class Hub(ThreadingHTTPServer):
    """The data set org/name: its files at its newest commit, and the Range of each GET of
    a file.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = dict[str, bytes]()
        self.ranges = list[str]()

    def describe(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        digest = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": path, "size": len(content), "oid": digest}


class HubHandler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        files = self.server.files
        api = "/api/datasets/org/name"
        resolve = "/datasets/org/name/resolve/"
        if path.startswith(resolve):
            self.send_content(path.removeprefix(resolve).partition("/")[2])
        elif path.startswith(f"{api}/tree/"):
            start = path.removeprefix(f"{api}/tree/").partition("/")[2]
            self.send_json([self.server.describe(name) for name in files if name.startswith(start)])
        elif path == api or path.startswith(f"{api}/revision/"):
            commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
            details = {"private": False, "downloads": 0, "likes": 0, "tags": []}
            self.send_json({"id": "org/name", "sha": commit, **details})
        else:
            self.send_bytes(404, b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        form = json.loads(body) if body.startswith("{") else parse_qs(body)
        paths = [path for path in form["paths"] if path in self.server.files]
        self.send_json([self.server.describe(path) for path in paths])

    def send_content(self, path: str) -> None:
        content = self.server.files[path]
        byte_range = self.headers.get("Range", "")
        self.server.ranges.append(byte_range)
        first, _, last = byte_range.removeprefix("bytes=").partition("-")
        end = int(last) + 1 if last else len(content)
        self.send_bytes(206 if byte_range else 200, content[int(first or 0) : end])

    def send_json(self, tree: Any) -> None:
        self.send_bytes(200, json.dumps(tree).encode())

    def send_bytes(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        file_system = HfFileSystem(
            endpoint=f"http://127.0.0.1:{server.server_port}",
            token=False,
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        monkeypatch.setattr(storage_hub, "_open_file_system", lambda: file_system)
        yield server
        server.shutdown()


def read_texts(tmp_path: Path, name: str) -> list[str]:
    units = plan_units(find_files([f"{HOME}/{name}"], tmp_path), fields=("text",))
    batches = [batch for unit in units for batch in read_batches(unit)]
    return [record["text"] for record in all_records(batches)]


def test_files_are_found_by_patterns_and_read_in_order(tmp_path: Path, hub: Hub) -> None:
    one, two = b'{"text": "one"}\n', b'{"text": "two"}\n'
    hub.files = {"data/b.jsonl": two, "data/a.jsonl": one, "README.md": b"#"}
    assert read_texts(tmp_path, "data/*.jsonl") == ["one", "two"]
    assert read_texts(tmp_path, "data/b.jsonl") == ["two"]
    names = [file.name for file in find_files([f"{HOME}/**/*.jsonl"], tmp_path)]
    assert names == [f"{HOME}/data/{name}.jsonl" for name in "ab"]


def test_a_hub_that_fails_in_the_middle_of_a_file_is_not_called_damage_of_the_file(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that breaks is an OSError, and so is much damage of a file. Each read shows a
    wait again, if there is one.
    """
    hub.files = {"a.parquet": make_parquet(1000), "a.jsonl.gz": gzip.compress(b"1\n" * 99)}
    for name in hub.files:
        url = f"{HOME}/{name}"
        [unit] = plan_units(find_files([url], tmp_path), fields=("text",))
        with locate(url).open() as file:
            assert file.read(2) == hub.files[name][:2]
            assert file.seek(1) == 1
            assert file.read() == hub.files[name][1:]
        with monkeypatch.context() as patch:
            patch.setattr(HubHandler, "send_content", lambda self, path: self.send_bytes(500, b""))
            patch.setattr("time.sleep", lambda seconds: None)
            with pytest.raises(Unreachable, match="cannot be read from the hub"):
                list(read_batches(unit))


def make_parquet(rows: int) -> bytes:
    texts = [f"text {row}" for row in range(rows)]
    noise = [f"{row:01000}" for row in range(rows)]
    file = io.BytesIO()
    table = pa.table({"text": texts, "noise": noise})
    pq.write_table(table, file, compression="none", row_group_size=100)
    return file.getvalue()


def test_a_replaced_file_is_refused_and_of_a_parquet_file_only_ranges_are_read(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = {"a.parquet": make_parquet(1000), "a.jsonl": b"1\n"}
    assert read_texts(tmp_path, "a.parquet") == [f"text {n}" for n in range(1000)]
    assert hub.ranges
    assert all(byte_range.startswith("bytes=") for byte_range in hub.ranges)
    [unit] = plan_units(find_files([f"{HOME}/a.parquet"], tmp_path), fields=("text",))
    file = locate(f"{HOME}/a.jsonl")
    stat = file.stat()
    assert file.fetch() == (stat, b"1\n")
    hub.files = {"a.parquet": make_parquet(1001), "a.jsonl": b"22\n"}
    with pytest.raises(Unreachable, match=REPLACED):
        list(read_batches(unit))
    monkeypatch.setattr(type(file), "stat", lambda self: stat)
    with pytest.raises(Unreachable, match=REPLACED):
        file.fetch()


def test_a_release_without_buckets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of buckets are in tests/today, where they exist."""
    monkeypatch.delattr(HfApi, "batch_bucket_files", raising=False)
    version = re.escape(huggingface_hub.__version__)
    message = rf"needs huggingface-hub 1\.10 or later, and {version} is installed: "
    for act in (locate("hf://buckets/org/name/a").stat, locate("hf://buckets/org/name/a").open):
        with pytest.raises(Unreachable, match=message):
            act()


def test_missing_files_wrong_urls_and_failures_are_one_sentence(tmp_path: Path, hub: Hub) -> None:
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
    for error, reason in (
        (TimeoutError("(Request ID: 1)"), "the hub does not answer; check the network and HF_EN"),
        (OfflineModeIsEnabled("Cannot reach the hub"), "HF_HUB_OFFLINE is set, so nothing is re"),
        (ValueError("{"), "{; check the file's name, the login (HF_TOKEN)"),
    ):
        message = re.escape(f"the hub ({type(error).__name__}): {reason}")
        with pytest.raises(Unreachable, match=message), storage_hub._explain_errors("hf://a"):
            raise error


REFUSED = "Rate limited. Waiting 300s before retry [Retry 1/5]."
TIMED_OUT = "'The read operation timed out' thrown while requesting GET http://hub/x"


@pytest.fixture
def hiding_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """huggingface_hub's logger, whose lines about retries are hidden. No wait was shown."""
    for name in ("_answered", "_given_up", "_waited_for"):
        monkeypatch.setattr(retries, name, set())
    logger = logging.getLogger("huggingface_hub.utils._http")
    monkeypatch.setattr(logger, "filters", [])
    with hide_retry_lines():
        yield logger


def test_a_wait_is_shown_again_after_the_hub_has_answered(
    hub: Hub, hiding_logger: logging.Logger
) -> None:
    hub.files = {"a.jsonl": b"1\n"}
    sentences = list[str]()
    with redirect_notices(sentences.append):
        hiding_logger.warning(REFUSED)
        hiding_logger.warning(REFUSED)
        assert len(sentences) == 1
        assert locate(f"{HOME}/a.jsonl").stat()
        hiding_logger.warning(REFUSED)
    assert len(sentences) == 2


def test_a_hub_that_times_out_is_waited_for_with_a_sentence_at_once(
    hiding_logger: logging.Logger,
) -> None:
    """A time-out takes 10 s. A connection that the hub refuses takes none."""
    sentences = list[str]()
    with redirect_notices(sentences.append):
        hiding_logger.warning("'Connection refused' thrown while requesting GET http://hub/x")
        assert sentences == []
        hiding_logger.warning(TIMED_OUT)
    [sentence] = sentences
    assert "the hub does not answer, or is overloaded; the request is sent again" in sentence


def test_lines_about_the_users_own_requests_are_shown(
    hiding_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be a notebook. A request of mdsmix may fail, and another one go on."""
    line = logging.makeLogRecord({"msg": TIMED_OUT})
    with pytest.raises(Unreachable), storage_hub._explain_errors("hf://a"):
        raise TimeoutError
    assert not hiding_logger.filter(line)
    monkeypatch.setattr(hub_errors, "_requests", 0)  # as outside of the fixture's block
    with hide_retry_lines():
        assert not hiding_logger.filter(line)
    assert hiding_logger.filter(line)


def test_a_line_with_wrong_arguments_is_left_to_logging(hiding_logger: logging.Logger) -> None:
    """Otherwise the code that logs the line would get the error."""
    assert hiding_logger.filter(logging.makeLogRecord({"msg": "%d files", "args": ("two",)}))


def test_a_file_of_a_bucket_without_a_time_of_its_upload_counts_as_new() -> None:
    """Otherwise `gc` would delete it. The uploader may send any `mtime`."""
    long_ago = datetime(1970, 1, 2, tzinfo=timezone.utc)
    file = SimpleNamespace(size=1, xet_hash="a", uploaded_at=None, mtime=long_ago)
    assert time.time() - hub_buckets._make_stat(file).modified < 600
    file.uploaded_at = datetime(1970, 1, 3, tzinfo=timezone.utc)
    assert hub_buckets._make_stat(file).modified == 2 * 24 * 3600
