"""Images at http(s) URLs, where a recipe says `http: fetch`: bounded in time and size, tried again, a few at once.

What a URL gives may be another image tomorrow, so it is asked once: the content's hash stands in the record of its work unit, and
no later run asks again unless it is told to read the sources again.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mdsmix.images.check import Bad

MOST_BYTES = 64 << 20
SECONDS = 60.0
"For one image, all tries together."
QUIET_SECONDS = 10.0
"Without a byte."
TRIES = 3
AT_ONCE = 8
"Requests in flight of one worker."
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


def _once(url: str, patience: Patience) -> bytes:
    from urllib3 import Timeout
    from urllib3.exceptions import HTTPError, LocationParseError

    left = max(0.1, min(patience.quiet, patience.left))
    try:
        answer = _pool().request(
            "GET",
            url,
            timeout=Timeout(connect=left, read=left),
            retries=_redirects(),
            preload_content=False,
        )
    except LocationParseError as error:
        raise Bad("image_not_found", str(error)) from None
    except HTTPError as error:
        raise _Failed(_said(error)) from None
    try:
        return _body(answer, patience)
    except HTTPError as error:
        raise _Failed(_said(error)) from None
    finally:
        answer.drain_conn() if answer.status != 200 else None
        answer.release_conn()


def _body(answer: Any, patience: Patience) -> bytes:
    if answer.status in _AGAIN:
        raise _Failed(f"the server answers {answer.status}")
    if answer.status != 200:
        raise Bad("image_not_found", f"the server answers {answer.status}")
    content = bytearray()
    while piece := answer.read1(_PIECE):  # what has come; `read` would wait for all of a piece
        content += piece
        if len(content) > MOST_BYTES:
            answer.close()
            raise Bad("image_file_too_large", f"the server sends more than {MOST_BYTES} bytes")
        if patience.left <= 0:
            answer.close()
            raise Bad("image_not_fetched", f"it was not there whole after {patience.seconds:g} s")
    return bytes(content)


def _said(error: Exception) -> str:
    """What went wrong, without the pools and tries around it, and the URL, which the record says."""
    said = str(getattr(error, "reason", None) or (error.args[0] if error.args else error))
    return " ".join(re.sub(r"^\w*(Connection|Pool)\w*\(.*?\): ", "", said).split())[:200]


@cache
def _pool() -> Any:
    from urllib3 import PoolManager

    return PoolManager(maxsize=AT_ONCE, headers={"User-Agent": "mdsmix", "Accept": "image/*"})


def _redirects() -> Any:
    from urllib3 import Retry

    return Retry(total=REDIRECTS, connect=0, read=0, redirect=REDIRECTS, status=0, other=0)
