"""Bodies on their way to a store that damages them, and what boto3 of 2025 says of their checksums."""

import base64
import hashlib
import os
import zlib

import boto3
import pytest

from mdsmix.errors import Unreachable
from mdsmix.storage import Location, locate, s3_client
from tests.faults import Proxy, Rule

DATA = os.urandom(11 << 20)
UNHEARD = ("lost answer", "500 after the work", "cut short")
"The store did the work, and its answer did not come."


@pytest.fixture
def root(bucket: str) -> Location:
    return locate(f"s3://{bucket}/a folder")


def put(root: Location) -> None:
    (root / "x").write(DATA[: 6 << 20], DATA[6 << 20 :])


@pytest.mark.usefixtures("impatient")
def test_a_large_object_is_asked_for_again(root: Location, proxy: Proxy) -> None:
    for fault in ("silence", "503", "reset in the request", "damaged", *UNHEARD):
        proxy.requests.clear()
        proxy.rules = [Rule(fault, "PUT")]
        put(root)
        assert (root / "x").read() == DATA
        proxy.rules = [] if fault in ("damaged", "silence") else [Rule(fault, "PUT")]
        (root / "x").copy_to(root / "copy")
        assert (root / "copy").read() == DATA
        assert not any(rule.times for rule in proxy.rules)
        sent = [request for request in proxy.requests if request.operation == "PUT"]
        assert 2 <= len(sent) <= 4, "a write and a copy, each of which met the fault once"


@pytest.mark.parametrize("checksums", ["when_required", "when_supported"])
def test_what_is_said_of_a_body_holds_it_whole_with_and_without_new_checksums(
    checksums: str, root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is not AWS is sent no checksum header of 2025: MinIO takes them, others refuse them, and the
    signature covers the SHA-256 of every body anyway, so a damaged one is refused and sent again either way."""
    monkeypatch.setattr(s3_client, "_CHECKSUMS", checksums)
    proxy.rules = [Rule("damaged", "PUT"), Rule("damaged", "PUT", skip=1)]
    (root / "small").write(b"1234")
    put(root)
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
    boto3.client("s3", endpoint_url=minio).put_object(
        **place, Body=b"12345678", ChecksumAlgorithm="CRC32"
    )
    for read in (at.read, at.fetch, lambda: at.open().read()):
        proxy.rules = [Rule("damaged answer", "GET")]
        with pytest.raises(Unreachable, match="the bytes that came are not those that were stored"):
            read()
        assert at.read() == b"12345678"
    proxy.rules = [Rule("damaged answer", "GET")]
    assert at.read(0, 4) == b"1235"
