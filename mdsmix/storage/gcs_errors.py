"""The errors of Google Cloud Storage: whether a retry may help, and otherwise the sentence for the
user.
"""

from __future__ import annotations

import os

from mdsmix.storage.store_errors import StoreErrors, hide_password, is_temporary_status

_LATER = "run the same command again later"
_AGAIN = "run the same command again"
_RENEW = "renew the credentials and run the same command again: what is finished is kept"
_LOG_IN = (
    "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the "
    "file of a service account"
)
_ADDRESS = "check the network, and STORAGE_EMULATOR_HOST if it is set"
_NOT_AN_ADDRESS = (
    "the endpoint does not start with http:// or https://, or contains a line break; set "
    "STORAGE_EMULATOR_HOST to an address such as http://localhost:4443, or unset it"
)

_CREDENTIALS_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_NO_FILE = "noFile"
"The reason, by mdsmix, of credentials whose file does not exist."

NO_BUCKET = "noBucket"
"The reason, by mdsmix, of a 404 that can only be about the bucket."
ANONYMOUS = "anonymous"
"The reason, by mdsmix, of a refusal of a request that was sent without credentials."
DAMAGED = "damaged"
"The reason, by mdsmix, of a write whose bytes arrived with another checksum."

_SENTENCES = {
    NO_BUCKET: "the bucket does not exist; create it or correct its name",
    "404": "there is no such object, or no such bucket; check the path",
    "400": "the store refuses the request; check the bucket's name (at least 3 small letters, "
    "digits or hyphens) and the path",
    "401": f"the store does not accept the credentials; {_RENEW}",
    ANONYMOUS: f"no credentials were found, and the bucket is not public; {_LOG_IN}",
    "403": "access denied; give these credentials the permission for this request",
    "insufficientPermissions": "these credentials were made without access to Cloud Storage; "
    "give the machine or the credentials the scope devstorage.read_write",
    "accountDisabled": "the project has no active billing account; give it one",
    "userProjectMissing": "the bucket's requester pays; set GOOGLE_CLOUD_QUOTA_PROJECT to the "
    "project that pays",
    "retentionPolicyNotMet": "the bucket's retention policy forbids it; use another bucket",
    "objectUnderActiveHold": "the object is held; release it, or use another bucket",
    "429": f"the store asks to slow down; {_LATER}",
    "rateLimitExceeded": f"the store asks to slow down; {_LATER}",
    "userRateLimitExceeded": f"the store asks to slow down; {_LATER}",
    "quotaExceeded": f"the project's quota is used up; raise it, or {_LATER}",
    "500": f"the store failed inside; {_LATER}",
    "501": "the store cannot do this; use another store",
    DAMAGED: f"the bytes that arrived in the store differ from those that were sent; {_AGAIN}",
    "Damaged": f"the bytes that arrived differ from the stored bytes; {_AGAIN}",
    _NO_FILE: f"the file that {_CREDENTIALS_VARIABLE} names does not exist; correct it, or unset "
    "it and run `gcloud auth application-default login`",
    **dict.fromkeys(
        ("DefaultCredentialsError", "PermissionError", "IsADirectoryError"),
        f"the credentials cannot be used; {_LOG_IN}",
    ),
    "RefreshError": f"the credentials have expired or are refused; {_RENEW}",
    "TransportError": "the server that renews the credentials does not answer; check the network",
    "SSLError": "the TLS connection failed; check REQUESTS_CA_BUNDLE, and whether the endpoint "
    "begins with http:// or https://",
    "OSError": "a file of TLS certificates is missing; check REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE",
    "ProxyError": "the proxy does not answer, or refuses to connect; check HTTP_PROXY "
    "and HTTPS_PROXY",
    "NewConnectionError": f"nothing answers there; {_ADDRESS}",
    "NameResolutionError": f"the name of the server is not known; {_ADDRESS}",
    "ConnectionError": f"the store closed the connection; {_AGAIN}",
    "ConnectTimeout": f"nothing answers there in time; {_ADDRESS}",
    "ReadTimeout": f"the store stopped answering; {_AGAIN}",
    "ReadTimeoutError": f"the store stopped answering; {_AGAIN}",
    "Broken": f"the connection broke in the middle; {_AGAIN}",
    "ProtocolError": f"the connection broke in the middle; {_AGAIN}",
    "ChunkedEncodingError": f"the connection broke in the middle; {_AGAIN}",
    **dict.fromkeys(
        ("JSONDecodeError", "NotOfGoogle"),
        f"the store's answer was cut off, or is not an answer of Google Cloud Storage; {_AGAIN}",
    ),
    "InvalidSchema": _NOT_AN_ADDRESS,
    "MissingSchema": _NOT_AN_ADDRESS,
    "InvalidURL": _NOT_AN_ADDRESS,
}

