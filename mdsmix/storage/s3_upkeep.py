"""The two requests that only upkeep makes: writing on a condition, and finding uploads that were left behind.

A condition is the store's to keep (If-None-Match and If-Match of PUT, known to AWS since 2024 and to MinIO). A store that
says it cannot is written to without: whoever asks has looked before, so only two at the very same moment may be missed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mdsmix.storage.location import Stat, Unfinished
from mdsmix.storage.s3_client import ask
from mdsmix.storage.s3_errors import error_code

_NOT_SO = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404")


def put_if(client: Any, place: dict[str, str], content: bytes, stamp: str | None) -> Stat | None:
    """Puts `content` where an object has this ETag, or where (None) there is none; None where that is not so."""
    from botocore.exceptions import ClientError

    condition = {"IfNoneMatch": "*"} if stamp is None else {"IfMatch": f'"{stamp}"'}
    try:
        answer = client.put_object(**place, Body=content, **condition)
    except ClientError as error:
        if error_code(error) in _NOT_SO:
            return None
        if error_code(error) != "NotImplemented":
            raise
        answer = client.put_object(**place, Body=content)
    return Stat(len(content), answer["ETag"].strip('"'), time.time())


def uploads(url: str, bucket: str, prefix: str) -> Iterator[Unfinished]:
    """The uploads in parts that were begun below `prefix`, picked out here: MinIO takes a prefix for a whole key."""
    wanted = {"Bucket": bucket}
    while True:
        page = ask(url, partial(_page, wanted))
        for upload in page.get("Uploads", []):
            if upload["Key"].startswith(prefix):
                yield _unfinished(bucket, upload, prefix)
        if not page["IsTruncated"]:
            return
        wanted["KeyMarker"] = page["NextKeyMarker"]
        wanted["UploadIdMarker"] = page["NextUploadIdMarker"]


def _page(wanted: dict[str, str], client: Any) -> dict[str, Any]:
    page: dict[str, Any] = client.list_multipart_uploads(**wanted)
    return page


def _unfinished(bucket: str, upload: dict[str, Any], prefix: str) -> Unfinished:
    which = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
    size = ask(f"s3://{bucket}/{upload['Key']}", partial(_size, which))
    begun = upload["Initiated"].timestamp()
    return Unfinished(upload["Key"][len(prefix) :], size, begun, partial(_abort, which))


def _size(which: dict[str, str], client: Any) -> int:
    size = 0
    with _gone_is_fine():
        for page in client.get_paginator("list_parts").paginate(**which):
            size += sum(part["Size"] for part in page.get("Parts", []))
    return size


def _abort(which: dict[str, str]) -> None:
    def abort(client: Any) -> None:
        with _gone_is_fine():
            client.abort_multipart_upload(**which)

    ask(f"s3://{which['Bucket']}/{which['Key']}", abort)


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    """An upload may be finished or taken back between any two looks at it."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error_code(error) != "NoSuchUpload":
            raise
