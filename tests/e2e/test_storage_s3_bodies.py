"""Bodies on their way to a store that damages them, and what boto3 of 2025 says of their checksums. Objects are read from anywhere
by few requests, of one version, taken up again where a body breaks."""

import base64
import hashlib
import io
import os
import zlib

import boto3
import pytest

from mdsmix.errors import Unreachable
from mdsmix.storage import Location, locate, s3_client
from tests.counting import counted
from tests.faults import Proxy, Rule

DATA = os.urandom(11 << 20)


@pytest.fixture
def root(bucket: str) -> Location:
    return locate(f"s3://{bucket}/a folder")


@pytest.mark.parametrize("checksums", ["when_required", "when_supported"])
def test_what_is_said_of_a_body_holds_it_whole_with_and_without_new_checksums(
    checksums: str, root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is not AWS is sent no checksum header of 2025: MinIO takes them, others refuse them, and the
    signature covers the SHA-256 of every body anyway, so a damaged one is refused and sent again either way."""
    monkeypatch.setattr(s3_client, "_CHECKSUMS", checksums)
    proxy.rules = [Rule("damaged", "PUT"), Rule("damaged", "PUT", skip=1)]
    (root / "small").write(b"1234")
    (root / "x").write(DATA[: 6 << 20], DATA[6 << 20 :])
    (root / "x").copy_to(root / "copy")
    assert not any(rule.times for rule in proxy.rules)
    assert ((root / "small").read(), (root / "copy").read()) == (b"1234", DATA)
    bodies = [r for r in proxy.requests if r.operation == "PUT" and r.body]
    for request in bodies:
        said, sha = request.headers, hashlib.sha256(request.body).hexdigest()
        is_whole, is_new = request.fault != "damaged", checksums == "when_supported"
        crc = base64.b64encode(zlib.crc32(request.body).to_bytes(4, "big")).decode()
        assert (said["x-amz-content-sha256"] == sha) is is_whole
        assert "content-encoding" not in said
        assert (said.get("x-amz-checksum-crc32") == crc) is (is_new and is_whole)
        assert ("x-amz-sdk-checksum-algorithm" in said) is is_new
    assert len(bodies) == 2 + 2


def test_bytes_that_are_not_those_that_were_stored_are_refused_where_a_checksum_tells(
    root: Location, proxy: Proxy, bucket: str, minio: str
) -> None:
    """A store knows the checksum of an object, and not of a range of it."""
    place, at = {"Bucket": bucket, "Key": "a folder/sum"}, root / "sum"
    store = boto3.client("s3", endpoint_url=minio)
    store.put_object(**place, Body=b"12345678", ChecksumAlgorithm="CRC32")
    for read in (at.read, at.fetch, lambda: at.open().read()):
        proxy.rules = [Rule("damaged answer", "GET")]
        with pytest.raises(Unreachable, match="the bytes that came are not those that were stored"):
            read()
        assert at.read() == b"12345678"
    proxy.rules = [Rule("damaged answer", "GET")]
    assert at.read(0, 4) == b"1235"


PART = DATA[: 5 << 20]


@pytest.fixture
def place(root: Location) -> Location:
    (root / "archive").write(PART)
    return root / "archive"


def test_nothing_is_asked_for_until_something_is_read(place: Location, proxy: Proxy) -> None:
    place.write(b"abc")
    (place.parent / "empty").write()
    whole, none = place.stat(), (place.parent / "empty").stat()
    with counted(proxy) as seen:
        with (place.parent / "empty").open_random(none) as file:
            assert (file.read(), file.read(5), file.seek(0, io.SEEK_END)) == (b"", b"", 0)
        with place.open_random(whole) as file:
            assert (file.read(0), file.seek(7), file.read(1), file.tell()) == (b"", 7, b"", 7)
    assert seen.total == 0
    with counted(proxy) as seen, place.open_random(whole, ahead=2) as file:
        assert (file.read(1), file.read(9), file.read()) == (b"a", b"bc", b"")
    assert [r.headers["range"] for r in seen.requests] == ["bytes=0-1", "bytes=2-2"]


def test_an_object_that_is_replaced_in_between_is_refused(place: Location) -> None:
    with place.open_random(place.stat(), ahead=1000) as file:
        assert file.read(10) == PART[:10]
        place.write(PART)
        assert file.read(10) == PART[10:20], "held since the first request"
        place.write(PART[::-1])
        file.seek(2_000_000)
        with pytest.raises(Unreachable, match="replaced while it was being read"):
            file.read(1)


def test_small_reads_are_a_request_a_megabyte_and_one_that_fails_is_made_again(
    place: Location, proxy: Proxy
) -> None:
    stat, faults = place.stat(), ("503", "cut short", "reset in the answer")
    proxy.rules = [Rule(fault, "GET", "archive") for fault in faults]
    with counted(proxy) as seen, place.open_random(stat) as file:
        assert b"".join(iter(lambda: file.read(10_000), b"")) == PART
    assert [len(proxy.met(fault)) for fault in faults] == [1, 1, 1]
    assert seen.by_operation == {"GET": 5 + len(faults)}, str(seen)
    assert all(r.headers["if-match"] == f'"{stat.stamp}"' for r in seen.requests)
