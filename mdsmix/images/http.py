"""Images at http(s) URLs, where a recipe says `http: fetch`: bounded in time and size, tried again, a few at once.

What a URL gives may be another image tomorrow, so it is asked once: the content's hash stands in the record of its work unit, and
no later run asks again unless it is told to read the sources again.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin

from mdsmix.images.check import Bad
from mdsmix.images.connections import connections

MOST_BYTES = 64 << 20
SECONDS = 60.0
"For one image, all tries together."
QUIET_SECONDS = 10.0
"Without a byte."
TRIES = 3
REDIRECTS = 5
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server is waited for."""

    seconds: float = SECONDS
    quiet: float = QUIET_SECONDS
    pause: float = 0.5
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)


def fetch(url: str, patience: Patience | None = None) -> bytes:
    """What the URL gives; Bad (image_not_found, image_not_fetched, image_file_too_large) where it gives nothing whole."""
    patience = patience or Patience()
    for number in range(TRIES):
        try:
            return _once(url, patience)
        except _Failed as failed:
            pause = patience.pause * 2**number
            if number == TRIES - 1 or patience.left < pause:
                raise Bad("image_not_fetched", str(failed)) from None
            time.sleep(pause)
    raise AssertionError("every try returns or raises")


class _Failed(Exception):
    """What another try may mend."""


def is_http(path: str) -> bool:
    return path[:7].lower() == "http://" or path[:8].lower() == "https://"


def _once(url: str, patience: Patience) -> bytes:
    from urllib3.exceptions import HTTPError, LocationParseError

    for _ in range(REDIRECTS + 1):
        if not is_http(url):
            raise Bad("image_not_found", f"the server names {url[:200]} instead of it")
        try:
            found = _asked(url, patience)
        except LocationParseError as error:
            raise Bad("image_not_found", str(error)) from None
        except HTTPError as error:
            raise _Failed(_said(error)) from None
        if isinstance(found, bytes):
            return found
        url = _then(url, found)
    raise Bad("image_not_fetched", f"the server sends on more than {REDIRECTS} times")


def _then(url: str, named: str) -> str:
    try:
        return urljoin(url, named)
    except ValueError:  # brackets around no IPv6 address
        raise Bad("image_not_found", f"the server names {named[:200]} instead of it") from None


def _asked(url: str, patience: Patience) -> bytes | str:
    """What the URL gives, or the place to which it sends on. A body that nobody wants is not read: it may have no end."""
    from urllib3 import Timeout

    left = max(0.1, min(patience.quiet, patience.left))
    answer = connections(url).request(
        "GET",
        url,
        timeout=Timeout(connect=left, read=left),
        retries=False,
        redirect=False,
        preload_content=False,
    )
    is_read = False
    try:
        if then := answer.get_redirect_location():
            return str(then)
        content = _body(answer, patience)
        is_read = True
        return content
    finally:
        answer.release_conn() if is_read else answer.close()


def _body(answer: Any, patience: Patience) -> bytes:
    if answer.status in _AGAIN:
        raise _Failed(f"the server answers {answer.status}")
    if answer.status != 200:
        raise Bad("image_not_found", f"the server answers {answer.status}")
    content = bytearray()
    while piece := answer.read1(_PIECE):  # what has come; `read` would wait for all of a piece
        content += piece
        if len(content) > MOST_BYTES:
            raise Bad("image_file_too_large", f"the server sends more than {MOST_BYTES} bytes")
        if patience.left <= 0:
            raise Bad("image_not_fetched", f"it was not there whole after {patience.seconds:g} s")
    return bytes(content)


def _said(error: Exception) -> str:
    """What went wrong, without the connection around it, and the URL, which the record says."""
    first, *more = error.args or ("",)
    said = re.sub(r"^\w*(Connection|Pool)\w*\(.*?\): ", "", str(error if not more else first))
    inner = type(more[0]).__name__ if more and isinstance(more[0], Exception) else ""
    if inner and inner not in said:
        said = f"{said.rstrip('.')} ({inner})"
    return " ".join(said.split())[:200]
