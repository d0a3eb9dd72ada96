"""The path type of S3 with a real MinIO: the same results as on a disk, messages without keys, and
damaged or broken bodies.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import zlib
from pathlib import Path
from typing import Any

import boto3
import pytest

from mdsmix.errors import Unreachable
from mdsmix.storage import Location, locate, retries, s3, s3_client
from tests.counting import count_requests
from tests.faults import CONDITIONS, IGNORES, RACES, Proxy, Rule
from tests.tls_tunnel import open_tunnel

DATA = os.urandom(11 << 20)


@pytest.fixture
def root(bucket: str) -> Location:
    return locate(f"s3://{bucket}/a folder/ü")


def test_written_bytes_are_read_completely_and_in_ranges(root: Location) -> None:
    place = root / "file.bin"
    place.write(b"ab", memoryview(b"cdef"), bytearray(b"g"))
    assert (place.read(), place.read(2, 3), place.read(6, 10)) == (b"abcdefg", b"cde", b"g")
    assert (place.read(99, 1), place.read(0, 0)) == (b"", b"")
    with place.open(5) as file:
        assert file.read() == b"fg"
    before = place.stat()
    place.write()
    assert (place.read(), place.read(0, 5), before.size, place.stat().size) == (b"", b"", 7, 0)
    assert place.stat().stamp != before.stamp


def test_a_missing_object_is_found_with_one_request_and_cannot_be_read(
    root: Location, proxy: Proxy
) -> None:
    (root / "a").write(b"abc")
    for name, size in (("a", 3), ("none", None)):
        with count_requests(proxy) as requests:
            assert getattr((root / name).stat(), "size", None) == size
        assert requests.by_operation == {"HEAD": 1}
    missing = root / "none"
    missing.delete()
    assert (missing.expand(), list(missing.list())) == ([], [])
    for read in (missing.read, missing.open):
        with pytest.raises(Unreachable, match="there is no such object"):
            read()


def test_list_and_expand_give_the_same_as_on_a_disk_across_pages(
    root: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = s3._list_page
    monkeypatch.setattr(
        s3, "_list_page", lambda wanted, client: page({**wanted, "MaxKeys": 2}, client)
    )
    for place in (root, locate(tmp_path)):
        for name in ("b.x", "a.x", "c/z.x", "c/y/x.x", "c-1", ".hidden.x"):
            (place / name).write(name.encode())
        assert [name for name, _ in place.list()] == [".hidden.x", "a.x", "b.x", "c-1"]
        assert [name for name, _ in place.list(recursive=True)][3:] == ["c-1", "c/y/x.x", "c/z.x"]
        for row in (
            "*.x a.x b.x",
            "?.x a.x b.x",
            "[b-z].x b.x",
            "*/*.x c/z.x",
            "c/** c/y/x.x c/z.x",
        ):
            pattern, *expected = row.split()
            urls = [file.url for file, _ in (place / pattern).expand()]
            assert urls == [(place / name).url for name in expected]


def test_many_objects_are_deleted_in_one_request_or_one_by_one(
    root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_DELETED_AT_ONCE", 3)
    for fault, operations in (("", {"POST": 1}), ("501 NotImplemented", {"POST": 1, "DELETE": 3})):
        for name in "abcde":
            (root / name).write(b"1")
        proxy.rules = [Rule(fault, "POST", times=99)] if fault else []
        with count_requests(proxy) as requests:
            root.delete_all("abd")
            root.delete_all(())
        assert requests.by_operation == operations
        assert [name for name, _ in root.list()] == ["c", "e"]


WITHOUT = {
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")),
    **dict.fromkeys(("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"), "/dev/null/none"),
    "AWS_EC2_METADATA_DISABLED": "true",
}
REFUSALS: list[tuple[dict[str, str | None], str, str]] = [
    ({}, "no-such-bucket", "the bucket does not exist"),
    ({}, "ab", "at least 3 letters"),
    ({"AWS_SECRET_ACCESS_KEY": "WRONG-SECRET"}, "", "secret key is wrong"),
    ({"AWS_ACCESS_KEY_ID": "UNKNOWN-KEY"}, "", "does not know this access key"),
    ({"AWS_SESSION_TOKEN": "WRONG-TOKEN"}, "", "unset AWS_SESSION_TOKEN if the access key needs"),
    (
        {"HTTP_PROXY": "http://user:PASSWORD@127.0.0.1:1"},
        "",
        "the proxy does not answer, or refuses to connect; check",
    ),
    ({"S3_ENDPOINT_URL": "127.0.0.1:9000"}, "", "does not start with http://"),
    ({"S3_ENDPOINT_URL": "http://user:PASSWORD@127.0.0.1:1"}, "", "nothing answers there"),
    ({"AWS_ACCESS_KEY_ID": "BROKEN-KEY\n"}, "", "AWS_ACCESS_KEY_ID contains a line break"),
    ({"AWS_SESSION_TOKEN": "BROKEN\rTOKEN"}, "", "AWS_SESSION_TOKEN contains a line break"),
    ({"AWS_DEFAULT_REGION": "us-east-1\n"}, "", "AWS_DEFAULT_REGION contains a line break"),
    ({"S3_ENDPOINT_URL": "http://user:PASSWORD\n@127.0.0.1:1"}, "", "or contains a line break"),
    ({"AWS_PROFILE": "nobody"}, "", "the profile that AWS_PROFILE names"),
    (WITHOUT, "", "no credentials were found; set AWS_ACCESS_KEY_ID"),
]
"Environment variables (None removes one), another bucket, and words of the message."


def test_a_refusal_is_a_sentence_without_keys(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for patience in ("_FIRST_SECONDS", "_LATER_SECONDS"):
        monkeypatch.setattr(retries, patience, 0)
    secrets = [os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    secrets += ["WRONG-SECRET", "WRONG-TOKEN", "UNKNOWN-KEY", "PASSWORD", "BROKEN"]
    for settings, other_bucket, expected in REFUSALS:
        place = locate(f"s3://{other_bucket or bucket}/x")
        # A HEAD does not tell a missing bucket from a missing object.
        requests = [place.read, place.write, lambda place=place: list(place.list()), place.stat]
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value) if value else patch.delenv(name)
            for request in requests[: 3 if other_bucket == "no-such-bucket" else 4]:
                with pytest.raises(Unreachable) as refusal:
                    request()
                assert "\n" not in str(refusal.value)
                message = str(refusal.value)
                assert (expected in message, place.url in message) == (True, True), message
                assert not [secret for secret in secrets if secret in message]


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy"])
def test_requests_take_the_proxy_of_the_environment(
    variable: str, minio: str, root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is at the time of the request, and not if NO_PROXY names the store."""
    monkeypatch.setenv("S3_ENDPOINT_URL", minio)
    (root / "x").write(b"1")
    monkeypatch.setenv(variable, proxy.endpoint)
    with count_requests(proxy) as requests:
        assert (root / "x").read() == b"1"
        (root / "x").write(b"2")
    assert requests.by_operation == {"GET": 1, "PUT": 1}
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with count_requests(proxy) as requests:
        assert (root / "x").read() == b"2"
    assert requests.by_operation == {}


