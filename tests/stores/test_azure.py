"""Azure's path type with a real Azurite: requests and their number, refusals, and damaged or broken
bodies. What every store must do is in `test_stores.py` and `test_own_protocols.py`.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from azure.storage.blob import (
    AccountSasPermissions,
    BlobServiceClient,
    ContainerClient,
    PublicAccess,
    ResourceTypes,
    generate_account_sas,
)

from mdsmix.errors import Unreachable
from mdsmix.storage import Location, azure, azure_client, locate, retries
from tests import azurite
from tests.counting import count_requests
from tests.faults import Proxy, Rule
from tests.stores.servers import AZURE, Store

pytestmark = pytest.mark.parametrize("running", [AZURE], indirect=True)

DATA = os.urandom(11 << 20)


@pytest.fixture
def container(store: Store, root: Location) -> ContainerClient:
    """The container, as Microsoft's own client sees it."""
    client = BlobServiceClient.from_connection_string(store.settings[azurite.VARIABLE])
    return client.get_container_client(root.name)


@pytest.fixture
def folder(root: Location, proxy: Proxy) -> Location:
    """A folder of the container, which is reached through the proxy."""
    return root / "a folder/ü"


def test_written_bytes_are_read_completely_and_in_ranges(
    folder: Location, container: ContainerClient
) -> None:
    place = folder / "file #1 50%+?.bin"
    place.write(b"ab", memoryview(b"cdef"), bytearray(b"g"))
    assert container.download_blob("a folder/ü/file #1 50%+?.bin").readall() == b"abcdefg"
    assert (place.read(), place.read(2, 3), place.read(6, 10)) == (b"abcdefg", b"cde", b"g")
    assert (place.read(99, 1), place.read(0, 0)) == (b"", b"")
    with place.open(5) as file:
        assert file.read() == b"fg"
    before = place.stat()
    assert list(folder.list()) == [(place.name, before)]
    place.write()
    assert (place.read(), place.read(0, 5), before.size, place.stat().size) == (b"", b"", 7, 0)
    assert place.fetch() == (place.stat(), b"")
    assert place.fetch(max_bytes=-1) == (place.stat(), b"")
    assert place.stat().stamp != before.stamp


def test_a_blob_is_found_copied_and_deleted_with_one_request_each(
    folder: Location, proxy: Proxy, container: ContainerClient
) -> None:
    (folder / "a").write(b"abc")
    missing = folder / "none"
    for operation, act in (
        ("HEAD", (folder / "a").stat),
        ("HEAD", missing.stat),
        ("GET", (folder / "a").fetch),
        ("GET", (folder / "a").read),
        ("PUT copy", lambda: (folder / "a").copy_to(folder / "b/c")),
        ("GET list", folder.entries),
        ("DELETE", (folder / "a").delete),
        ("DELETE", missing.delete),
    ):
        with count_requests(proxy) as requests:
            act()
        assert requests.by_operation == {operation: 1}
    assert (folder / "b/c").read() == b"abc"
    assert (missing.stat(), missing.fetch(), missing.expand()) == (None, None, [])
    for read in (missing.read, missing.open):
        with pytest.raises(Unreachable, match="there is no such blob"):
            read()
    folder.delete_all(["b/c", *(f"none {n}" for n in range(20))])
    assert [*container.list_blobs()] == []


