"""Azure's URLs, accounts and signatures. No server is needed: Microsoft's own client is the oracle
of what mdsmix signs and reads.
"""

from __future__ import annotations

import base64
import io
from datetime import datetime, timezone
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import azure.identity
import pytest
import requests
from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError
from azure.core.pipeline import PipelineContext, PipelineRequest
from azure.core.rest import HttpRequest
from azure.storage.blob import BlobServiceClient
from azure.storage.blob._shared.authentication import SharedKeyCredentialPolicy
from requests.exceptions import ConnectionError, ConnectTimeout, InvalidURL, SSLError
from urllib3.exceptions import NewConnectionError

from mdsmix.errors import Denied, NoSuchPlace, RecipeError, Unreachable
from mdsmix.storage import Stat, azure_account, azure_client, locate, retries
from mdsmix.storage.azure import _copy
from mdsmix.storage.azure_account import Account, Signer, find_account
from mdsmix.storage.azure_client import BlobBody
from mdsmix.storage.azure_errors import AzureError
from tests.clock import Clock

KEY = base64.b64encode(b"a key of the tests" * 3).decode()
HOST = "tests.blob.core.windows.net"
VARIABLES = ("AZURE_ACCOUNT_NAME", "AZURE_ACCOUNT_ACCESS_KEY", "AZURE_STORAGE_CONNECTION_STRING")


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_url_names_account_container_and_key() -> None:
    place = locate(f"azure://{HOST}/data/a folder/x.jsonl/")
    assert (place.url, place.container) == (
        f"azure://{HOST}/data/a folder/x.jsonl",
        f"{HOST}/data",
    )
    assert (place.blob, place.key, place.name) == (
        "data/a folder/x.jsonl",
        "a folder/x.jsonl",
        "x.jsonl",
    )
    assert locate(f"azure://{HOST}/data/").stat() is None, "a container is no blob"
    assert place.parent.fetch_command("here") == [
        *("azcopy", "copy", "--recursive"),
        f"https://{HOST}/data/a folder/*",
        "here",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "azure://data/web",
        f"azure://{HOST}",
        f"azure://{HOST}/*/x",
        "azure://a.b.blob.core.windows.net/c/x",
        "azure://tests.dfs.core.windows.net/c/x",
        "azure:///c/x",
    ],
)
def test_a_url_without_account_or_container_is_refused_with_the_right_form(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = r"write azure://{}\.blob\.core\.windows\.net/CONTAINER/KEY, as Streaming reads it"
    with pytest.raises(RecipeError, match=form.format("ACCOUNT")):
        locate(url)
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "mine")
    with pytest.raises(RecipeError, match=form.format("mine")):
        locate(url)


def test_a_container_or_key_that_cannot_be_is_refused() -> None:
    for part in ("Data/x", "my_data/x"):
        with pytest.raises(RecipeError, match="have only lower-case letters, digits and hyphens"):
            locate(f"azure://{HOST}/{part}")
    for part in ("c/../other", "../c", "c/./x"):
        with pytest.raises(RecipeError, match="which is not a folder in a store"):
            locate(f"azure://{HOST}/{part}")
    assert locate(f"azure://{HOST}/$web/x/").path == f"{HOST}/$web/x"


REQUESTS: list[tuple[str, str, dict[str, str], bytes]] = [
    ("GET", "", {}, b""),
    ("HEAD", "", {"If-Match": '"0x1"'}, b""),
    ("GET", "", {"x-ms-range-get-content-md5": "true", "If-Match": '"0x1"'}, b""),
    ("PUT", "", {"x-ms-blob-type": "BlockBlob", "Content-MD5": "abc=", "If-None-Match": "*"}, b"1"),
    ("PUT", "", {"x-ms-copy-source": f"https://{HOST}/a/b%20c"}, b""),
    ("DELETE", "", {}, b""),
    ("GET", "?restype=container&comp=list&prefix=a%20b%2F%C3%BC%2B&delimiter=%2F", {}, b""),
]


