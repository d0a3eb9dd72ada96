"""The S3 client of a process, and its retries.

boto3's own retries differ between releases (four retries take 0.4 s in 2026, and took 8 s before).
So they are switched off, and mdsmix retries itself. Requests to an endpoint that has answered
before are retried through 90 s of failures in a row, long enough for a server to restart. Requests
to an endpoint that has never answered are retried for 3 s, so that a wrong address is reported
soon. Expired credentials are read again once: boto3 reads a credentials file only when it starts,
and somebody may have renewed the file since.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from mdsmix.errors import Unreachable
from mdsmix.storage.location import Stat
from mdsmix.storage.notices import show_notice
from mdsmix.storage.s3_errors import (
    Answer,
    error_classes,
    error_code,
    has_expired,
    is_temporary,
    make_refusal,
    shown_endpoint,
    waiting_sentence,
)

T = TypeVar("T")

_FIRST_SECONDS = 3.0
_LATER_SECONDS = 90.0
_FIRST_PAUSE_SECONDS = 0.25
"""The upper limit of the first pause. The limit doubles with each pause, and a pause is a random
time between 0 and its limit.
"""
_LONGEST_PAUSE_SECONDS = 8.0
_CONNECT_SECONDS = 5
_READ_SECONDS = 30
# Other stores get no checksum headers of 2025: many refuse them, and the signature covers the body
# anyway.
_CHECKSUMS = "when_required"

_answered: set[str] = set()
"Endpoints that have answered; a forked worker knows them from its parent."
_given_up: set[str] = set()
"""Endpoints at which a request has failed for good. Later requests there, such as those for
cleaning up, are retried for _FIRST_SECONDS only.
"""
NOTICE_SECONDS = 5.0
"""Seconds of failures in a row after which the user is shown that a request waits. Many servers
restart faster.
"""
_waited_for: set[str] = set()
"Endpoints whose wait was shown since they last answered."


def show_wait(endpoint: str, sentence: str) -> None:
    """Show the sentence once for all requests that wait for this endpoint."""
    if endpoint not in _waited_for:
        _waited_for.add(endpoint)
        show_notice(sentence)


_client_lock = threading.RLock()
os.register_at_fork(
    before=_client_lock.acquire,
    after_in_parent=_client_lock.release,
    after_in_child=_client_lock.release,
)


def ask(url: str, request: Callable[[Any], T]) -> T:
    """Send a request to the store, and return its result. Temporary failures are retried.

    Args:
        url: what error messages name.
        request: called at each try with a client of boto3; returns the result.

    Raises Unreachable if the request fails for good.
    """
    from botocore.exceptions import ClientError

    start = time.monotonic()
    tries = 0  # that have failed
    has_renewed = False  # whether the credentials were read again
    while True:
        client = _client_for(url)
        endpoint = client.meta.endpoint_url
        try:
            answer = request(client)
        except error_classes() as error:
            if isinstance(error, ClientError):  # the store has answered, with an error
                _answered.add(endpoint)
            if has_expired(error) and not has_renewed:
                has_renewed = True
                _make_client.cache_clear()  # a new client reads the credentials again
                continue
            if endpoint in _answered and not tries:
                # This store works: measure the time of the retries alone, from the first failure
                # on, since a large body may have taken long before it.
                start = time.monotonic()
            tries += 1
            _pause(url, endpoint, error, tries, time.monotonic() - start)
        else:
            _answered.add(endpoint)
            _given_up.discard(endpoint)
            _waited_for.discard(endpoint)  # the next wait is shown again
            return answer


def _pause(url: str, endpoint: str, error: Exception, tries: int, seconds: float) -> None:
    """Sleep until the next try of a request. The time is random, and its limit grows each time.

    Args:
        url: what error messages name.
        endpoint: the address of the store.
        error: the failure of the last try.
        tries: how many tries have failed.
        seconds: how long these tries took together.

    Raises Unreachable if the request is not tried again.
    """
    # Wait long only for an endpoint that has answered before, and has not failed for good since.
    is_trusted = endpoint in _answered and endpoint not in _given_up
    patience = _LATER_SECONDS if is_trusted else _FIRST_SECONDS
    can_retry = is_temporary(error)
    if seconds >= patience or not can_retry:
        if can_retry:
            _given_up.add(endpoint)
        raise make_refusal(url, error, tries, seconds) from None
    if seconds > NOTICE_SECONDS:
        show_wait(endpoint, waiting_sentence(error, patience))
    longest = min(_FIRST_PAUSE_SECONDS * 2 ** (tries - 1), _LONGEST_PAUSE_SECONDS)
    time.sleep(min(random.uniform(0, longest), patience - seconds))


def answer_unless(
    codes: Collection[str], request: Callable[..., Any], parameters: Mapping[str, Any]
) -> Answer | None:
    """Send one request, and return the store's answer; None if the store answers with an error
    that has one of these codes.

    Args:
        codes: error codes, such as `404`.
        request: the method of a boto3 client to call.
        parameters: the arguments of the method.
    """
    from botocore.exceptions import ClientError

    try:
        answer: Answer = request(**parameters)
    except ClientError as error:
        if error_code(error) in codes:
            return None
        raise
    return answer


def find_credentials() -> str:
    """Return where boto3 found the credentials: `env`, `shared-credentials-file`, `iam-role`, ...

    Raises Unreachable if boto3 found no credentials.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, NoCredentialsError

    try:
        credentials = boto3.session.Session().get_credentials()
        if credentials is None:
            raise NoCredentialsError
    except BotoCoreError as error:
        raise make_refusal("s3://", error) from None
    return str(credentials.method)