GOOGLE = "Google Cloud Storage"
"The store's name in messages if no variable sets another endpoint."
EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
ENDPOINT_VARIABLES = (EMULATOR_VARIABLE, "API_ENDPOINT_OVERRIDE")
"""Environment variables of google-cloud-storage that set the endpoint; the first that is set
counts.
"""

_TEMPORARY_REASONS = ("rateLimitExceeded", "userRateLimitExceeded", DAMAGED)
_DENIED_CODES = ("403", "insufficientPermissions")
_NAME_CODES = (NO_BUCKET, "404", "400")


class Refused(Exception):
    """The store has answered with an error."""

    def __init__(self, status: int, reason: str = "") -> None:
        """Store status and reason.

        Args:
            status: the HTTP status, such as 403.
            reason: the word that the store adds, such as `rateLimitExceeded`; "" if it adds none.
        """
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


class NotOfGoogle(Exception):
    """The answer lacks what an answer of Google Cloud Storage has. It may be a login page."""


class Broken(Exception):
    """The body of an answer ended before its announced length."""


class Damaged(Exception):
    """The body of an answer differs from its checksum. Its bytes were passed on already."""


class GoogleErrors(StoreErrors):
    """What the errors of `gcs_client.py`, requests, urllib3 and google-auth mean."""

    sentences = _SENTENCES
    unknown_advice = "check the address and settings"
    denied_codes = _DENIED_CODES
    name_codes = _NAME_CODES
    expired_codes = ("401", "RefreshError")

    def classes(self) -> tuple[type[Exception], ...]:
        """Return the classes of errors that a request may raise. urllib3's HTTPError is raised if
        the body of an answer breaks off. OSError is the base class of requests' errors, and is
        raised if a file of credentials or certificates cannot be read.
        """
        from google.auth.exceptions import GoogleAuthError
        from urllib3.exceptions import HTTPError

        return Refused, NotOfGoogle, Broken, Damaged, GoogleAuthError, OSError, HTTPError

    def find_status(self, error: Exception) -> int:
        return error.status if isinstance(error, Refused) else 0

    def find_code(self, error: Exception) -> str:
        if isinstance(error, Refused):
            return error.reason if error.reason in _SENTENCES else str(error.status)
        code = self.name_failure(error)
        if code == "DefaultCredentialsError" and _is_file_missing():
            return _NO_FILE
        return code

    def is_temporary(self, error: Exception) -> bool:
        from google.auth.exceptions import GoogleAuthError, TransportError
        from requests import exceptions

        if isinstance(error, Refused):
            return error.reason in _TEMPORARY_REASONS or is_temporary_status(error.status)
        if isinstance(error, GoogleAuthError):
            return isinstance(error, TransportError) or bool(getattr(error, "retryable", False))
        # A wrong address, file or certificate stays wrong. Any other error is a broken connection.
        wrong_address = (exceptions.InvalidURL, exceptions.MissingSchema, exceptions.InvalidSchema)
        if isinstance(error, (Damaged, exceptions.SSLError, *wrong_address)):
            return False
        is_of_file = isinstance(error, OSError) and not isinstance(error, ConnectionError)
        return isinstance(error, exceptions.RequestException) or not is_of_file

    def show_endpoint(self, url: str) -> str:
        return show_google_endpoint()


def _is_file_missing() -> bool:
    """Return whether GOOGLE_APPLICATION_CREDENTIALS names a file that does not exist."""
    file = os.environ.get(_CREDENTIALS_VARIABLE, "")
    return file != "" and not os.path.exists(file)


def show_google_endpoint() -> str:
    """Return the store's endpoint as messages show it, without a password. GOOGLE if no variable
    sets an endpoint.
    """
    return hide_password(read_endpoint()) or GOOGLE


def read_endpoint() -> str:
    """Return the endpoint that an environment variable sets; "" if none does."""
    values = [os.environ.get(name, "") for name in ENDPOINT_VARIABLES]
    return next(filter(None, values), "").rstrip("/")
