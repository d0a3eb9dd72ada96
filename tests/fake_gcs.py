"""A real fake-gcs-server, which speaks the JSON API of Google Cloud Storage, on a free loopback
port. `make stores` installs it.

Its objects are in memory, where it checks the condition of a write and writes under one lock.
"""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.minio import Server, find_binary, run_server

SETTINGS = {"STORAGE_EMULATOR_HOST": "{url}"}


@contextlib.contextmanager
def start_fake_gcs(folder: Path) -> Iterator[Server]:
    """Run a server until the block ends."""
    binary = find_binary("fake-gcs-server", "make stores")
    address = ["-scheme", "http", "-host", "127.0.0.1", "-port", "{port}"]
    with run_server([binary, *address, "-backend", "memory"], folder, SETTINGS) as server:
        yield server


def create_gcs_bucket(endpoint: str, name: str) -> None:
    request = urllib.request.Request(
        f"{endpoint}/storage/v1/b?project=tests",
        json.dumps({"name": name}).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=10).close()


def write_service_account(path: Path, token_uri: str = "http://127.0.0.1:1/token") -> Path:
    """Write the file of a service account with a new key."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account",
        "project_id": "tests",
        "private_key_id": "1",
        "private_key": pem.decode(),
        "client_email": "tests@tests.iam.gserviceaccount.com",
        "token_uri": token_uri,
    }
    path.write_text(json.dumps(account))
    return path


TOKEN = "a-token-of-the-tests"


@contextlib.contextmanager
def serve_tokens(refuse: Callable[[], bool] = lambda: False) -> Iterator[str]:
    """Yield the address of a server that gives TOKEN to each service account, until the block
    ends.

    Args:
        refuse: called at each request; returns whether the server refuses it as that of an account
            that was deleted.
    """

    class TokenServer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}
            is_refused = refuse()
            self.send_response(400 if is_refused else 200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            body = json.dumps({"error": "invalid_grant"} if is_refused else answer)
            self.wfile.write(body.encode())

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), TokenServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/token"
        server.shutdown()
