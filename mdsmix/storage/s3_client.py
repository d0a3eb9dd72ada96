"""The one client of a process, how patiently it asks, and every way in which a store says no.

boto3's own retries differ by release (in 2026 four of them last 0.4 s, before 8 s), so patience is
kept here: a minute where the endpoint has answered before, which outlasts a server that restarts,
and three seconds where it never has, so that a wrong address is told at once. Messages are built
from error codes alone: the store's own words may quote a key.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from mdsmix.errors import Unreachable

T = TypeVar("T")

_FIRST_SECONDS = 3
_LATER_SECONDS = 60
_CONNECT_SECONDS = 5
_READ_SECONDS = 30
_QUICK_ATTEMPTS = 2  # inside boto3, for one part of a large upload

_CODES = {
    "NoSuchBucket": "the bucket does not exist; create it or correct its name",
    "InvalidBucketName": "this is not a valid bucket name (at least 3 letters); correct it",
    "NoSuchKey": "there is no such object; check the path",
    "404": "there is no such object or bucket; check the path",
    "InvalidAccessKeyId": "the store does not know this access key; correct AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is wrong; correct AWS_SECRET_ACCESS_KEY",
    "InvalidToken": "the session token is not valid; renew the credentials",
    "ExpiredToken": "the credentials have expired; renew them and run the same command again",
    "ExpiredTokenException": "the credentials have expired; renew them and run the command again",
    "AccessDenied": "access denied; give these credentials the right to do this here",
    "AllAccessDisabled": "access denied; give these credentials the right to do this here",
    "403": "access denied, or wrong credentials; check both",
    "RequestTimeTooSkewed": "this machine's clock is off by minutes; set it right",
    "AuthorizationHeaderMalformed": "the region is wrong; set AWS_DEFAULT_REGION to the bucket's",
    "PermanentRedirect": "the bucket is in another region; set AWS_DEFAULT_REGION to it",
    "301": "the bucket is in another region; set AWS_DEFAULT_REGION to it",
    "400": "the store refuses the request; check the region, the credentials and the clock",
    "PreconditionFailed": "the object was replaced while it was being read; run the command again",
    "412": "the object was replaced while it was being read; run the command again",
    "SlowDown": "the store asks to slow down, and did not recover; run the command again later",
    "ServiceUnavailable": "the store is overloaded or down; run the command again later",
    "InternalError": "the store failed inside; run the command again later",
    "XMinioStorageFull": "the store's disk is full; free some space and run the command again",
    "QuotaExceeded": "the store's quota is used up; free some space and run the command again",
}
_ADDRESS = "set S3_ENDPOINT_URL to an address such as http://localhost:9000"
_EXCEPTIONS = {
    "NoCredentialsError": "no credentials were found; set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "PartialCredentialsError": "a half of the credentials is missing; set both AWS_ACCESS_KEY_ID "
    "and AWS_SECRET_ACCESS_KEY",
    "ProfileNotFound": "the profile that AWS_PROFILE names does not exist; correct it",
    "SSLError": "the TLS connection failed; check http:// against https://, and AWS_CA_BUNDLE",
    "EndpointConnectionError": f"nothing answers there; start the server, or {_ADDRESS}",
    "ConnectTimeoutError": f"nothing answers there in time; check the network, or {_ADDRESS}",
    "ProxyConnectionError": "the proxy does not answer; check HTTP_PROXY and HTTPS_PROXY",
    "ReadTimeoutError": "the store stopped answering; run the same command again",
    "ConnectionClosedError": "the store closed the connection; run the same command again",
    "ResponseStreamingError": "the connection broke in the middle; run the same command again",
    "IncompleteReadError": "the connection broke in the middle; run the same command again",
    "ValueError": f"the endpoint does not start with http:// or https://; {_ADDRESS}",
    "ParamValidationError": "this is not a valid bucket or object name; correct it",
}

_ENDPOINTS = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

_PASSING_CODES = ("SlowDown", "RequestTimeout", "Throttling", "TooManyRequests", "429")

_answered: set[tuple[int, str]] = set()


def ask(url: str, request: Callable[[Any], T]) -> T:
    """What `request(client)` returns; tried again while that may help, then one sentence."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    begin, attempt = time.monotonic(), 0
    while True:
        client = _client_for(url)
        try:
            answer = request(client)
        except (Boto3Error, BotoCoreError, ClientError) as error:
            if isinstance(error, ClientError):
                _answered.add(_contact(client))
            if not _may_pass(error) or time.monotonic() - begin > _patience(client):
                raise refusal(url, error) from None
        else:
            _answered.add(_contact(client))
            return answer
        time.sleep(random.uniform(0, min(0.25 * 2**attempt, 8)))
        attempt += 1


def refusal(url: str, error: Exception) -> Unreachable:
    """The sentence for whatever boto3 raised about `url`."""
    return Unreachable(f"cannot reach {url} at {_shown_endpoint()}: {_reason(error)}")


def _shown_endpoint() -> str:
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "AWS")
    return re.sub(r"^(\w+://)?.*@", r"\1", endpoint)  # an address may hold a password


def _contact(client: Any) -> tuple[int, str]:
    return os.getpid(), client.meta.endpoint_url


def _patience(client: Any) -> float:
    return _LATER_SECONDS if _contact(client) in _answered else _FIRST_SECONDS


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: a broken connection, a store in trouble."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, SSLError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or error_code(error) in _PASSING_CODES
    return isinstance(error, (ConnectionError, HTTPClientError)) and not isinstance(error, SSLError)


def error_code(error: Exception) -> str:
    """The code in a ClientError: a word from the answer's body, or the bare status of a HEAD."""
    response: dict[str, Any] = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def _reason(error: Exception) -> str:
    code, kind = error_code(error), type(error).__name__
    if code:
        return _CODES.get(code, f"the store answers {code}; look it up in its log")
    return _EXCEPTIONS.get(kind, f"the request failed ({kind}); check the address and settings")


def _client_for(url: str) -> Any:
    from botocore.exceptions import BotoCoreError

    # A client is made anew where a variable that shapes it has changed.
    settings = sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "S3_")))
    try:
        return _client(os.getpid(), tuple(settings))
    except (BotoCoreError, ValueError) as error:
        raise refusal(url, error) from None


@lru_cache(maxsize=8)
def _client(pid: int, settings: tuple[tuple[str, str], ...]) -> Any:
    """One for each process, since a forked one must not share its parent's sockets."""
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _QUICK_ATTEMPTS},
        max_pool_connections=32,
    )
    session = boto3.session.Session()
    endpoint = os.environ.get("S3_ENDPOINT_URL") or None
    client = session.client("s3", endpoint_url=endpoint, config=config)
    if ".amazonaws.com" in client.meta.endpoint_url:
        return client
    # Other stores: buckets in the path, since they have no names in DNS, and no checksum headers
    # of 2025, which many of them refuse; over http the signature covers the body anyway.
    other = Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required")
    return session.client("s3", endpoint_url=endpoint, config=config.merge(other))
