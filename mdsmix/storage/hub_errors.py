"""The errors of huggingface_hub and hf_xet: whether a retry may help, and otherwise the sentence
for the user.

The classes of these errors differ between releases, so the status of the answer decides. hf_xet,
which uploads, raises a ConnectionError whose text names the status.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mdsmix.storage.fork_locks import client_lock
from mdsmix.storage.retries import show_wait
from mdsmix.storage.store_errors import StoreErrors, hide_password, is_temporary_status

_LATER = "run the same command again later"
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a valid token"
_OFFLINE = "OfflineModeIsEnabled"
_DOWN = "5xx"
_SILENT = "no answer"
_SENTENCES: Mapping[str, str] = {
    _SILENT: "the hub does not answer; check the network and HF_ENDPOINT",
    _OFFLINE: "HF_HUB_OFFLINE is set, so nothing is requested; unset it",
    "401": f"the hub does not accept the login, or there is no such bucket; {_LOGIN}",
    "403": "access denied; give the token read and write access to this bucket",
    "404": "there is no such bucket or file, or the token may not see it; check the path, or make "
    "the bucket with `hf buckets create`",
    "413": "the file is too large for the hub; make it smaller",
    "422": "the hub refuses the change; correct the name, which must not contain `//` or `\\`",
    "429": f"the hub takes no more requests of this user for a while; {_LATER}",
    "507": "the storage of the account is full; free some, or buy more",
    _DOWN: f"the hub is overloaded or down; {_LATER}",
}
"""Status, or what happened instead of an answer -> the cause, a semicolon, and what to do. Table of
docs/troubles.md.
"""
NO_ANSWERS: Mapping[str, str] = {code: _SENTENCES[code] for code in (_SILENT, _OFFLINE)}
"Status -> the sentence, for the errors of buckets that data sets have too."
_XET_STATUS = re.compile(r"HTTP status \w+ error \((\d{3})")
"Matches the status in the text of an error of hf_xet."
_CLOSED = "client has been closed"
"""Part of a RuntimeError of huggingface-hub 1.10: it closes its client after a refused connection,
and then uses the closed client.
"""


class HubErrors(StoreErrors):
    """What the errors of huggingface_hub and hf_xet mean. Both read the user's login for each
    request.
    """

    sentences = _SENTENCES
    unknown_advice = "check the path, HF_ENDPOINT, and the releases of huggingface-hub and hf-xet"
    denied_codes = ("403",)
    name_codes = ("404",)

    def classes(self) -> tuple[type[Exception], ...]:
        """Return base classes of all errors that a request to the hub may raise: those of Python
        that huggingface_hub and hf_xet derive theirs from, and that of the HTTP client, which is
        another one in each major release (requests, httpx, httpx2).
        """
        from huggingface_hub.errors import HfHubHTTPError

        client_error = HfHubHTTPError.__bases__[0]
        return OSError, ValueError, RuntimeError, client_error

    def find_status(self, error: Exception) -> int:
        answer = getattr(error, "response", None)
        if answer is not None:
            return int(answer.status_code)
        match = _XET_STATUS.search(str(error))
        return int(match[1]) if match else 0

    def find_code(self, error: Exception) -> str:
        status = self.find_status(error)
        if str(status) in _SENTENCES:
            return str(status)
        if status >= 500:
            return _DOWN
        if _is_offline(error):
            return _OFFLINE
        if self.is_temporary(error):
            return _SILENT
        return str(status) if status else type(error).__name__

    def is_temporary(self, error: Exception) -> bool:
        status = self.find_status(error)
        if status:
            return is_temporary_status(status)
        # An answer that huggingface_hub cannot read is a ValueError. A RuntimeError is mostly
        # damage or a defect that hf_xet noticed. Every other error is a broken connection.
        is_defect = isinstance(error, ValueError | RuntimeError) and _CLOSED not in str(error)
        return not is_defect and not _is_offline(error)

    def show_endpoint(self, url: str) -> str:
        return show_hub_endpoint()


def _is_offline(error: Exception) -> bool:
    return type(error).__name__ == _OFFLINE


def find_endpoint() -> str:
    """Return the address of the hub: `https://huggingface.co`, or HF_ENDPOINT."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def show_hub_endpoint() -> str:
    """Return the address of the hub as messages show it, without a password."""
    return hide_password(find_endpoint())


@contextmanager
def hide_retry_lines() -> Iterator[None]:
    """Hide the lines that huggingface_hub logs about each retry during the `with` block: two for
    each try, for up to 23 s. If a request waits long, `show_wait` shows one sentence in their
    place. The lines about other requests of the process, such as those of a notebook, are shown.
    """
    global _requests
    logging.getLogger("huggingface_hub.utils._http").addFilter(_replace_retry_line)
    with client_lock:
        _requests += 1
    try:
        yield
    finally:
        with client_lock:
            _requests -= 1


_requests = 0
"""How many requests of mdsmix are running, in all threads: hf_xet and huggingface_hub use threads
of their own.
"""


_RETRY = re.compile(r"\[Retry (\d+)/")
"Matches the number of the next try in a line about it."
_SHOWN_RETRY = 3
"""The retry at which the user is shown that a request waits, if the hub refuses each try at once.
3 s have passed by then, and 4 follow.
"""


def _replace_retry_line(record: logging.LogRecord) -> bool:
    """Return whether to log a line: False for lines about a retry of mdsmix's own requests. If the
    request waits long, show the user one sentence instead (`show_wait`).
    """
    if not _requests:
        return True
    try:
        line = record.getMessage()
    except Exception:  # the arguments do not fit the message: logging itself reports that
        return True
    is_failure = "thrown while requesting" in line
    match = _RETRY.search(line)
    if match is None and not is_failure:
        return True
    is_refused = line.startswith("Rate limited")  # it may then wait for minutes
    has_timed_out = is_failure and "timed out" in line  # 10 s have passed
    is_late = match is not None and int(match[1]) >= _SHOWN_RETRY
    if is_refused or has_timed_out or is_late:
        reason = "the hub does not answer, or is overloaded"
        if is_refused:
            reason, _, _ = _SENTENCES["429"].partition(";")
        endpoint = find_endpoint()
        sentence = f"waiting for {hide_password(endpoint)}: {reason}; the request is sent again"
        show_wait(endpoint, sentence)
    return False


HUB_ERRORS = HubErrors()
