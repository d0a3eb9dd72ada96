"""The S3 client of a process. boto3's own retries are switched off (`retries.py`). boto3 reads a
credentials file only when a client is made, so expired credentials are renewed by a new client.
"""

from __future__ import annotations

import gzip
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import orjson

from mdsmix.errors import Unreachable
from mdsmix.storage.fork_locks import client_lock
from mdsmix.storage.location import Stat
from mdsmix.storage.retries import Connection, retry
from mdsmix.storage.s3_errors import AWS, Answer, S3Errors, find_endpoint_variable, find_error_code
from mdsmix.storage.store_errors import hide_password

T = TypeVar("T")

_CONNECT_SECONDS = 5
_READ_SECONDS = 30
# Other stores get no checksum headers of 2025: many refuse them, and the signature covers the body
# anyway.
_CHECKSUMS = "when_required"

_ENDPOINT_OF_AWS = re.compile(r"https://s3[.-]([a-z0-9-]+\.)*amazonaws\.com(\.cn)?")
"Matches an address of AWS that boto3 chooses, and not that of a VPC endpoint, which a user sets."

_SETTINGS = ("AWS_", "S3_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE")
"Beginnings of the environment variables, in upper case, that set the client's options."


def ask_s3(url: str, request: Callable[[Any], T]) -> T:
    """Send a request to the store, and return its result. Temporary failures are retried.

    Args:
        url: what error messages name.
        request: called at each try with a client of boto3; returns the result.

    Raises Unreachable if the request fails for good.
    """

    def connect() -> Connection:
        client = _get_client(url)
        return Connection(client, client.meta.endpoint_url)

    return retry(url, _ERRORS, connect, request)


def find_s3_endpoint(url: str) -> str:
    """Return the address of the store that requests for this URL go to. Nothing is sent."""
    return str(_get_client(url).meta.endpoint_url)


def show_s3_endpoint() -> str:
    """Return the store's endpoint as messages show it, without a password. AWS for an address of
    AWS that boto3 chose; an address of AWS in an environment variable is shown as it is.

    boto3 decides: a profile in ~/.aws/config may set an endpoint, and
    AWS_IGNORE_CONFIGURED_ENDPOINT_URLS lets it ignore all but S3_ENDPOINT_URL.
    """
    endpoint = find_endpoint_variable()
    if not os.environ.get("S3_ENDPOINT_URL"):
        from botocore.exceptions import BotoCoreError

        with suppress(BotoCoreError, ValueError):  # the error may be about the endpoint itself
            actual = str(_open_client().meta.endpoint_url)
            if actual != endpoint:
                is_aws = _ENDPOINT_OF_AWS.fullmatch(actual)
                endpoint = AWS if is_aws else actual
    return hide_password(endpoint) if endpoint else AWS


def ask_s3_unless_refused(
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
        if find_error_code(error) in codes:
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
        raise _ERRORS.make_refusal("s3://", error) from None
    return str(credentials.method)


def _get_client(url: str) -> Any:
    """Return the boto3 client of this process.

    Args:
        url: what the error message names.

    Raises Unreachable if no client can be made.
    """
    from botocore.exceptions import BotoCoreError

    try:
        return _open_client()
    except (BotoCoreError, ValueError) as error:
        raise _ERRORS.make_refusal(url, error) from None


def _open_client() -> Any:
    """Return the boto3 client of this process. A new one is made if one of the variables that set
    its options has changed.
    """
    # Clients read http_proxy too.
    settings = [item for item in os.environ.items() if item[0].upper().startswith(_SETTINGS)]
    settings.sort()
    with client_lock:  # otherwise each of 16 threads would make a client, 0.3 s each
        return _make_client(os.getpid(), tuple(settings))


@lru_cache(maxsize=8)
def _make_client(pid: int, settings: tuple[tuple[str, str], ...]) -> Any:
    """Return a client of S3, cached by process and settings.

    botocore makes it. boto3 would add methods that mdsmix does not use, and for each client its
    folder to those that the shared reader (`_open_loader`) searches.

    Args:
        pid: the process: a forked process must not share the sockets of its parent's client.
        settings: (name, value) of the environment variables that set the client's options.
    """
    with _hide_pyopenssl():
        import botocore.session
    from botocore.config import Config

    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=32,
    )
    core = botocore.session.Session()
    core.register_component("data_loader", _open_loader(core.get_config_variable("data_path")))
    endpoint = os.environ.get("S3_ENDPOINT_URL") or None
    client = core.create_client("s3", endpoint_url=endpoint, config=config)
    if ".amazonaws.com" in client.meta.endpoint_url:
        return client
    # For any other store, the bucket is in the path: these stores have no DNS names for buckets.
    path_style = Config(s3={"addressing_style": "path"}, request_checksum_calculation=_CHECKSUMS)
    return core.create_client("s3", endpoint_url=endpoint, config=config.merge(path_style))