@pytest.mark.parametrize(("method", "query", "headers", "body"), REQUESTS)
def test_a_request_is_signed_as_by_microsofts_client(
    method: str, query: str, headers: dict[str, str], body: bytes
) -> None:
    account = Account("tests", f"https://{HOST}", "here", base64.b64decode(KEY))
    url = f"https://{HOST}/data/{quote('ü 50%/+x')}{query}"
    ours = requests.Request(method, url, headers, data=body or None, auth=Signer(account)).prepare()
    signature = ours.headers.pop("Authorization")
    theirs = HttpRequest(method, ours.url, headers=dict(ours.headers))
    policy = SharedKeyCredentialPolicy("tests", KEY)
    policy.on_request(PipelineRequest(theirs, PipelineContext(None)))
    assert signature == theirs.headers["Authorization"]


def test_a_range_is_signed() -> None:
    """Microsoft's client sends x-ms-range instead, so Azurite is the oracle here."""
    account = Account("tests", f"https://{HOST}", "here", base64.b64decode(KEY))
    headers = {"x-ms-date": "now", "Range": "bytes=1-2"}
    text = azure_account._make_text_to_sign("GET", f"https://{HOST}/data/x", headers, account.name)
    assert text.split("\n")[11:] == ["bytes=1-2", "x-ms-date:now", "/tests/data/x"]


STRINGS = [
    f"DefaultEndpointsProtocol=https;AccountName=tests;AccountKey={KEY};EndpointSuffix=core.windows.net",
    f"AccountName=tests;AccountKey={KEY};BlobEndpoint=http://127.0.0.1:10000/tests/;",
    "BlobEndpoint=https://tests.blob.core.windows.net/;SharedAccessSignature=sv=1&sig=a%2Fb%3D",
    "BlobEndpoint=https://tests.blob.core.windows.net",
]


