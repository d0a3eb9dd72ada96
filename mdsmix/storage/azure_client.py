"""Requests to Azure Blob Storage, by its REST protocol.

azure-storage-blob, Microsoft's own client, is not used: its downloads keep 32 MB in memory, and
are sent again three times with a second between, whatever its retry policy says. It takes 1.9 ms of
processor time for a small GET and 0.4 s for its import; `requests` takes 1.1 ms and 0.1 s. Only the
login is azure-identity's, as in Streaming.
"""

from __future__ import annotations

import base64
import hashlib
import os
from calendar import timegm
from collections.abc import Callable, Collection, Mapping, Sequence
from email.utils import parsedate
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from mdsmix.errors import Unreachable
from mdsmix.storage.azure_account import (
    CONNECTION_VARIABLE,
    KEY_VARIABLE,
    NAME_VARIABLE,
    SCHEME,
    Account,
    Signer,
    find_account,
    find_account_name,
)
from mdsmix.storage.azure_errors import AzureError, AzureErrors
from mdsmix.storage.fork_locks import client_lock
from mdsmix.storage.location import Bytes, Stat
from mdsmix.storage.object_reader import make_parts_reader
from mdsmix.storage.retries import Connection, retry

T = TypeVar("T")
Headers = Mapping[str, str]

_CONNECT_SECONDS = 5
_READ_SECONDS = 30
CONNECTIONS = 32
"""Connections that are kept open. `requests` keeps 10: for 1,600 GETs by 16 threads (`threads.py`)
it opened 60 connections instead of 16, and took 1.14 ms of processor time each instead of 1.0.
"""
MOST_BYTES_WITH_MD5 = 4 << 20
"The most bytes of a range for which Azure sends an MD5."


class Client(NamedTuple):
    """The connections to one account."""

    account: Account
    session: Any
    "A `requests.Session`, which may be used by many threads."

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Headers | None = None,
        body: Sequence[Bytes] = (),
        expected: Collection[int] = (200,),
        keep_open: bool = False,
    ) -> Any:
        """Send a request, and return the answer as a `requests.Response`.

        Args:
            path: `container/key`, without quoting.
            query: parameters of the URL.
            body: parts of bytes, one after the other.
            expected: the statuses of an answer that can be used.
            keep_open: whether the caller reads the answer's body, and closes it.

        Raises AzureError for an answer with any other status.
        """
        # Bytes would be sent by one call of the socket, all of them within _CONNECT_SECONDS: 64 MiB
        # at 13 MB/s or more. A file is sent in parts of 16 KiB, each with that time.
        file = make_parts_reader(body) if any(map(len, body)) else None
        answer = self.session.request(
            method,
            self.make_url(path, query or {}),
            headers=headers,
            data=file,
            stream=True,
            timeout=(_CONNECT_SECONDS, _READ_SECONDS),
            allow_redirects=False,
        )
        is_usable = answer.status_code in expected
        if is_usable and keep_open:
            return answer
        answer.content  # noqa: B018  reads the rest, so that the connection can be used again
        if is_usable:
            return answer
        code = answer.headers.get("x-ms-error-code")
        if not code and answer.status_code < 400:
            code = "UnreadableAnswer"
        raise AzureError(code or str(answer.status_code), answer.status_code)

    def make_url(self, path: str, query: Mapping[str, str] | None = None) -> str:
        """Return the URL of a container or blob, with the account's SAS if it has one."""
        url = f"{self.account.endpoint}/{quote(path, safe='/-_.~')}"
        words = [urlencode(query, quote_via=quote)] if query else []
        words += [self.account.sas] if self.account.sas else []
        return f"{url}?{'&'.join(words)}" if words else url


def ask_azure(url: str, request: Callable[[Client], T]) -> T:
    """Send a request to the store, and return its result. Temporary failures are retried.

    Args:
        url: what error messages name; it begins with `azure://ACCOUNT.`.
        request: called at each try with a client; returns the result.

    Raises Unreachable if the request fails for good.
    """

    def connect() -> Connection:
        client = _get_client(find_account_name(url))
        return Connection(client, client.account.endpoint)

    return retry(url, _ERRORS, connect, request)


