"""Connections to servers of images: by the proxy that the environment names, and with a bound on how long an answer may begin."""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from threading import Timer
from typing import Any
from urllib.parse import unquote
from urllib.request import getproxies, proxy_bypass

AT_ONCE = 8
"Requests in flight of one worker."
_HEADERS = {"User-Agent": "mdsmix", "Accept": "image/*"}


def connections(url: str) -> Any:
    """Those to the server of a URL: a pool of urllib3."""
    return _pool(_proxy(url))


def _proxy(url: str) -> str:
    """As `https_proxy`, `http_proxy` and `no_proxy` say; "" for none, and for this machine itself."""
    from urllib3.util import parse_url

    parts = parse_url(url)
    host = (parts.hostname or "").strip("[]")
    if _is_here(host) or proxy_bypass(host):
        return ""
    proxy = getproxies().get(parts.scheme or "", "")
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@cache
def _pool(proxy: str) -> Any:
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager, ProxyManager
    from urllib3.util import make_headers, parse_url

    kinds = {"http": _in_time(HTTPConnectionPool), "https": _in_time(HTTPSConnectionPool)}
    given: dict[str, Any] = {"maxsize": AT_ONCE, "headers": _HEADERS}
    if proxy:
        who = unquote(parse_url(proxy).auth or "") or None
        as_whom = make_headers(proxy_basic_auth=who)
        pool: Any = ProxyManager(proxy, proxy_headers=as_whom, **given)
    else:
        pool = PoolManager(**given)
    pool.pool_classes_by_scheme = kinds
    return pool


def _in_time(pool: Any) -> Any:
    """The class of pools, its connections waiting no longer than their timeout for all headers of an answer: a server that sends
    one byte of them now and then would else be waited for without end."""

    class Connection(pool.ConnectionCls):  # type: ignore[misc]
        def getresponse(self) -> Any:
            timer = Timer(self.timeout, _end, [self.sock])
            timer.daemon = True
            timer.start()
            try:
                return super().getresponse()
            finally:
                timer.cancel()

    return type(pool.__name__, (pool,), {"ConnectionCls": Connection})


def _end(sock: socket.socket) -> None:
    """Whoever reads from it reads its end."""
    with suppress(OSError):  # it is closed
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