def test_a_store_with_https_is_reached_through_a_proxy(
    minio: str, root: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate of the store is checked, and the password for the proxy is sent."""
    monkeypatch.setattr(retries, "_FIRST_SECONDS", 0)
    (root / "x").write(DATA)
    host = "s3.example.com"
    with open_tunnel(minio, host, tmp_path) as tunnel:
        monkeypatch.setenv("S3_ENDPOINT_URL", f"https://{host}")
        monkeypatch.setenv("HTTPS_PROXY", tunnel.proxy.replace("//", "//user:PASSWORD@"))
        monkeypatch.setenv("NO_PROXY", "")
        with pytest.raises(Unreachable, match="check AWS_CA_BUNDLE") as refusal:
            (root / "x").read()
        assert "PASSWORD" not in str(refusal.value)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tunnel.certificate))
        assert (root / "x").read() == DATA
        (root / "y").write(DATA[:-1])
        assert (root / "y").read(5) == DATA[5:-1]
        password = base64.b64encode(b"user:PASSWORD").decode()
        assert all(f"Proxy-Authorization: Basic {password}" in head for head in tunnel.connects)
        monkeypatch.setenv("S3_ENDPOINT_URL", "https://other.example.com")
        with pytest.raises(Unreachable, match="or refuses to connect"):
            (root / "x").read()


def test_a_broken_body_is_continued_where_it_broke(root: Location, proxy: Proxy) -> None:
    data = DATA[:10_000_000]
    (root / "x").write(data)
    for fault in ("reset in the answer", "cut short"):
        proxy.requests.clear()
        for times, read, expected in (
            (4, (root / "x").read, data),
            (2, lambda: (root / "x").read(1_000_000, 8_000_000), data[1_000_000:9_000_000]),
            (1, (root / "x").fetch, ((root / "x").stat(), data)),
        ):
            proxy.rules = [Rule(fault, "GET", times=times)]
            assert read() == expected
            assert not proxy.rules[0].times, fault
        if fault == "cut short":  # a reset may lose bytes that had arrived
            ranges = [r.headers.get("range") for r in proxy.requests if r.method == "GET"]
            halves = (5_000_000, 7_500_000, 8_750_000, 9_375_000)
            assert ranges[:5] == [None, *(f"bytes={start}-" for start in halves)]


def test_a_broken_read_never_continues_in_another_version(root: Location, proxy: Proxy) -> None:
    (root / "x").write(b"a" * 10_000_000)
    proxy.rules = [Rule("reset in the answer", "GET")]
    with (root / "x").open() as file:
        file.read(1000)
        (root / "x").write(b"b" * 10_000_000)
        with pytest.raises(Unreachable, match="replaced while it was being read"):
            file.read()
    rewrite = Rule("none", "GET", then=lambda: (root / "x").write(b"c" * 10_000_000))
    proxy.rules = [Rule("reset in the answer", "GET"), rewrite]
    with pytest.raises(Unreachable, match="replaced while it was being read"):
        (root / "x").fetch()


def test_an_answer_that_is_not_s3_is_an_error(
    root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.rules = [Rule("a login page", "GET list")]
    assert list(root.list()) == [], "it may have been the last of a server that went"
    monkeypatch.setattr(retries, "_LATER_SECONDS", 0.1)
    proxy.rules = [Rule("a login page", "GET list", times=99)]
    with pytest.raises(Unreachable, match="; run the same command again"):
        list(root.list())


def test_a_404_with_a_broken_body_is_final_and_so_is_a_conflict(
    root: Location, proxy: Proxy
) -> None:
    """One store answers so for a key such as ü, and its HEAD has no body."""
    proxy.rules = [Rule("409 ConditionalRequestConflict", "PUT")]
    assert (root / "a").create(b"one") is None
    proxy.rules = [Rule("a 404 in broken XML", times=99)]
    assert (root / "ü").stat() is None
    assert (root / "ü").fetch() is None
    with pytest.raises(Unreachable, match="there is no such object"):
        (root / "ü").read()
    assert len(proxy.met()) <= 5


def test_sources_have_stamps_even_if_listings_have_no_etags(root: Location, proxy: Proxy) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (root / name).write(name.encode() * 3)
    expected = (root / "*.jsonl").expand()
    proxy.rules = [Rule("no ETags", "GET list", times=99)]
    assert [(name, stat.size) for name, stat in root.list()] == [("a.jsonl", 21), ("b.jsonl", 21)]
    assert (root / "*.jsonl").expand() == expected
    assert all(stat.stamp for _, stat in expected)


@pytest.mark.parametrize("checksums", ["when_required", "when_supported"])
def test_damaged_bodies_are_noticed_with_and_without_new_checksums(
    checksums: str, root: Location, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only AWS gets the checksum headers of 2025, which other stores refuse. The signature covers
    the SHA-256 of every body anyway.
    """
    monkeypatch.setattr(s3_client, "_CHECKSUMS", checksums)
    proxy.rules = [Rule("damaged", "PUT"), Rule("damaged", "PUT", skip=1)]
    (root / "small").write(b"1234")
    (root / "x").write(DATA[: 6 << 20], DATA[6 << 20 :])
    (root / "x").copy_to(root / "copy")
    (root / "copy").copy_to(locate(tmp_path) / "down")
    (locate(tmp_path) / "down").copy_to(root / "up")
    assert not any(rule.times for rule in proxy.rules)
    assert [(root / name).read() for name in ("small", "up")] == [b"1234", DATA]
    bodies = [r for r in proxy.requests if r.operation == "PUT" and r.body]
    for request in bodies:
        headers = request.headers
        sha = hashlib.sha256(request.body).hexdigest()
        is_intact = request.fault != "damaged"
        has_checksums = checksums == "when_supported"
        crc = base64.b64encode(zlib.crc32(request.body).to_bytes(4, "big")).decode()
        assert (headers["x-amz-content-sha256"] == sha) is is_intact
        assert "content-encoding" not in headers
        assert (headers.get("x-amz-checksum-crc32") == crc) is (has_checksums and is_intact)
        assert ("x-amz-sdk-checksum-algorithm" in headers) is has_checksums
    assert len(bodies) == 2 + 2 + 1


def test_damaged_answers_are_noticed_if_the_object_has_a_checksum(
    root: Location, proxy: Proxy, bucket: str, minio: str
) -> None:
    """A store has checksums of whole objects only, not of ranges."""
    key = {"Bucket": bucket, "Key": "a folder/ü/sum"}
    file = root / "sum"
    store = boto3.client("s3", endpoint_url=minio)
    store.put_object(**key, Body=b"12345678", ChecksumAlgorithm="CRC32")
    for read in (file.read, file.fetch, lambda: file.open().read()):
        proxy.rules = [Rule("damaged answer", "GET")]
        with pytest.raises(
            Unreachable, match="the bytes that arrived differ from the stored bytes"
        ):
            read()
        assert file.read() == b"12345678"
    proxy.rules = [Rule("damaged answer", "GET")]
    assert file.read(0, 4) == b"1235"


def test_open_random_requests_nothing_until_something_is_read(root: Location, proxy: Proxy) -> None:
    place = root / "x"
    empty = root / "empty"
    place.write(b"abc")
    empty.write()
    stat = place.stat()
    stat_of_empty = empty.stat()
    with count_requests(proxy) as requests:
        with empty.open_random(stat_of_empty) as file:
            assert (file.read(), file.read(5), file.seek(0, io.SEEK_END)) == (b"", b"", 0)
        with place.open_random(stat) as file:
            assert (file.read(0), file.seek(7), file.read(1), file.tell()) == (b"", 7, b"", 7)
    assert requests.total == 0
    with count_requests(proxy) as requests, place.open_random(stat, ahead=2) as file:
        assert (file.read(1), file.read(9), file.read()) == (b"a", b"bc", b"")
    assert [r.headers["range"] for r in requests.requests] == ["bytes=0-1", "bytes=2-2"]


def test_small_reads_need_a_request_per_megabyte_and_are_repeated_after_faults(
    root: Location, proxy: Proxy
) -> None:
    place = root / "archive"
    content = DATA[: 5 << 20]
    place.write(content)
    stat = place.stat()
    faults = ("503", "cut short", "reset in the answer")
    proxy.rules = [Rule(fault, "GET", "archive") for fault in faults]
    with count_requests(proxy) as requests, place.open_random(stat) as file:
        assert b"".join(iter(lambda: file.read(10_000), b"")) == content
    assert requests.by_operation == {"GET": 5 + len(faults)}, str(requests)
    assert all(r.headers["if-match"] == f'"{stat.stamp}"' for r in requests.requests)


STORES: list[tuple[str, Any, bool, int]] = [
    ("none", lambda r: False, True, 7),
    (IGNORES, lambda r: bool(CONDITIONS & r.headers.keys()), False, 19),
    (RACES, lambda r: bool(CONDITIONS & r.headers.keys()), False, 19),
    ("501 NotImplemented", lambda r: bool(CONDITIONS & r.headers.keys()), False, 19),
    ("412", lambda r: "if-match" in r.headers, False, 19),
    ("412", lambda r: "if-none-match" in r.headers, False, 19),
    # Ceph accepts an ETag only without its quotes; three more writes find this out.
    ("412", lambda r: r.headers.get("if-match", "").startswith('"'), True, 10),
]
"""How a store answers conditional writes, which writes, whether it keeps conditions, and the most
requests that are needed to find out.
"""


@pytest.mark.parametrize(("fault", "when", "is_kept", "most_requests"), STORES)
def test_a_store_is_tested_once_for_whether_it_keeps_conditions(
    fault: str, when: Any, is_kept: bool, most_requests: int, root: Location, proxy: Proxy
) -> None:
    proxy.rules = [Rule(fault, "PUT", times=10**9, when=when)]
    assert (root / "x").try_conditions() is is_kept
    request_count, a = len(proxy.requests), root / "a"
    assert request_count == most_requests if is_kept else request_count <= most_requests
    assert (root / "y").try_conditions() is is_kept
    assert len(proxy.requests) == request_count
    assert list(root.list(recursive=True)) == []
    first = a.create(b"one")
    assert a.create(b"two") is None
    assert a.replace("another", b"two") is None
    assert (a.replace(first.stamp, b"two"), a.read()) == (a.stat(), b"two")
    assert a.replace(first.stamp, b"three") is None
    a.delete()
    assert a.replace(first.stamp, b"three") is None