def describe_credentials() -> str:
    """Return the account's address and where its credentials come from, for the user, without
    showing them.

    Raises Unreachable if there are none.
    """
    import azure.core.exceptions

    account = find_account()
    if account.needs_login:
        try:
            Signer(account).get_token()
        except azure.core.exceptions.AzureError as error:
            raise _ERRORS.make_refusal(SCHEME, error) from None
    endpoint = account.endpoint if account.name else "of each URL"
    return f"endpoint {endpoint}, credentials from {account.credentials}"


def _get_client(name: str) -> Client:
    """Return the client of this process for an account."""
    # A new client is made if one of the variables that set its options has changed.
    names = (NAME_VARIABLE, KEY_VARIABLE, CONNECTION_VARIABLE)
    settings = tuple(os.environ.get(name, "") for name in names)
    with client_lock:
        return _make_client(os.getpid(), name, settings)


@lru_cache(maxsize=8)
def _make_client(pid: int, name: str, settings: tuple[str, ...]) -> Client:
    """Return a client, cached by process, account and settings.

    Args:
        pid: the process: a forked process must not share the sockets of its parent's client.
        name: the account.
        settings: the values of the environment variables that set the client's options.
    """
    import requests
    from requests.adapters import HTTPAdapter

    account = find_account(name)
    session = requests.Session()
    session.auth = Signer(account)
    session.headers.clear()
    session.headers.update({"User-Agent": "mdsmix", "Accept-Encoding": "identity"})
    for protocol in ("http://", "https://"):
        adapter = HTTPAdapter(pool_connections=CONNECTIONS, pool_maxsize=CONNECTIONS)
        session.mount(protocol, adapter)
    return Client(account, session)


_ERRORS = AzureErrors(renew=_make_client.cache_clear)  # a new client asks for a new token


class BlobBody:
    """The body of an answer to a GET. Bytes that are missing, or differ from the MD5 that the
    answer names, are an error.
    """

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        length = answer.headers.get("Content-Length", "")
        if not length.isdecimal():
            answer.close()
            raise AzureError("UnreadableAnswer", answer.status_code)
        self._remaining = int(length)
        self._expected_md5 = answer.headers.get("Content-MD5", "")
        self._md5 = hashlib.md5(usedforsecurity=False)

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most `size`; b"" at the body's end."""
        if not self._remaining:
            return b""
        data: bytes = self._answer.raw.read(size, decode_content=False)
        if size and not data:
            raise AzureError("BrokenBody", self._answer.status_code)
        self._remaining -= len(data)
        if self._expected_md5:
            self._md5.update(data)
            if not self._remaining and to_base64(self._md5.digest()) != self._expected_md5:
                raise AzureError("DamagedBody", self._answer.status_code)
        return data

    def close(self) -> None:
        if self._remaining:
            self._answer.close()  # closes the connection too: a body that nobody reads is on it
        else:
            self._answer.raw.release_conn()


def to_base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def stat_from_headers(headers: Headers) -> Stat:
    """Return the Stat of a blob from the headers of an answer about it. The answer to a write has
    no size: it is 0.

    Raises Unreachable if the answer has no time or no ETag, or no valid ones: it is not Azure's.
    """
    modified = parsedate(headers.get("Last-Modified", ""))
    stamp = read_etag(headers)
    size = headers.get("Content-Length", "0")
    if not modified or not stamp or not size.isdecimal():
        raise Unreachable(
            "the store answers without a time, an ETag or a size of the blob, so mdsmix cannot see "
            "whether it was changed or is still in use: what answers is not Azure; check "
            f"{CONNECTION_VARIABLE} and the proxy"
        )
    return Stat(int(size), stamp, timegm(modified))


def read_etag(headers: Headers) -> str:
    """Return the ETag of an answer without its quotes; "" if the answer has no ETag."""
    return headers.get("ETag", "").removeprefix("W/").strip('"')
