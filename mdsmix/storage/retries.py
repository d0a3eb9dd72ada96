"""The retries of requests, the same for every store.

A client's own retries differ between clients and releases (four of boto3 take 0.4 s in 2026, and
took 8 s before). So each store switches them off, and this file retries. Requests to an endpoint
that has answered before are retried through 90 s of failures in a row, long enough for a server to
restart. Requests to an endpoint that has never answered are retried for 3 s, so that a wrong
address is reported soon. Expired credentials are read again once, since somebody may have renewed
them.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mdsmix.errors import Unreachable
from mdsmix.storage.notices import show_notice

T = TypeVar("T")

_FIRST_SECONDS = 3.0
_LATER_SECONDS = 90.0
_FIRST_PAUSE_SECONDS = 0.25
"""The upper limit of the first pause. The limit doubles with each pause, and a pause is a random
time between 0 and its limit.
"""
_LONGEST_PAUSE_SECONDS = 8.0

_TEMPORARY_STATUS = (408, 425, 429)
_PERMANENT_STATUS = (501, 507)  # not implemented; full

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


def is_temporary_status(status: int) -> bool:
    """Return whether a request may succeed later if it was answered with this HTTP status."""
    return status in _TEMPORARY_STATUS or (status >= 500 and status not in _PERMANENT_STATUS)


def hide_password(endpoint: str) -> str:
    """Return an endpoint without user and password: `http://host:9000` for
    `http://user:password@host:9000`.
    """
    return re.sub(r"^(\w+://)?.*@", r"\1", endpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRules:
    """What the errors of a store's client mean."""

    classes: Callable[[], tuple[type[Exception], ...]]
    "Returns the classes of errors that a request may raise. All others are defects."
    is_answer: Callable[[Exception], bool]
    "Whether the store has answered with this error: the endpoint is right."
    is_temporary: Callable[[Exception], bool]
    "Whether the same request may succeed later."
    has_expired: Callable[[Exception], bool]
    "Whether the same request may succeed after the credentials were read again."
    renew: Callable[[], None]
    "Lets the next request read the credentials again."
    explain: Callable[[Exception], str]
    """Returns what has failed and what to do, for the user: `access denied; give ...`. It never
    quotes the store's own message, which may contain a key.
    """
    find_kind: Callable[[Exception], type[Unreachable]]
    "Returns the class of the error for the user: Denied, NoSuchPlace or Unreachable."
    show_endpoint: Callable[[str], str]
    "Returns the endpoint of a URL as messages show it, without a password."

    def make_refusal(
        self, url: str, error: Exception, tries: int = 1, seconds: float = 0
    ) -> Unreachable:
        """Return the error for the user about a request that has failed for good.

        Args:
            url: the object or folder that the message names.
            error: the failure of the last try.
            tries: how many tries have failed.
            seconds: how long these tries took together.
        """
        tried = f" (tried {tries} times in {seconds:.0f} s)" if tries > 1 else ""
        endpoint = self.show_endpoint(url)
        kind = self.find_kind(error)
        return kind(f"cannot reach {url} at {endpoint}{tried}: {self.explain(error)}")

    def waiting_sentence(self, url: str, error: Exception, seconds: float) -> str:
        """Return the sentence that is shown while a request is retried.

        Args:
            url: the object or folder of the request.
            error: the failure of the last try.
            seconds: the time for which the request is retried.
        """
        reason = self.explain(error).partition(";")[0]  # without what to do
        endpoint = self.show_endpoint(url)
        return (
            f"waiting for {endpoint}: {reason}; each request is retried for up to {seconds:.0f} s"
        )


def show_wait(endpoint: str, sentence: str) -> None:
    """Show the sentence once for all requests that wait for this endpoint."""
    if endpoint not in _waited_for:
        _waited_for.add(endpoint)
        show_notice(sentence)


def retry(
    url: str,
    rules: ErrorRules,
    connect: Callable[[], tuple[Any, str]],
    request: Callable[[Any], T],
) -> T:
    """Send a request to a store, and return its result. Temporary failures are retried.

    Args:
        url: what error messages name.
        rules: what the errors of the store's client mean.
        connect: called before each try; returns (client, address of the store).
        request: called at each try with the client; returns the result.

    Raises Unreachable if the request fails for good.
    """
    start = time.monotonic()
    tries = 0  # that have failed
    has_renewed = False  # whether the credentials were read again
    while True:
        client, endpoint = connect()
        try:
            answer = request(client)
        except rules.classes() as error:
            if rules.is_answer(error):
                _answered.add(endpoint)
            if rules.has_expired(error) and not has_renewed:
                has_renewed = True
                rules.renew()
                continue
            if endpoint in _answered and not tries:
                # This store works: measure the time of the retries alone, from the first failure
                # on, since a large body may have taken long before it.
                start = time.monotonic()
            tries += 1
            _pause(url, rules, endpoint, error, tries, time.monotonic() - start)
        else:
            _answered.add(endpoint)
            _given_up.discard(endpoint)
            _waited_for.discard(endpoint)  # the next wait is shown again
            return answer


def _pause(
    url: str, rules: ErrorRules, endpoint: str, error: Exception, tries: int, seconds: float
) -> None:
    """Sleep until the next try of a request. The time is random, and its limit grows each time.

    Args:
        url: what error messages name.
        rules: what the errors of the store's client mean.
        endpoint: the address of the store.
        error: the failure of the last try.
        tries: how many tries have failed.
        seconds: how long these tries took together.

    Raises Unreachable if the request is not tried again.
    """
    # Wait long only for an endpoint that has answered before, and has not failed for good since.
    is_trusted = endpoint in _answered and endpoint not in _given_up
    patience = _LATER_SECONDS if is_trusted else _FIRST_SECONDS
    can_retry = rules.is_temporary(error)
    if seconds >= patience or not can_retry:
        if can_retry:
            _given_up.add(endpoint)
        raise rules.make_refusal(url, error, tries, seconds) from None
    if seconds > NOTICE_SECONDS:
        show_wait(endpoint, rules.waiting_sentence(url, error, patience))
    longest = min(_FIRST_PAUSE_SECONDS * 2 ** (tries - 1), _LONGEST_PAUSE_SECONDS)
    time.sleep(min(random.uniform(0, longest), patience - seconds))
