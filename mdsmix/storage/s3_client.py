"""The S3 client of a process, its retries, and the sentences that are shown during a wait.

boto3's own retries differ by release (four of them last 0.4 s in 2026, and 8 s before), so they are
off and the retries are here. An endpoint that has answered before is asked through 90 s of failures
in a row, which outlasts a server's restart. One that never has is asked for 3 s, so that a wrong
address is told at once. Expired credentials are read anew once: boto3 reads a credentials file only
when it starts, and somebody may have renewed the file since.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from mdsmix.errors import Unreachable
from mdsmix.messages import Say, make_printable
from mdsmix.storage.location import Stat
from mdsmix.storage.s3_errors import (
    Answer,
    error_code,
    failures,
    has_expired,
    may_pass,
    refusal,
    shown_endpoint,
    waiting_sentence,
)

T = TypeVar("T")

_FIRST_SECONDS = 3.0
_LATER_SECONDS = 90.0
_PAUSE_SECONDS = 0.25, 8.0  # the first pause and the longest, each drawn from 0 up
_CONNECT_SECONDS = 5
_READ_SECONDS = 30
# Other stores get no checksum headers of 2025: many refuse them, and the signature covers the body
# anyway.
_CHECKSUMS = "when_required"

_answered: set[str] = set()
"Endpoints that have answered; a forked worker knows them from its parent."
_given_up: set[str] = set()
"""Endpoints at which a request was given up. Later requests there, as for cleaning up, are retried
for _FIRST_SECONDS only.
"""

AFTER = 5.0
"Seconds of failures in a row before a wait is said: a server that restarts quickly is no news."
_told: set[str] = set()
"Endpoints whose wait was said since they last answered."


def _to_stderr(sentence: str) -> None:
    print(make_printable(sentence), file=sys.stderr, flush=True)


_say: Say = _to_stderr


def tell(endpoint: str, sentence: str) -> None:
    """Says the sentence once for all requests that wait for this endpoint."""
    if endpoint not in _told:
        _told.add(endpoint)
        _say(sentence)


@contextmanager
def said_by(say: Say) -> Iterator[None]:
    """Makes `say` the function that shows sentences within the block, as while a progress bar is
    drawn. Any thread that waits calls it.
    """
    global _say
    before, _say = _say, say
    try:
        yield
    finally:
        _say = before


_making = threading.RLock()
os.register_at_fork(
    before=_making.acquire,
    after_in_parent=_making.release,
    after_in_child=_making.release,
)


def ask(url: str, request: Callable[[Any], T]) -> T:
    """The result of `request(client)`. Failures that may pass are retried; then Unreachable with
    one sentence.
    """
    from botocore.exceptions import ClientError

    began, tries, is_reopened = time.monotonic(), 0, False
    while True:
        client = _client_for(url)
        endpoint = client.meta.endpoint_url
        try:
            answer = request(client)
        except failures() as error:
            if isinstance(error, ClientError):
                _answered.add(endpoint)
            if has_expired(error) and not is_reopened:
                is_reopened = True
                _client.cache_clear()
                continue
            if endpoint in _answered and not tries:
                began = time.monotonic()  # a large body may have gone well for long before it broke
            tries += 1
            _pause(url, endpoint, error, tries, time.monotonic() - began)
        else:
            _answered.add(endpoint)
            _given_up.discard(endpoint)
            _told.discard(endpoint)  # the next wait is said again
            return answer


def _pause(url: str, endpoint: str, error: Exception, tries: int, passed: float) -> None:
    """Sleeps until the next try of a request, longer each time; raises the refusal where no further
    try is due. `passed`: seconds of `tries` tries that failed.
    """
    is_trusted = endpoint in _answered and endpoint not in _given_up
    patience = _LATER_SECONDS if is_trusted else _FIRST_SECONDS
    passes = may_pass(error)
    if passed >= patience or not passes:
        if passes:
            _given_up.add(endpoint)
        raise refusal(url, error, tries, passed) from None
    if passed > AFTER:
        tell(endpoint, waiting_sentence(error, patience))
    first, longest = _PAUSE_SECONDS
    pause = random.uniform(0, min(first * 2 ** (tries - 1), longest))
    time.sleep(min(pause, patience - passed))


def answered(
    request: Callable[..., Any], wanted: Mapping[str, Any], *nothing: str
) -> Answer | None:
    """The store's answer to one request; None where it is an error with one of the codes
    `nothing`.
    """
    from botocore.exceptions import ClientError

    try:
        answer: Answer = request(**wanted)
    except ClientError as error:
        if error_code(error) in nothing:
            return None
        raise
    return answer


def credentials_from() -> str:
    """Where boto3 found the credentials: `env`, `shared-credentials-file`, `iam-role`, ...;
    Unreachable where there are none.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, NoCredentialsError

    try:
        found = boto3.session.Session().get_credentials()
        if found is None:
            raise NoCredentialsError
    except BotoCoreError as error:
        raise refusal("s3://", error) from None
    return str(found.method)


def _client_for(url: str) -> Any:
    from botocore.exceptions import BotoCoreError

    # A client is made anew where a variable that shapes it has changed.
    settings = sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "S3_")))
    try:
        with _making:  # else each of 16 threads makes one: 0.3 s of a processor
            return _client(os.getpid(), tuple(settings))
    except (BotoCoreError, ValueError) as error:
        raise refusal(url, error) from None


@lru_cache(maxsize=8)
def _client(pid: int, settings: tuple[tuple[str, str], ...]) -> Any:
    """One client for each process, since a forked process must not share its parent's sockets."""
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=32,
    )
    session = boto3.session.Session()
    endpoint = os.environ.get("S3_ENDPOINT_URL") or None
    client = session.client("s3", endpoint_url=endpoint, config=config)
    if ".amazonaws.com" in client.meta.endpoint_url:
        return client
    # The bucket stands in the path, since other stores have no DNS names for buckets.
    other = Config(s3={"addressing_style": "path"}, request_checksum_calculation=_CHECKSUMS)
    return session.client("s3", endpoint_url=endpoint, config=config.merge(other))


def said_stat(said: Answer) -> Stat:
    """Stat from a store's answer on one object, or from an entry of a listing. Some stores list no
    ETag: then the stamp is empty.
    """
    modified = said.get("LastModified") or _refuse("Last-Modified")
    if "Size" in said:
        return Stat(said["Size"], _stamp(said), modified.timestamp())
    return Stat(said["ContentLength"], own_stamp(said), modified.timestamp())


def own_stamp(said: Answer) -> str:
    """The ETag of one object, without its quotes."""
    return _stamp(said) or _refuse("ETag")


def _stamp(said: Answer) -> str:
    """The ETag without quotes, and without the `W/` that a compressing proxy puts before it: the
    store knows the ETag without.
    """
    return str(said.get("ETag", "")).removeprefix("W/").strip('"')


def _refuse(name: str) -> Any:
    raise Unreachable(
        f"the store at {shown_endpoint()} answers without {name}, so an object that was changed, or is still in use, could not be told "
        "from others: look up in its manual what it knows of S3, or take another one."
    )
