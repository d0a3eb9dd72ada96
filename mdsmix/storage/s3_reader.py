"""Reading objects from S3. For a request of a whole object, botocore compares the body with the
checksum that the store sends.
"""

from __future__ import annotations

import io
from functools import partial
from typing import Any

from mdsmix.storage.object_reader import ObjectReader, OpenedBody
from mdsmix.storage.s3_client import answer_unless, ask, stamp_from
from mdsmix.storage.s3_errors import Answer, Object


def read_object(
    url: str,
    target: Object,
    start: int = 0,
    end: int | None = None,
    answer: Answer | None = None,
    stamp: str = "",
) -> ObjectReader:
    """Return a reader of an object, from start to end.

    Args:
        url: what error messages name.
        target: the parameters that name the object: Bucket and Key.
        start: the byte at which reading begins.
        end: the byte at which reading probably ends; None: the end of the object.
        answer: the answer to a GET that was already sent; None: there is none.
        stamp: the ETag of the version to read; "": the newest version.
    """
    opened = _take_body(answer) if answer else None
    open_body = partial(_open_body, target)
    return ObjectReader(url, partial(ask, url), open_body, start, end, opened, stamp)


def _open_body(target: Object, client: Any, start: int, end: int | None, stamp: str) -> OpenedBody:
    """Send a GET for the bytes from `start` on and before `end`, and return the answer's body."""
    request = {**target, "ChecksumMode": "ENABLED"}
    if stamp:
        request["IfMatch"] = f'"{stamp}"'
    if start or end is not None:
        last = "" if end is None else end - 1
        request["Range"] = f"bytes={start}-{last}"
    return _take_body(_get(request, client))


def _take_body(answer: Answer) -> OpenedBody:
    # An empty answer may have no stamp (`_get`).
    return OpenedBody(answer["Body"], stamp_from(answer) if answer["ContentLength"] else "")


def _get(request: Object, client: Any) -> Answer:
    """Return the answer to a GET. If the object ends before the requested range, return an answer
    with an empty body.
    """
    answer = answer_unless(("InvalidRange",), client.get_object, request)
    if answer is None:
        return {"Body": io.BytesIO(), "ContentLength": 0}
    return answer