@lru_cache(maxsize=8)
def _open_loader(data_path: str | None) -> Any:
    """Return botocore's reader of the files that describe S3. It keeps what it has read, and forked
    workers inherit that: each makes its client in 25 ms of CPU time instead of 85.

    Args:
        data_path: further folders with such files, from AWS_DATA_PATH or the AWS configuration.
    """
    from botocore.loaders import create_loader

    loader = create_loader(data_path)
    loader.file_loader.load_file = _read_description
    return loader


def _read_description(path: str) -> Any:
    """Return the content of a JSON file of botocore; None if the file is missing.

    botocore's own function makes an OrderedDict of each object. A client takes 105 ms of CPU time
    with it, and 80 with this one.

    Args:
        path: the path without its suffix, which is `.json` or `.json.gz`.
    """
    plain = f"{path}.json"
    if os.path.isfile(plain):  # False for a folder, and for a file that cannot be reached
        return orjson.loads(Path(plain).read_bytes())
    packed = f"{plain}.gz"
    if os.path.isfile(packed):
        return orjson.loads(gzip.decompress(Path(packed).read_bytes()))
    return None


@contextmanager
def _hide_pyopenssl() -> Iterator[None]:
    """Import botocore in a `with` block without pyOpenSSL, which Streaming installs. botocore would
    import it for the class SSLContext of urllib3 alone, which it otherwise takes from urllib3
    itself. That takes 40 ms of the 115 of botocore's import.
    """
    name = "urllib3.contrib.pyopenssl"
    if name in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules[name] = None  # an import of it raises ImportError
    try:
        yield
    finally:
        del modules[name]


# A new client reads the credentials again.
_ERRORS = S3Errors(renew=_make_client.cache_clear, show_endpoint=show_s3_endpoint)


def stat_from_answer(answer: Answer) -> Stat:
    """Return the Stat of an object.

    Args:
        answer: the store's answer to a request for the object, or the object's entry in a listing.
            Some stores leave out the ETag in listings; the stamp is then "".

    Raises Unreachable if the answer has no time, or if an answer about one object has no ETag.
    """
    modified = answer.get("LastModified")
    if not modified:
        raise _make_lacking_header_error("Last-Modified")
    if "Size" in answer:  # an entry of a listing
        return Stat(answer["Size"], _read_etag(answer), modified.timestamp())
    return Stat(answer["ContentLength"], require_etag(answer), modified.timestamp())


def require_etag(answer: Answer) -> str:
    """Return the ETag from an answer about one object, without its quotes.

    Raises Unreachable if the answer has no ETag.
    """
    stamp = _read_etag(answer)
    if not stamp:
        raise _make_lacking_header_error("ETag")
    return stamp


def _read_etag(answer: Answer) -> str:
    """Return the ETag of an answer without its quotes; "" if the answer has no ETag.

    The beginning `W/` is also removed: proxies that compress add it, but the store compares ETags
    without it.
    """
    return str(answer.get("ETag", "")).removeprefix("W/").strip('"')


def _make_lacking_header_error(header: str) -> Unreachable:
    """Return the error for the user about a store whose answer lacks this header."""
    return Unreachable(
        f"the store at {show_s3_endpoint()} answers without {header}, so mdsmix cannot see whether "
        "an object was changed or is still in use: look up in the store's manual which parts of "
        "S3 it supports, or use another store."
    )
