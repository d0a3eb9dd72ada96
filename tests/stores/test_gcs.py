"""The protocol of Google: checksums of writes and reads, a request for each call, and training by
Streaming on what was published. The server is fake-gcs-server, an emulator.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import unquote

import pytest
from urllib3.connection import HTTPConnection

from mdsmix.errors import Unreachable
from mdsmix.shards.index import read_index
from mdsmix.storage import Location, gcs_client, map_in_batches, retries
from mdsmix.storage.threads import THREADS
from tests.converting import Project, read_token_rows, run_ok
from tests.counting import count_requests
from tests.fake_gcs import TOKEN, serve_tokens, write_service_account
from tests.faults import Proxy, Rule
from tests.stores.servers import GOOGLE, Store

pytestmark = pytest.mark.parametrize("running", [GOOGLE], indirect=True)


def test_damaged_bodies_are_noticed(root: Location, proxy: Proxy) -> None:
    file = root / "x"
    proxy.rules = [Rule("damaged", "PUT", times=2)]
    file.write(b"1234", b"5678")
    assert [request.status for request in proxy.met()] == [400, 400], "the server refused them"
    assert file.read() == b"12345678"
    for read in (file.read, file.fetch, lambda: file.open().read()):
        proxy.rules = [Rule("damaged answer", "GET")]
        with pytest.raises(Unreachable, match="the bytes that arrived differ from the stored"):
            read()
        assert file.read() == b"12345678"


def test_each_call_takes_one_request(root: Location, proxy: Proxy) -> None:
    file = root / "a b/ü"
    file.write(b"abc")
    stat = file.stat()
    assert file.fetch(max_bytes=2) == (stat, b"")
    for call, expected in (
        (file.stat, {"GET": 1}),
        (file.fetch, {"GET": 1}),
        (lambda: file.fetch(max_bytes=2), {"GET": 1}),
        (file.read, {"GET": 1}),
        (lambda: file.read(1, 1), {"GET": 1}),
        (lambda: file.write(b"abc"), {"PUT": 1}),
        (lambda: file.create(b"abc"), {"PUT": 1}),
        (lambda: file.replace(stat.stamp, b"abc"), {"PUT": 1}),
        (lambda: file.copy_to(root / "copy"), {"PUT copy": 1}),
        ((root / "a b").entries, {"GET list": 1}),
        (lambda: root.delete_all(["copy", "none", "a b/ü"]), {"DELETE": 3}),
    ):
        with count_requests(proxy) as requests:
            call()
        assert requests.by_operation == expected
    assert list(root.list(recursive=True)) == []


LOAD = """
import json, sys, yaml
from streaming import Stream, StreamingDataset
from mdsmix.load import build_loader
streams = yaml.safe_load(open(sys.argv[1]))["train_loader"]["dataset"]["streams"]
dataset = StreamingDataset(
    streams=[Stream(**stream) for stream in streams.values()], batch_size=1, shuffle=False
)
rows = [sample["tokens"].tolist() for sample in dataset]
for stream in streams.values():
    stream["local"] += " of mdsmix"
config = yaml.safe_load(open(sys.argv[1]))
config["train_loader"]["dataset"]["streams"] = streams
batches = [batch["input_ids"].tolist() for batch in build_loader(config, 1)]
print(json.dumps([rows, [row for batch in batches for row in batch]]))
"""
"Prints the rows of a rendered YAML as Streaming's own dataset reads them, and as mdsmix's loader."


def test_an_answer_without_a_time_takes_another_request_for_the_same_version(
    root: Location, proxy: Proxy
) -> None:
    file = root / "x"
    file.write(b"one")
    proxy.rules = [Rule("no time", "GET")]
    with count_requests(proxy) as requests:
        assert file.fetch() == (file.stat(), b"one")
    assert requests.by_operation == {"GET": 3}
    # The object is replaced between the two requests, and then deleted.
    for change, expected in ((lambda: file.write(b"two"), b"two"), (file.delete, None)):
        proxy.rules = [Rule("no time", "GET"), Rule("none", "GET", then=change)]
        answer = file.fetch()
        assert (answer[1] if answer else None) == expected
        assert not [rule for rule in proxy.rules if rule.times]


def test_threads_keep_their_connections_between_batches(
    root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = HTTPConnection.connect
    connected = list[HTTPConnection]()

    def connect_noted(connection: HTTPConnection) -> None:
        connected.append(connection)
        connect(connection)

    monkeypatch.setattr(HTTPConnection, "connect", connect_noted)
    proxy.rules = [Rule("none", times=999, then=lambda: time.sleep(0.01))]
    file = root / "x"
    assert list(map_in_batches(lambda number: file.stat(), range(96))) == [None] * 96
    # A thread that begins late may find a connection that another one has given back.
    assert len(connected) <= THREADS


def test_credentials_that_are_renewed_during_a_run_are_read_again(
    root: Location, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of tokens refuses an account, and then the file has another one."""
    file = tmp_path / "account.json"
    refused = list[str]()

    def refuse() -> bool:
        if refused:
            return False
        refused.append(file.read_text())
        write_service_account(file, token_uri)
        return True

    with serve_tokens(refuse) as token_uri:
        monkeypatch.setenv(
            "GOOGLE_APPLICATION_CREDENTIALS", str(write_service_account(file, token_uri))
        )
        monkeypatch.delenv("STORAGE_EMULATOR_HOST")  # no credentials are sent to an emulator
        monkeypatch.setenv("API_ENDPOINT_OVERRIDE", proxy.endpoint)
        credentials = gcs_client.open_session(root.url).http.credentials
        (root / "x").write(b"1")
        assert gcs_client.open_session(root.url).http.credentials is not credentials
    assert len(refused) == 1
    (request,) = proxy.requests
    assert request.headers["authorization"] == f"Bearer {TOKEN}"


