"""The errors of huggingface_hub and hf_xet: whether a retry may help, and otherwise the sentence
for the user.

The classes of these errors differ between releases, so they are told apart by the status of the
answer. hf_xet, which uploads, raises a ConnectionError whose text names the status. Sentences do
not quote that text, because it may contain a signed address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from mdsmix.errors import Denied, NoSuchPlace, Unreachable
from mdsmix.storage.retries import ErrorRules, hide_password, is_temporary_status

_LATER = "run the same command again later"
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a valid token"
_OFFLINE = "OfflineModeIsEnabled"
_DOWN = "5xx"
_SILENT = ""
_SENTENCES: Mapping[int | str, str] = {
    _SILENT: "the hub does not answer; check the network and HF_ENDPOINT",
    _OFFLINE: "HF_HUB_OFFLINE is set, so nothing is requested; unset it",
    401: f"the hub does not accept the login, or there is no such bucket; {_LOGIN}",
    403: "access denied; give the token read and write access to this bucket",
    404: "there is no such bucket or file, or the token may not see it; check the path, or make "
    "the bucket with `hf buckets create`",
    413: "the file is too large for the hub; make it smaller",
    422: "the hub refuses the change; correct the name, which must not contain `//` or `\\`",
    429: f"the hub takes no more requests of this user for a while; {_LATER}",
    507: "the storage of the account is full; free some, or buy more",
    _DOWN: f"the hub is overloaded or down; {_LATER}",
}
"""Status, or what happened instead of an answer -> the cause, a semicolon, and what to do. Table of
docs/troubles.md.
"""
_XET_STATUS = re.compile(r"HTTP status \w+ error \((\d{3})")
"Matches the status in the text of an error of hf_xet."
_CLOSED = "client has been closed"
"""Part of a RuntimeError of huggingface-hub 1.10: it closes its client after a refused connection,
and then uses the closed client.
"""


@cache
def error_classes() -> tuple[type[Exception], ...]:
    """Return base classes of all errors that a request to the hub may raise: those of Python that
    huggingface_hub and hf_xet derive theirs from, and that of the HTTP client, which is another one
    in each major release (requests, httpx, httpx2).
    """
    from huggingface_hub.errors import HfHubHTTPError

    client_error = HfHubHTTPError.__bases__[0]
    return OSError, ValueError, RuntimeError, client_error


def find_status(error: Exception) -> int:
    """Return the HTTP status of the hub's answer; 0 if the hub has not answered."""
    answer = getattr(error, "response", None)
    if answer is not None:
        return int(answer.status_code)
    match = _XET_STATUS.search(str(error))
    return int(match[1]) if match else 0


def _is_offline(error: Exception) -> bool:
    return type(error).__name__ == _OFFLINE


def _is_temporary(error: Exception) -> bool:
    """Return whether the same request may succeed later: the connection broke, or the hub is in
    trouble.
    """
    status = find_status(error)
    if status:
        return is_temporary_status(status)
    # An answer that huggingface_hub cannot read is a ValueError. A RuntimeError is mostly damage or
    # a defect that hf_xet noticed. Every other error is a broken connection.
    is_defect = isinstance(error, ValueError | RuntimeError) and _CLOSED not in str(error)
    return not is_defect and not _is_offline(error)


def _explain(error: Exception) -> str:
    """Return what has failed and what to do, for the user: `access denied; give ...`."""
    status = find_status(error)
    if status in _SENTENCES:
        return _SENTENCES[status]
    if status >= 500:
        return _SENTENCES[_DOWN]
    if _is_offline(error):
        return _SENTENCES[_OFFLINE]
    if _is_temporary(error):
        return _SENTENCES[_SILENT]
    name = status or type(error).__name__
    return (
        f"the request failed ({name}); check the path, HF_ENDPOINT, and the releases of "
        "huggingface-hub and hf-xet"
    )


def _find_kind(error: Exception) -> type[Unreachable]:
    kinds = {403: Denied, 404: NoSuchPlace}
    return kinds.get(find_status(error), Unreachable)


def find_endpoint() -> str:
    """Return the address of the hub: `https://huggingface.co`, or HF_ENDPOINT."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def show_endpoint() -> str:
    """Return the address of the hub as messages show it, without a password."""
    return hide_password(find_endpoint())


BUCKET_RULES = ErrorRules(
    classes=error_classes,
    is_answer=lambda error: find_status(error) > 0,
    is_temporary=_is_temporary,
    has_expired=lambda error: False,  # huggingface_hub reads the token for each request
    renew=lambda: None,
    explain=_explain,
    find_kind=_find_kind,
    show_endpoint=lambda url: show_endpoint(),
)
"What the errors of a request to a bucket of the hub mean."