def test_a_copy_to_another_account_goes_through_this_machine(
    folder: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[bytes]()
    other = azure.AzurePath("other.blob.core.windows.net/data/x")
    (folder / "a").write(b"abc")
    monkeypatch.setattr(azure.AzurePath, "write", lambda place, content: written.append(content))
    (folder / "a").copy_to(other)
    assert written == [b"abc"]
    (folder / "a").copy_to(locate(tmp_path / "down"))
    assert (tmp_path / "down").read_bytes() == b"abc"


def test_a_folder_of_an_account_with_folders_is_no_file(
    folder: Location, container: ContainerClient
) -> None:
    """Azurite has no such accounts, but keeps the mark that they give to folders."""
    (folder / "d/file").write(b"1")
    container.upload_blob("a folder/ü/d", b"", metadata={"hdi_isfolder": "true"})
    container.upload_blob("a folder/ü/marker/", b"")
    assert ((folder / "d").stat(), (folder / "d").fetch()) == (None, None)
    assert [name for name, _ in folder.list(recursive=True)] == ["d/file"]
    files, folders = folder.entries()
    assert (files, folders) == ({}, {"d", "marker"})


REFUSALS: list[tuple[dict[str, str], str, str]] = [
    ({}, "no-such-container", "the container does not exist; create it"),
    ({}, "a--b", "this is not a valid container or blob name"),
    ({"AccountKey": "V1JPTkctS0VZ"}, "", "access denied, or a wrong key"),
    ({"AccountName": "another"}, "", "names Azure's account mdsmixtests, and AZURE_STORAGE_"),
    ({"BlobEndpoint": "127.0.0.1:9000"}, "", "is not an address that begins with http://"),
    ({"BlobEndpoint": "http://127.0.0.1:1/x"}, "", "nothing answers there; check the network"),
    ({"BlobEndpoint": "http://no-such-host.invalid"}, "", "there is no account of this name"),
    ({"AccountKey": ""}, "", "access denied"),
]
"Other settings of the connection string, another container, and words of the message."


@pytest.mark.parametrize(("settings", "other", "expected"), REFUSALS)
def test_a_refusal_is_a_sentence_without_keys(
    settings: dict[str, str],
    other: str,
    expected: str,
    folder: Location,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Azure sends a code with the answer to a HEAD, so every request has the same sentence."""
    monkeypatch.setattr(retries, "_FIRST_SECONDS", 0)
    text = os.environ[azurite.VARIABLE]
    parts = dict(part.split("=", 1) for part in text.split(";")) | settings
    monkeypatch.setenv(azurite.VARIABLE, ";".join(f"{k}={v}" for k, v in parts.items()))
    container = other or folder.path.split("/")[1]
    place = locate(f"azure://{azurite.HOST}/{container}/x")
    for request in (place.read, place.write, place.stat, lambda: list(place.list())):
        with pytest.raises(Unreachable) as refusal:
            request()
        message = str(refusal.value)
        assert expected in message
        assert not [word for word in (azurite.KEY, "V1JPTkctS0VZ") if word in message]


def test_a_shared_access_signature_and_no_credentials_at_all(
    folder: Location, proxy: Proxy, container: ContainerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature is a part of each URL. A public container can only be read."""
    sas = generate_account_sas(
        azurite.ACCOUNT,
        azurite.KEY,
        ResourceTypes(container=True, object=True),
        AccountSasPermissions(read=True, write=True, delete=True, list=True),
        expiry=datetime.now(timezone.utc) + timedelta(days=1),
    )
    address = f"AccountName={azurite.ACCOUNT};BlobEndpoint={proxy.endpoint}/{azurite.ACCOUNT}"
    monkeypatch.setenv(azurite.VARIABLE, f"{address};SharedAccessSignature=?{sas}")
    (folder / "a b").write(b"12345")
    (folder / "a b").copy_to(folder / "c")
    assert (folder / "c").read(1, 2) == b"23"
    assert [name for name, _ in folder.list()] == ["a b", "c"]
    (folder / "c").delete()
    assert not [r for r in proxy.requests if "authorization" in r.headers]

    monkeypatch.setenv(azurite.VARIABLE, address)
    with pytest.raises(Unreachable, match="access denied"):
        (folder / "a b").read()
    container.set_container_access_policy({}, public_access=PublicAccess.CONTAINER)
    assert (folder / "a b").read() == b"12345"
    assert [name for name, _ in folder.list()] == ["a b"]
    with pytest.raises(Unreachable, match="access denied"):
        (folder / "a b").write(b"6")
    assert folder.describe_access().endswith(f"credentials from {azurite.VARIABLE}, which has none")


def test_an_answer_that_is_not_azures_is_an_error(
    folder: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.rules = [Rule("a login page", "GET list"), Rule("a login page", "PUT")]
    assert list(folder.list()) == [], "it may have been the last of a server that went"
    (folder / "x").write(b"1")
    assert (folder / "x").read() == b"1"
    for name in ("_FIRST_SECONDS", "_LATER_SECONDS"):
        monkeypatch.setattr(retries, name, 0.1)
    for act in (folder.entries, lambda: (folder / "x").write(b"2")):
        proxy.rules = [Rule("a login page", times=99)]
        with pytest.raises(Unreachable, match="cut off, or is not an answer of Azure"):
            act()
    for act in ((folder / "x").stat, (folder / "x").fetch):
        proxy.rules = [Rule("a login page", times=99)]
        with pytest.raises(Unreachable, match="answers without a time, an ETag or a size"):
            act()


def test_damage_on_the_way_is_noticed(folder: Location, proxy: Proxy) -> None:
    """The store compares the MD5 of each write; the reader that of a blob, and of a range of up to
    4 MiB.
    """
    proxy.rules = [Rule("damaged", "PUT", times=2)]
    (folder / "x").write(DATA)
    assert not proxy.rules[0].times
    stat, content = (folder / "x").fetch()
    assert content == DATA

    def read_part() -> bytes:
        with (folder / "x").open_random(stat) as file:
            return file.read(100)

    for read in ((folder / "x").read, (folder / "x").fetch, read_part):
        proxy.rules = [Rule("damaged answer", "GET")]
        with pytest.raises(Unreachable, match="the bytes that arrived differ"):
            read()
        assert not proxy.rules[0].times


def test_small_reads_need_a_request_per_megabyte_and_are_repeated_after_faults(
    folder: Location, proxy: Proxy
) -> None:
    place = folder / "archive"
    content = DATA[: 5 << 20]
    place.write(content)
    stat = place.stat()
    faults = ("503", "cut short", "reset in the answer")
    proxy.rules = [Rule(fault, "GET", "archive") for fault in faults]
    with count_requests(proxy) as requests, place.open_random(stat) as file:
        assert b"".join(iter(lambda: file.read(10_000), b"")) == content
    assert requests.by_operation == {"GET": 5 + len(faults)}, str(requests)
    assert all(r.headers["if-match"] == f'"{stat.stamp}"' for r in requests.requests)
    for size, has_checksum in ((4 << 20, True), ((4 << 20) + 1, False)):
        with count_requests(proxy) as requests:
            assert place.read(0, size) == content[:size]
        (request,) = requests.requests
        assert ("x-ms-range-get-content-md5" in request.headers) is has_checksum, "Azure's limit"


def test_a_write_is_done_once_whatever_happens_to_its_answer(
    folder: Location, proxy: Proxy
) -> None:
    """A condition that a write itself made false is for its caller, who finds the written bytes."""
    for fault in ("lost answer", "500 after the work", "reset", "reset in the request", "503"):
        proxy.rules = [Rule(fault, "PUT")]
        (folder / fault).write(b"1")
        assert (folder / fault).read() == b"1"
        is_done = fault in ("lost answer", "500 after the work")
        proxy.rules = [Rule(fault, "PUT")]
        created = (folder / "new" / fault).create(b"2")
        assert (created is None) is is_done
        assert (folder / "new" / fault).read() == b"2"
        proxy.rules = [Rule(fault, "PUT copy|PUT")]
        (folder / fault).copy_to(folder / "copy" / fault)
        assert (folder / "copy" / fault).read() == b"1"


def test_conditions_are_kept_by_azurite_and_by_azure_without_a_trial(
    folder: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure, "_keeps", {})
    assert (folder / "x").try_conditions() is True
    count = len(proxy.requests)
    assert (folder / "y").try_conditions() is True
    assert len(proxy.requests) == count == 3 + 3 + 1, "3 creations, 3 replacements, 1 deletion"
    assert list(folder.list(recursive=True)) == []
    for header in ("if-none-match", "if-match"):
        azure._keeps.clear()
        proxy.rules = [Rule("412", "PUT", times=99, when=lambda r, h=header: h in r.headers)]
        assert (folder / "x").try_conditions() is False
        assert list(folder.list(recursive=True)) == []
    proxy.rules = []
    file = folder / "a"
    first = file.create(b"one")
    assert file.create(b"two") is None
    second = file.replace(first.stamp, b"three")
    assert (second, file.read()) == (file.stat(), b"three")
    assert file.replace(first.stamp, b"four") is None
    file.delete()
    assert file.replace(second.stamp, b"five") is None
    assert file.stat() is None

    count = len(proxy.requests)
    monkeypatch.delenv(azurite.VARIABLE)
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", azurite.KEY)
    assert (folder / "x").try_conditions() is True
    assert len(proxy.requests) == count


def test_many_threads_share_their_connections(folder: Location) -> None:
    """`requests` keeps ten connections by default, and would open new ones all the time."""
    files = [folder / str(n) for n in range(64)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda file: file.write(b"x"), files))
        for _ in range(5):
            list(pool.map(lambda file: file.stat(), files))
    session = azure_client.ask_azure(folder.url, lambda client: client.session)
    pools = session.get_adapter(folder.url.replace("azure", "http")).poolmanager.pools
    (pool,) = map(pools.get, pools.keys())
    assert 0 < pool.num_connections <= 16