@pytest.mark.parametrize("text", STRINGS)
def test_a_connection_string_is_read_as_by_microsofts_client(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    theirs = BlobServiceClient.from_connection_string(text)
    account = find_account("tests")
    client = azure_client.Client(account, None)
    assert account.name == "tests"
    assert client.make_url("data/a b") == theirs.get_blob_client("data", "a b").url
    assert bool(account.key) == (theirs.credential is not None)
    assert account.needs_login is False
    assert KEY not in repr(account)
    assert "sig=" not in repr(account)


SETTINGS: list[tuple[dict[str, str], str]] = [
    (
        {"AZURE_ACCOUNT_NAME": "other"},
        "names Azure's account tests, and AZURE_ACCOUNT_NAME the account other",
    ),
    ({"AZURE_ACCOUNT_NAME": "tests\n"}, "AZURE_ACCOUNT_NAME contains a line break"),
    ({"AZURE_ACCOUNT_ACCESS_KEY": "eA==\r\n"}, "AZURE_ACCOUNT_ACCESS_KEY contains a line break"),
    (
        {"AZURE_STORAGE_CONNECTION_STRING": "BlobEndpoint=http://127.0.0.1:1/te\nsts"},
        "AZURE_STORAGE_CONNECTION_STRING contains a line break",
    ),
    (
        {"AZURE_ACCOUNT_ACCESS_KEY": "no base64!"},
        "the key in AZURE_ACCOUNT_ACCESS_KEY is not an account's key",
    ),
    ({"AZURE_STORAGE_CONNECTION_STRING": "x"}, "names no account: its value must look like"),
    (
        {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=other"},
        "and AZURE_STORAGE_CONNECTION_STRING the account other",
    ),
    (
        {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=tests;BlobEndpoint=localhost"},
        "is not an address that begins with http",
    ),
    (
        {"AZURE_STORAGE_CONNECTION_STRING": f"BlobEndpoint=https://{HOST}?sig=no base64!"},
        "is not an address that begins with http",
    ),
    (
        {
            "AZURE_STORAGE_CONNECTION_STRING": f"BlobEndpoint=https://{HOST}",
            "AZURE_ACCOUNT_NAME": "other",
        },
        "and AZURE_ACCOUNT_NAME the account other",
    ),
    (
        {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=tests;AccountKey=no base64!"},
        "the key in AZURE_STORAGE_",
    ),
]


@pytest.mark.parametrize(("settings", "expected"), SETTINGS)
def test_settings_that_cannot_be_right_are_one_sentence_without_a_key(
    settings: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for request in (locate(f"azure://{HOST}/data/x").stat, lambda: find_account("tests")):
        with pytest.raises(Unreachable, match=expected) as refusal:
            request()
        message = str(refusal.value)
        assert not [text for text in ("no base64!", "eA==", "\n") if text in message]


class WallClock(Clock):
    """A clock whose time of the day begins at 0."""

    time = Clock.monotonic


def test_a_login_is_asked_for_a_token_only_when_the_last_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`az login` takes a second for each token. A refused token is asked for again once."""
    clock = WallClock()
    clock.now = 1e9
    scopes = list[str]()

    def get_token(scope: str) -> SimpleNamespace:
        scopes.append(scope)
        return SimpleNamespace(token=f"token {len(scopes)}", expires_on=clock.now + 3600)

    login = SimpleNamespace(get_token=get_token)
    monkeypatch.setattr(azure.identity, "ChainedTokenCredential", lambda *credentials: login)
    monkeypatch.setattr(azure_account, "time", clock)
    signer = Signer(find_account("tests"))
    for _ in range(3):
        request = requests.Request("GET", f"https://{HOST}/data/x", auth=signer).prepare()
        assert request.headers["Authorization"] == "Bearer token 1"
    clock.now += 3400
    assert signer.get_token() == "token 2"
    assert set(scopes) == {"https://storage.azure.com/.default"}

    refusals = [AzureError("InvalidAuthenticationInfo", 401)]

    def request_once(client: Any) -> str:
        if refusals:
            raise refusals.pop()
        return str(client.session.auth.get_token())

    azure_client._make_client.cache_clear()
    assert azure_client.ask_azure(f"azure://{HOST}/data/x", lambda client: client) is not None
    assert azure_client.ask_azure(f"azure://{HOST}/data/x", request_once) == "token 3"


def test_without_any_credentials_the_message_says_how_to_get_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get_token(scope: str) -> None:
        raise ClientAuthenticationError("a long report of each way to log in")

    login = SimpleNamespace(get_token=get_token)
    monkeypatch.setattr(azure.identity, "ChainedTokenCredential", lambda *credentials: login)
    place = locate(f"azure://{HOST}/data/x")
    for request in (place.stat, place.read, place.describe_access):
        with pytest.raises(Unreachable, match=WITHOUT) as refusal:
            request()
        assert "a long report" not in str(refusal.value)
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", KEY)
    expected = "endpoint of each URL, credentials from AZURE_ACCOUNT_ACCESS_KEY"
    assert place.describe_access() == expected


def test_a_forked_worker_has_its_own_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on one connection would read each other's answers."""
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", KEY)
    url = f"azure://{HOST}/data/x"
    session_of_parent = azure_client.ask_azure(url, lambda client: client.session)
    assert azure_client.ask_azure(url, lambda client: client.session) is session_of_parent

    def check() -> None:
        assert azure_client.ask_azure(url, lambda client: client.session) is not session_of_parent

    child = get_context("fork").Process(target=check)
    child.start()
    child.join()
    assert child.exitcode == 0


WITHOUT = (
    r"no credentials were found; set AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_ACCESS_KEY, or log in "
    r"with `az login`"
)
ERRORS: list[tuple[Exception, type[Unreachable], bool, str]] = [
    (AzureError("ServerBusy", 503), Unreachable, True, "the store asks to slow down; run the same"),
    (AzureError("503", 503), Unreachable, True, "the store is overloaded or down (503); run the"),
    (AzureError("429", 429), Unreachable, True, "the store is overloaded or down (429); run the"),
    (AzureError("OperationTimedOut", 500), Unreachable, True, "the store failed inside; run"),
    (AzureError("Md5Mismatch", 400), Unreachable, True, "the request failed (Md5Mismatch)"),
    (AzureError("400", 400), Unreachable, False, "the request failed (400); look up this code"),
    (AzureError("501", 501), Unreachable, False, "the store cannot do this"),
    (
        AzureError("ContainerNotFound", 404),
        NoSuchPlace,
        False,
        "the container does not exist; create",
    ),
    (AzureError("BlobNotFound", 404), Unreachable, False, "there is no such blob; check the path"),
    (
        AzureError("AuthenticationFailed", 403),
        Unreachable,
        False,
        "the account's key or the shared access signature is wrong",
    ),
    (
        AzureError("AuthorizationPermissionMismatch", 403),
        Denied,
        False,
        "access denied; give these",
    ),
    (AzureError("NewCode", 403), Denied, False, "access denied; give these credentials the role"),
    (AzureError("DamagedBody", 200), Unreachable, False, "the bytes that arrived differ"),
    (AzureError("UnreadableAnswer", 200), Unreachable, True, "the store's answer was cut off"),
    (ConnectTimeout(), Unreachable, True, "nothing answers there in time; check the network"),
    (
        OSError("no such file"),
        Unreachable,
        False,
        "the certificates for TLS cannot be read; correct",
    ),
    (InvalidURL("x"), Unreachable, False, "the endpoint is not a valid address; correct Blob"),
    (SSLError(), Unreachable, False, "the TLS connection failed; check REQUESTS_CA_BUNDLE"),
    (ServiceRequestError("x"), Unreachable, True, "the server of the login does not answer; check"),
    (
        ConnectionError(SimpleNamespace(reason=NewConnectionError(None, "refused"))),
        Unreachable,
        True,
        "nothing answers there; check the network, or the endpoint",
    ),
]


@pytest.mark.parametrize(("error", "kind", "is_temporary", "words"), ERRORS)
def test_an_error_is_one_sentence_and_only_temporary_ones_are_tried_again(
    error: Exception,
    kind: type[Unreachable],
    is_temporary: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(retries, "time", clock)
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", KEY)
    tries = 0

    def request(client: Any) -> None:
        nonlocal tries
        tries += 1
        raise error

    with pytest.raises(kind) as refusal:
        azure_client.ask_azure(f"azure://{HOST}/data/x", request)
    assert type(refusal.value) is kind
    message = str(refusal.value)
    assert message.startswith(f"cannot reach azure://{HOST}/data/x at https://{HOST}")
    assert words in message
    assert (tries > 3, "tried " in message) == (is_temporary, is_temporary)


class Answer:
    """An answer with this body. Its `raw` reads as urllib3 does."""

    status_code = 200

    def __init__(self, body: bytes, **headers: str) -> None:
        file = io.BytesIO(body)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.raw = SimpleNamespace(read=lambda size, decode_content: file.read(size))

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content_Length": "5"}, ""),
        ({"Content_Length": "9"}, "BrokenBody"),
        ({"Content_Length": "5", "Content_MD5": "gnzLDuqKcGxMNKFokfhOew=="}, ""),
        ({"Content_Length": "5", "Content_MD5": "AAAADuqKcGxMNKFokfhOew=="}, "DamagedBody"),
        ({}, "UnreadableAnswer"),
    ],
)
def test_bytes_that_are_missing_or_damaged_are_an_error(headers: dict[str, str], code: str) -> None:
    def read() -> bytes:
        body = BlobBody(Answer(b"12345", **headers))
        return b"".join(iter(lambda: body.read(2), b""))

    if not code:
        assert read() == b"12345"
        return
    with pytest.raises(AzureError) as error:
        read()
    assert error.value.code == code


@pytest.mark.parametrize(
    "changed",
    [
        {"ETag": ""},
        {"Last-Modified": ""},
        {"Last-Modified": "today"},
        {"Content-Length": "many"},
    ],
)
def test_an_answer_without_version_time_or_size_is_refused(changed: dict[str, str]) -> None:
    """A proxy may weaken the ETag."""
    headers = {
        "ETag": 'W/"0x1"',
        "Last-Modified": "Sun, 29 Nov 2026 19:02:09 GMT",
        "Content-Length": "5",
    }
    stat = azure_client.stat_from_headers(headers)
    when = datetime(2026, 11, 29, 19, 2, 9, tzinfo=timezone.utc).timestamp()
    assert (stat, stat.modified) == (Stat(5, "0x1"), when)
    with pytest.raises(Unreachable, match="answers without a time, an ETag or a size"):
        azure_client.stat_from_headers(headers | changed)


PAGES = (
    b"""<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs>
<BlobPrefix><Name>f/d/</Name></BlobPrefix>
<Blob><Name>f/b</Name><Properties><Last-Modified>Sun, 29 Nov 2026 19:02:09 GMT</Last-Modified>
<Etag>0x2</Etag><Content-Length>5</Content-Length></Properties><Metadata /></Blob>
<Blob><Name>f/marked</Name><Properties><Last-Modified>Sun, 29 Nov 2026 19:02:09 GMT</Last-Modified>
<Etag>0x3</Etag><Content-Length>0</Content-Length></Properties>
<Metadata><hdi_isfolder>true</hdi_isfolder></Metadata></Blob>
</Blobs><NextMarker>more</NextMarker></EnumerationResults>""",
    b"""<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs>
<Blob><Name Encoded="true">f/a%EF%BF%BE%25</Name><Properties>
<Last-Modified>Sun, 29 Nov 2026 19:02:09 GMT</Last-Modified>
<Etag>0x1</Etag><Content-Length>7</Content-Length></Properties></Blob>
<Blob><Name>f/folder</Name><Properties><ResourceType>directory</ResourceType></Properties></Blob>
</Blobs><NextMarker /></EnumerationResults>""",
)


def test_a_listing_leaves_out_folders_and_reads_names_that_xml_cannot_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """These are answers of an account with folders, as Azure documents them."""
    queries = list[dict[str, str]]()

    def send(method: str, path: str, query: dict[str, str]) -> SimpleNamespace:
        queries.append({**query})
        return SimpleNamespace(content=PAGES[len(queries) - 1], status_code=200)

    client = SimpleNamespace(send=send)
    monkeypatch.setattr("mdsmix.storage.azure.ask_azure", lambda url, request: request(client))
    files, folders = locate(f"azure://{HOST}/data/f").entries()
    assert folders == {"d"}
    assert {name: (stat.size, stat.stamp) for name, stat in files.items()} == {
        "a\ufffe%": (7, "0x1"),
        "b": (5, "0x2"),
    }
    assert [query.get("marker") for query in queries] == [None, "more"]
    assert {query["prefix"] for query in queries} == {"f/"}
    queries.clear()
    names = [name for name, _ in locate(f"azure://{HOST}/data/f").list()]
    assert names == ["a\ufffe%", "b"], "sorted, as such an account does not list them"


def test_a_copy_that_takes_long_is_waited_for_and_a_failed_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("mdsmix.storage.azure.time", clock)
    for last in ("success", "failed"):
        states = ["pending", "pending", last]
        answers = [SimpleNamespace(headers={"x-ms-copy-status": state}) for state in states]
        sent = list[str]()

        def send(method: str, *_: Any, sent: Any = sent, answers: Any = answers, **__: Any) -> Any:
            sent.append(method)
            return answers[len(sent) - 1]

        client = SimpleNamespace(send=send, make_url=str)
        if last == "success":
            _copy("data/a", "data/b", client)
        else:
            with pytest.raises(AzureError, match="CopyFailed"):
                _copy("data/a", "data/b", client)
        assert sent == ["PUT", "HEAD", "HEAD"]


def test_a_store_that_ignores_conditions_is_looked_at_before_a_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a store answers 201 to every write."""
    stamps = list[str]()

    def send(method: str, *_: Any, **__: Any) -> SimpleNamespace:
        if method == "PUT":
            stamps.append(f"0x{len(stamps)}")
        if not stamps:
            raise AzureError("BlobNotFound", 404)
        modified = "Sun, 29 Nov 2026 19:02:09 GMT"
        return SimpleNamespace(headers={"ETag": stamps[-1], "Last-Modified": modified})

    endpoint = "http://127.0.0.1:1/tests"
    client = SimpleNamespace(send=send, account=SimpleNamespace(endpoint=endpoint))
    monkeypatch.setattr("mdsmix.storage.azure.ask_azure", lambda url, request: request(client))
    monkeypatch.setattr("mdsmix.storage.azure._keeps", {endpoint: False})
    file = locate(f"azure://{HOST}/data/x")
    assert file.replace("0x9", b"1") is None
    first = file.create(b"1")
    assert file.create(b"2") is None
    second = file.replace(first.stamp, b"3")
    assert file.replace(first.stamp, b"4") is None
    assert stamps == [first.stamp, second.stamp] == ["0x0", "0x1"]
