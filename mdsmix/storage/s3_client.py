"""The one client of a process, how patiently it asks, and every way in which a store says no.

Until the endpoint has answered once, a request is given up after about five seconds, so that a
wrong address is told at once; after that it is tried for about a minute, which outlasts a server
that restarts. Messages are built from error codes alone: the store's own words may quote a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from mdsmix.errors import Unreachable

# botocore waits up to min(2**n, 20) s, half of it on average, before the n-th retry.
_FIRST_ATTEMPTS = 4
_LATER_ATTEMPTS = 11
_CONNECT_SECONDS = 5
_READ_SECONDS = 60

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
    "ParamValidationError": "this is not a valid bucket or object name; correct it",
}

_NO_SCHEME = f"the endpoint does not start with http:// or https://; {_ADDRESS}"
_ENDPOINTS = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

_answered: set[tuple[int, str]] = set()


@contextmanager
def asking(url: str) -> Iterator[Any]:
    """A client to ask about `url`; whatever it raises leaves as one `Unreachable` sentence."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "AWS")
    try:
        client = _current_client()
        endpoint = client.meta.endpoint_url
        yield client
        _answered.add((os.getpid(), endpoint))
    except ClientError as error:
        _answered.add((os.getpid(), endpoint))
        raise Unreachable(_sentence(url, endpoint, _code_reason(error))) from None
    except (Boto3Error, BotoCoreError) as error:
        raise Unreachable(_sentence(url, endpoint, _exception_reason(error))) from None
    except ValueError:  # all that boto3 says of an address without a scheme
        raise Unreachable(_sentence(url, endpoint, _NO_SCHEME)) from None


def error_code(error: Exception) -> str:
    """The code in a ClientError: a word from the answer's body, or the bare status of a HEAD."""
    response: dict[str, Any] = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def _code_reason(error: Exception) -> str:
    code = error_code(error)
    return _CODES.get(code, f"the store answers {code or 'with an error'}; look it up in its log")


def _exception_reason(error: Exception) -> str:
    kind = type(error).__name__
    return _EXCEPTIONS.get(kind, f"the request failed ({kind}); check the address and settings")


def _sentence(url: str, endpoint: str, reason: str) -> str:
    shown = re.sub(r"^(\w+://)?.*@", r"\1", endpoint)  # an address may hold a password
    return f"cannot reach {url} at {shown}: {reason}"


def _current_client() -> Any:
    """The client of this process (a fork must not share sockets) under the present settings."""
    settings = tuple(
        sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "S3_")))
    )
    client = _client(os.getpid(), settings, _FIRST_ATTEMPTS)
    if (os.getpid(), client.meta.endpoint_url) not in _answered:
        return client
    return _client(os.getpid(), settings, _LATER_ATTEMPTS)


@lru_cache(maxsize=8)
def _client(pid: int, settings: tuple[tuple[str, str], ...], attempts: int) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": attempts},
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
