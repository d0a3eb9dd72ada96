"""An HTTPS proxy on the loopback, behind which a server of the tests answers at the address of a
real store: to a client nothing is an emulator.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Tunnel(NamedTuple):
    """A proxy, and the certificate of the host behind it."""

    proxy: str
    "The proxy's address for HTTPS_PROXY."
    certificate: Path
    "The file that a client must trust."
    connects: list[str]
    "The heads of the CONNECT requests so far."


@contextlib.contextmanager
def open_tunnel(url: str, host: str, folder: Path) -> Iterator[Tunnel]:
    """Let a server answer as `https://host`, through a proxy, until the block ends.

    Args:
        url: the address of the server, on the loopback.
        host: the only host to which the proxy connects.
        folder: gets the certificate.
    """
    certificate = folder / "tunnel.pem"
    certificate.write_bytes(_make_certificate(host))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = ("127.0.0.1", int(url.rpartition(":")[2]))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        tunnel = Tunnel(address, certificate, [])
        arguments = (listener, context, host, server, tunnel.connects)
        threading.Thread(target=_accept, args=arguments, daemon=True).start()
        yield tunnel


def _accept(
    listener: socket.socket,
    context: ssl.SSLContext,
    host: str,
    server: tuple[str, int],
    connects: list[str],
) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            arguments = (client, context, host, server, connects)
            threading.Thread(target=_tunnel, args=arguments, daemon=True).start()


def _tunnel(
    client: socket.socket,
    context: ssl.SSLContext,
    host: str,
    server: tuple[str, int],
    connects: list[str],
) -> None:
    """Answer a CONNECT to the host, and pass on what comes through the tunnel."""
    with client, contextlib.suppress(OSError):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += client.recv(1)
        connects.append(head.decode())
        if not head.startswith(f"CONNECT {host}:443 ".encode()):
            client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            return
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with (
            context.wrap_socket(client, server_side=True) as secure,
            socket.create_connection(server) as store,
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


def _make_certificate(host: str) -> bytes:
    """Return a key and a certificate for it, which names the host."""
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
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    no_password = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, no_password) + certificate.public_bytes(encoding)
