"""Uploads in parts that were left behind: finding them and taking them back, as far as the store and the rights allow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mdsmix.storage.location import NotListed, Unfinished
from mdsmix.storage.s3_client import ask
from mdsmix.storage.s3_errors import error_code

_DENIED = ("AccessDenied", "AllAccessDisabled", "403")
_NOT_OFFERED = ("NotImplemented", "501", "MethodNotAllowed", "405", "NoSuchUpload", "404")
"What stores answer that list no uploads; two of them say NoSuchUpload where there is none."
_LIFECYCLE = "let the store itself delete such leftovers after some days (a lifecycle rule)"


def uploads(url: str, bucket: str, prefix: str) -> Iterator[Unfinished]:
    """The uploads in parts that were begun below `prefix`, picked out here: MinIO takes a prefix for a whole key."""
    wanted = {"Bucket": bucket}
    while True:
        page = ask(url, partial(_page, url, wanted))
        for upload in page.get("Uploads", []):
            if upload["Key"].startswith(prefix):
                yield _unfinished(bucket, upload, prefix)
        if not page["IsTruncated"]:
            return
        wanted["KeyMarker"] = page["NextKeyMarker"]
        wanted["UploadIdMarker"] = page["NextUploadIdMarker"]


def _page(url: str, wanted: dict[str, str], client: Any) -> dict[str, Any]:
    from botocore.exceptions import ClientError

    try:
        page: dict[str, Any] = client.list_multipart_uploads(**wanted)
    except ClientError as error:
        if error_code(error) in _DENIED:
            raise NotListed(
                f"unfinished uploads below {url} were not looked for: these credentials lack the right "
                f"s3:ListBucketMultipartUploads on the bucket; give it to them, or {_LIFECYCLE}"
            ) from None
        if error_code(error) in _NOT_OFFERED:
            raise NotListed(
                f"unfinished uploads below {url} were not looked for: the store does not list them "
                f"({error_code(error)}); {_LIFECYCLE}"
            ) from None
        raise
    return page


def _unfinished(bucket: str, upload: dict[str, Any], prefix: str) -> Unfinished:
    which = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
    size = ask(f"s3://{bucket}/{upload['Key']}", partial(_size, which))
    begun = upload["Initiated"].timestamp()
    return Unfinished(upload["Key"][len(prefix) :], size, begun, partial(_abort, which))


def _size(which: dict[str, str], client: Any) -> int:
    """Of its parts, as far as the store tells."""
    size = 0
    with _fine("NoSuchUpload", *_DENIED, *_NOT_OFFERED):
        for page in client.get_paginator("list_parts").paginate(**which):
            size += sum(part["Size"] for part in page.get("Parts", []))
    return size


def _abort(which: dict[str, str]) -> None:
    def abort(client: Any) -> None:
        with _fine("NoSuchUpload"):
            client.abort_multipart_upload(**which)

    ask(f"s3://{which['Bucket']}/{which['Key']}", abort)


@contextmanager
def _fine(*codes: str) -> Iterator[None]:
    """These answers end it: an upload may be finished or taken back between any two looks at it."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error_code(error) not in codes:
            raise
