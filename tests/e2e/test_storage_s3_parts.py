"""Objects in parts at a store that fails, and what boto3 of 2025 says of their checksums."""

from __future__ import annotations

import base64
import hashlib
import os
import zlib
from collections.abc import Callable

import boto3
import pytest

from mdsmix.errors import Unreachable
from mdsmix.storage import Location, locate, s3, s3_client
from tests.faults import Proxy, Rule

DATA = os.urandom(11 << 20)
STEPS = {"begin": "POST uploads", "a part": "PUT part", "complete": "POST upload"}
CHECKSUMS = ("when_required", "when_supported")


@pytest.fixture
def root(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Location:
    """Parts of 5 MiB, the least that a store takes."""
    for name in ("_PART_BYTES", "_COPY_BYTES"):
        monkeypatch.setattr(s3, name, 5 << 20)
    return locate(f"s3://{bucket}/a folder")


def put(root: Location) -> None:
    (root / "x").write(DATA[: 6 << 20], DATA[6 << 20 :])


def copied(root: Location) -> None:
    (root / "from").copy_to(root / "x")


ACTIONS: dict[str, Callable[[Location], None]] = {"put": put, "copied": copied}


def left(root: Location) -> list[tuple[str, int]]:
    return [(upload.name, upload.size) for upload in root.unfinished()]


BREAKS = ("503", "reset in the request", "damaged", "silence")
UNHEARD = ("lost answer", "500 after the work", "cut short")
"The store did the work, and its answer did not come."


@pytest.mark.parametrize("fault", [*BREAKS, *UNHEARD])
def test_each_step_is_asked_for_again_and_no_part_twice(
    fault: str, root: Location, proxy: Proxy
) -> None:
    (root / "from").write(DATA)
    for action in ACTIONS.values():
        proxy.requests.clear()
        steps = STEPS.values() if fault not in ("silence", "damaged") else ["PUT part"]
        proxy.rules = [Rule(fault, step) for step in steps]
        proxy.rules += [Rule(fault, "PUT part", skip=1)]
        action(root)
        assert not any(rule.times for rule in proxy.rules)
        assert (root / "x").read() == DATA
        sent = [request for request in proxy.requests if request.operation == "PUT part"]
        assert 3 <= len(sent) <= 5, "three parts, two of which met the fault"
        (root / "x").delete()
    unheard = [("x", 0)] * (2 if fault in UNHEARD else 0)
    assert left(root) == unheard, "of an upload whose beginning nobody heard of only gc knows"
    for upload in root.unfinished():
        upload.discard()
    assert left(root) == []


@pytest.mark.parametrize(
    ("fault", "step", "action"),
    [
        ("500", "a part", "put"),
        ("500", "complete", "put"),
        ("400", "a part", "put"),
        ("reset", "a part", "copied"),
    ],
)
def test_an_upload_that_is_given_up_is_taken_back(
    fault: str,
    step: str,
    action: str,
    root: Location,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (root / "from").write(DATA)
    monkeypatch.setattr(s3_client, "_LATER_SECONDS", 0.2)
    proxy.rules = [Rule(fault, STEPS[step], times=999, skip=step == "a part")]
    with pytest.raises(Unreachable, match=r"cannot reach s3://.*/a folder/"):
        ACTIONS[action](root)
    assert left(root) == []
    assert (root / "x").stat() is None


def test_what_cannot_be_taken_back_either_is_found_later(
    root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "_LATER_SECONDS", 0.2)
    monkeypatch.setattr("mdsmix.storage.s3_parts._TAKE_BACK_SECONDS", 0.2)
    proxy.rules = [Rule("500", "(PUT part|DELETE upload)", times=999, skip=1)]
    with pytest.raises(Unreachable, match="the store failed inside"):
        put(root)
    proxy.rules = []
    assert left(root) == [("x", 5 << 20)]
    next(iter(root.unfinished())).discard()
    assert left(root) == []


def test_an_object_that_is_replaced_while_it_is_copied_is_refused(
    root: Location, proxy: Proxy
) -> None:
    (root / "from").write(DATA)
    proxy.rules = [Rule("503", "PUT part", then=lambda: (root / "from").write(DATA[:-1]))]
    with pytest.raises(Unreachable, match="the object was replaced while it was being read"):
        copied(root)
    assert left(root) == []


@pytest.mark.parametrize("checksums", CHECKSUMS)
def test_what_is_said_of_a_body_holds_it_whole_with_and_without_new_checksums(
    checksums: str, root: Location, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is not AWS is sent no checksum header of 2025: MinIO takes them, others refuse them, and the
    signature covers the SHA-256 of every body anyway, so a damaged one is refused and sent again either way."""
    monkeypatch.setattr(s3_client, "_CHECKSUMS", checksums)
    proxy.rules = [Rule("damaged", "PUT"), Rule("damaged", "PUT part", skip=1)]
    (root / "small").write(b"1234")
    put(root)
    copied_from = root / "x"
    copied_from.copy_to(root / "copy")
    assert not any(rule.times for rule in proxy.rules)
    assert ((root / "small").read(), (root / "copy").read()) == (b"1234", DATA)
    bodies = [r for r in proxy.requests if r.operation in ("PUT", "PUT part") and r.body]
    for request in bodies:
        said, sha = request.headers, hashlib.sha256(request.body).hexdigest()
        is_damaged = request.fault == "damaged"
        assert (said["x-amz-content-sha256"] == sha) is not is_damaged
        assert "content-encoding" not in said
        crc = base64.b64encode(zlib.crc32(request.body).to_bytes(4, "big")).decode()
        assert (said.get("x-amz-checksum-crc32") == crc) is (
            checksums == "when_supported" and not is_damaged
        )
        assert ("x-amz-sdk-checksum-algorithm" in said) is (checksums == "when_supported")
    assert len(bodies) == 1 + 1 + 3 + 1


def test_bytes_that_are_not_those_that_were_stored_are_refused_where_a_checksum_tells(
    root: Location, proxy: Proxy, bucket: str, minio: str
) -> None:
    place = {"Bucket": bucket, "Key": "a folder/sum"}
    boto3.client("s3", endpoint_url=minio).put_object(
        **place, Body=b"12345678", ChecksumAlgorithm="CRC32"
    )
    proxy.rules = [Rule("damaged answer", "GET")]
    with pytest.raises(Unreachable, match="the bytes that came are not those that were stored"):
        (root / "sum").read()
    assert (root / "sum").read() == b"12345678"