def _client_for(url: str) -> Any:
    """Return the boto3 client of this process.

    Args:
        url: what the error message names.

    Raises Unreachable if no client can be made.
    """
    from botocore.exceptions import BotoCoreError

    # A new client is made if one of the variables that set its options has changed.
    prefixes = ("AWS_", "S3_")
    settings = [(name, value) for name, value in os.environ.items() if name.startswith(prefixes)]
    settings.sort()
    try:
        with _client_lock:  # otherwise each of 16 threads would make a client, 0.3 s each
            return _make_client(os.getpid(), tuple(settings))
    except (BotoCoreError, ValueError) as error:
        raise make_refusal(url, error) from None


@lru_cache(maxsize=8)
def _make_client(pid: int, settings: tuple[tuple[str, str], ...]) -> Any:
    """Return a boto3 client, cached by process and settings.

    Args:
        pid: the process: a forked process must not share the sockets of its parent's client.
        settings: (name, value) of the environment variables that set the client's options.
    """
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
    # For any other store, the bucket is in the path: these stores have no DNS names for buckets.
    path_style = Config(s3={"addressing_style": "path"}, request_checksum_calculation=_CHECKSUMS)
    return session.client("s3", endpoint_url=endpoint, config=config.merge(path_style))


def stat_from(answer: Answer) -> Stat:
    """Return the Stat of an object.

    Args:
        answer: the store's answer to a request for the object, or the object's entry in a listing.
            Some stores leave out the ETag in listings; the stamp is then "".

    Raises Unreachable if the answer has no time, or if an answer about one object has no ETag.
    """
    modified = answer.get("LastModified")
    if not modified:
        raise _lacking_header_error("Last-Modified")
    if "Size" in answer:  # an entry of a listing
        return Stat(answer["Size"], _stamp(answer), modified.timestamp())
    return Stat(answer["ContentLength"], stamp_from(answer), modified.timestamp())


def stamp_from(answer: Answer) -> str:
    """Return the ETag from an answer about one object, without its quotes.

    Raises Unreachable if the answer has no ETag.
    """
    stamp = _stamp(answer)
    if not stamp:
        raise _lacking_header_error("ETag")
    return stamp


def _stamp(answer: Answer) -> str:
    """Return the ETag of an answer without its quotes; "" if the answer has no ETag.

    The beginning `W/` is also removed: proxies that compress add it, but the store compares ETags
    without it.
    """
    return str(answer.get("ETag", "")).removeprefix("W/").strip('"')


def _lacking_header_error(header: str) -> Unreachable:
    """Return the error for the user about a store whose answer lacks this header."""
    return Unreachable(
        f"the store at {shown_endpoint()} answers without {header}, so mdsmix cannot see whether "
        "an object was changed or is still in use: look up in the store's manual which parts of "
        "S3 it supports, or use another store."
    )
