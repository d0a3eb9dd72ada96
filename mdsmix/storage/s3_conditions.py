"""Conditional writes (If-None-Match and If-Match of PUT), and a trial of whether a store keeps the
conditions.

AWS has kept conditions since 2024, and MinIO and others do. Some stores ignore them and answer 200
to all (Garage, s3rver). Others look first and write then, so that two writers at one moment both
succeed (S3Mock, s3s-fs). Ceph compares the quoted ETag of If-Match with its own, which has no
quotes, so nothing could be replaced: Ceph is sent the ETag without quotes. Therefore a store that
is not AWS is tried before it is trusted. For a store that fails, `put_if` looks at the object right
before the write, and only the moment between the two stays open. The rule for those stores is in
the README beside this file.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mdsmix.storage.location import Location, Stat
from mdsmix.storage.s3_client import answered, ask, own_stamp
from mdsmix.storage.s3_errors import Answer, Object, error_code

AT_ONCE = 3
"""Writers at once, in a trial of each condition. A store that lets both of two writers through in 9
of 20 rounds passes 1 trial in 36.
"""
_NOT_SO = (
    "PreconditionFailed",
    "412",
    "ConditionalRequestConflict",
    "409",
    "NoSuchKey",
    "404",
)
_UNKNOWN = (
    "NotImplemented",
    "501",
    "MethodNotAllowed",
    "405",
    "InvalidArgument",
    "InvalidRequest",
)
"""Codes of stores for a header that they do not know. A store that kept conditions before and now
answers so has changed, and is refused.
"""

_kept: dict[tuple[str, str], bool] = {}
"""Endpoint and bucket -> whether conditions are kept there; a forked worker knows it from its
parent.
"""
_unquoted: set[tuple[str, str]] = set()
"Endpoints and buckets that take the ETag of If-Match only without its quotes."
_trying = threading.Lock()


def put_if(client: Any, place: Object, content: bytes, stamp: str | None) -> Stat | None:
    """Puts `content` over the object whose ETag is `stamp`, or (None) where no object is. Returns
    None if that is not so.
    """
    from botocore.exceptions import ClientError

    store = client.meta.endpoint_url, place["Bucket"]
    if _kept.get(store) is not False:
        quoted = stamp if store in _unquoted else f'"{stamp}"'
        condition = {"IfNoneMatch": "*"} if stamp is None else {"IfMatch": quoted}
        try:
            return _put(client, place, content, **condition)
        except ClientError as error:
            if error_code(error) in _NOT_SO:
                return None
            if error_code(error) not in _UNKNOWN or _kept.get(store):
                raise
    there = head(place, client)
    is_so = (own_stamp(there) if there else None) == stamp
    found = _put(client, place, content) if is_so else None
    _kept[store] = False  # the plain write succeeded, so the store refused the conditions
    return found


def are_kept(trial: Location, bucket: str) -> bool:
    """Whether the store keeps conditions: tried with the object `trial`, which is deleted again,
    once a run.
    """
    store = ask(trial.url, lambda client: (str(client.meta.endpoint_url), bucket))
    if ".amazonaws.com" in store[0]:
        return _kept.setdefault(store, True)
    with _trying:
        if store not in _kept:
            try:
                kept = _is_kept_in_a_trial(trial, store)
            finally:
                trial.delete()
            _kept[store] = kept and _kept.get(store, True)
    return _kept[store]


def _is_kept_in_a_trial(trial: Location, store: tuple[str, str]) -> bool:
    """True where just one of 3 writers creates an object, and then just one of 3 replaces it, all
    at one moment.
    """

    def writers_let_through(stamp: str | None) -> list[Stat]:
        together = threading.Barrier(AT_ONCE)

        def one(number: int) -> Stat | None:
            together.wait()
            content = f"{number}, where there was {stamp}".encode()
            return trial.create(content) if stamp is None else trial.replace(stamp, content)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [stat for stat in pool.map(one, range(AT_ONCE)) if stat]

    created = writers_let_through(None)
    if len(created) != 1:
        return False
    replaced = writers_let_through(created[0].stamp)
    if not replaced:
        _unquoted.add(store)
        replaced = writers_let_through(created[0].stamp)
    return len(replaced) == 1


def head(place: Object, client: Any) -> Answer | None:
    """The answer to a HEAD; None for a missing object or a missing bucket, which a HEAD does not
    tell apart.
    """
    return answered(client.head_object, place, "404")


def _put(client: Any, place: Object, content: bytes, **condition: Any) -> Stat:
    answer = client.put_object(**place, Body=content, **condition)
    return Stat(len(content), own_stamp(answer), time.time())