def test_an_object_that_is_stored_compressed_is_read_as_it_is_stored(
    root: Location, store: Store
) -> None:
    """Google would send it decompressed to a client that does not accept gzip."""
    content = gzip.compress(b"text" * 1000)
    upload = f"/upload/storage/v1/b/{root.name}/o?uploadType=media&name=x.jsonl.gz"
    request = urllib.request.Request(
        f"{store.settings[store.variable]}{upload}&contentEncoding=gzip", content
    )
    urllib.request.urlopen(request, timeout=10).close()
    file = root / "x.jsonl.gz"
    assert file.stat().size == len(content)
    assert file.fetch() == (file.stat(), content)
    assert file.read(3, 9) == content[3:12]


def test_an_object_that_marks_a_folder_is_no_file(root: Location, store: Store) -> None:
    """Google's console writes such objects."""
    upload = f"/upload/storage/v1/b/{root.name}/o?uploadType=media&name=folder/"
    request = urllib.request.Request(f"{store.settings[store.variable]}{upload}", b"")
    urllib.request.urlopen(request, timeout=10).close()
    (root / "folder/x").write(b"1")
    assert [name for name, _ in (root / "folder").list()] == ["x"]
    assert [name for name, _ in root.list(recursive=True)] == ["folder/x"]
    assert root.entries() == ({}, {"folder"})


def test_an_answer_of_another_server_is_an_error(
    root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login page, and objects and headers that lack what Google sends."""
    file = root / "x"
    file.write(b"1")

    def copy() -> None:
        file.copy_to(root / "copy")

    calls = (file.stat, file.fetch, file.read, root.entries, lambda: file.write(b"1"), copy)
    for fault in ("a login page", "another answer"):
        for call in calls:
            proxy.rules = [Rule(fault)]
            call()
            assert not proxy.rules[0].times, "the last answer of a server that went"
    for name in ("_FIRST_SECONDS", "_LATER_SECONDS"):
        monkeypatch.setattr(retries, name, 0.1)
    for fault in ("a login page", "another answer"):
        for call in calls:
            proxy.rules = [Rule(fault, times=999)]
            with pytest.raises(Unreachable, match="is not an answer of Google Cloud Storage; run"):
                call()


def test_a_refused_token_is_one_sentence(root: Location, proxy: Proxy) -> None:
    proxy.rules = [Rule("401 required", times=9)]
    with pytest.raises(Unreachable, match="the store does not accept the credentials; renew"):
        (root / "x").read()


def test_streaming_trains_on_what_was_published(
    root: Location, proxy: Proxy, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streaming takes the emulator's address from the environment, as Google's library does. It
    refuses to read without credentials: here a service account gets a token from a server of the
    tests.
    """
    project.set_window_size(500)
    project.write_source(f"Document {n} is about the number {n}. " * 9 for n in range(40))
    loader = {"num_workers": 0, "drop_last": False, "dataset": {"shuffle": False}}
    places = {"remote": f"{root}/the mix", "local": str(tmp_path / "node")}
    project.configure(train_loader=loader, **places).run()
    run_ok("render-yaml", project.recipe, "-o", tmp_path / "train.yaml")
    expected = read_token_rows(root / "the mix/web/train")
    proxy.requests.clear()
    with serve_tokens() as token_uri:
        account = write_service_account(tmp_path / "account.json", token_uri)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(account))
        command = [sys.executable, "-c", LOAD, str(tmp_path / "train.yaml")]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows, rows_of_mdsmix = json.loads(output.splitlines()[-1])
    assert rows == expected
    assert sorted(rows_of_mdsmix) == sorted(expected)
    downloads = [r for r in proxy.requests if r.path.startswith("/download/storage/v1/b/")]
    assert {r.headers["authorization"] for r in downloads} == {f"Bearer {TOKEN}"}
    shards = {shard.stored.basename for shard in read_index(root / "the mix/web/train").shards}
    assert shards < {unquote(r.path.partition("?")[0]).rpartition("/")[2] for r in downloads}
