"""Images at http(s) URLs, where a recipe says `http: fetch`: bounded in time and size, tried again, a few at once.

What a URL gives may be another image tomorrow, so it is asked once: the content's hash stands in the record of its work unit, and
no later run asks again unless it is told to read the sources again.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from mdsmix.images.judge import Bad

MOST_BYTES = 64 << 20
SECONDS = 60.0
"For one image, all tries together."
QUIET_SECONDS = 10.0
"Without a byte."
PAUSE_SECONDS = 0.5
"Before the second try; twice as long before the third."
TRIES = 3
REDIRECTS = 5
AT_ONCE = 8
"Requests in flight of one worker."
_AGAIN = (408, 425, 429, 500, 502, 503, 504)


def is_http(path: str) -> bool:
    return path[:7].lower() == "http://" or path[:8].lower() == "https://"


def fetch(url: str) -> bytes:
    """What the URL gives; Bad (image_not_found, image_not_fetched, image_file_too_large) where it gives nothing whole."""
    from urllib3.exceptions import HTTPError

    until, why = time.monotonic() + SECONDS, ""
    for number in range(TRIES):
        pause = PAUSE_SECONDS * 2 ** (number - 1) if number else 0.0
        if time.monotonic() + pause > until:
            break
        time.sleep(pause)
        try:
            return _asked(url, until)
        except ValueError as error:  # it, or a place that it sends on to, is no URL
            raise Bad("image_not_found", str(error)) from None
        except (
            HTTPError
        ) as error:  # said without the connection, and the URL, which the record says
            reason = getattr(error, "reason", None) or error
            why = str(reason.args[0]).rpartition(": ")[2]
    raise Bad("image_not_fetched", why)


def _asked(url: str, until: float) -> bytes:
    from urllib3 import Retry
    from urllib3.exceptions import HTTPError

    answer = _pool(_proxy(url)).request(
        "GET",
        url,
        timeout=max(0.1, min(QUIET_SECONDS, until - time.monotonic())),
        retries=Retry(None, redirect=REDIRECTS, connect=0, read=0, status=0, other=0),
        preload_content=False,
    )
    content = bytearray()
    try:
        if answer.status in _AGAIN:
            raise HTTPError(f"the server answers {answer.status}")
        if answer.status != 200:
            raise Bad("image_not_found", f"the server answers {answer.status}")
        while piece := answer.read1(1 << 16):  # what has come; `read` would wait for all of a piece
            content += piece
            if len(content) > MOST_BYTES:
                raise Bad("image_file_too_large", f"the server sends more than {MOST_BYTES} bytes")
            if time.monotonic() > until:
                raise Bad("image_not_fetched", f"it was not there whole after {SECONDS:g} s")
    finally:
        answer.close()  # a body that nobody wants may have no end
    return bytes(content)


def _proxy(url: str) -> str:
    """As `https_proxy`, `http_proxy` and `no_proxy` say; "" for none."""
    parts = urlsplit(url)
    proxy = "" if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme, "")
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


@cache
def _pool(proxy: str) -> Any:
    from urllib3 import PoolManager, ProxyManager
    from urllib3.util import make_headers, parse_url

    given: dict[str, Any] = {"maxsize": AT_ONCE}
    given["headers"] = {"User-Agent": "mdsmix", "Accept": "image/*"}
    if not proxy:
        return PoolManager(**given)
    who = unquote(parse_url(proxy).auth or "") or None
    return ProxyManager(proxy, proxy_headers=make_headers(proxy_basic_auth=who), **given)
