"""A real MinIO for the tests that need S3, one that runs already or one that the tests start; and
other servers on the loopback.

`MDSMIX_TEST_S3_ENDPOINT` names a running one, used with the AWS_* credentials of the environment.
Otherwise the `minio` binary that `make minio` installs is started on a free loopback port with a
folder of its own. Without either the tests fail: a skipped S3 test would look like a passed one.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.alarm import WAIT_SECONDS

KEYS = {
    "AWS_ACCESS_KEY_ID": "mdsmix-tests",
    "AWS_SECRET_ACCESS_KEY": "a-password-for-loopback",
    "AWS_DEFAULT_REGION": "us-east-1",
}
S3_SETTINGS = {"S3_ENDPOINT_URL": "{url}", **KEYS}
MINIO_SETTINGS = {
    "MINIO_ROOT_USER": KEYS["AWS_ACCESS_KEY_ID"],
    "MINIO_ROOT_PASSWORD": KEYS["AWS_SECRET_ACCESS_KEY"],
    "MINIO_UPDATE": "off",
    "MINIO_BROWSER": "off",
    # A key with which it encrypts the objects of buckets that ask for it.
    "MINIO_KMS_SECRET_KEY": "tests:" + base64.b64encode(bytes(32)).decode(),
}


@contextlib.contextmanager
def provide_minio(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment variables with which boto3, streaming and mdsmix reach the server."""
    endpoint = os.environ.get("MDSMIX_TEST_S3_ENDPOINT")
    if endpoint:
        yield {"S3_ENDPOINT_URL": endpoint}
        return
    with start_own_minio(folder) as server:
        yield server.settings


@contextlib.contextmanager
def start_own_minio(folder: Path) -> Iterator[Server]:
    """Start a server for this test alone, even if the environment names another one."""
    address = ["--address", "127.0.0.1:{port}", "--console-address", "127.0.0.1:0"]
    binary = find_binary("minio", "make minio (4.5 minutes the first time)")
    with run_server(
        [binary, "server", "--quiet", *address, str(folder / "data")], folder
    ) as server:
        yield server


class Server:
    """A server that a test may stop and start again, on the same port and with the same data."""

    def __init__(
        self, command: Sequence[str], folder: Path, port: int, settings: Mapping[str, str]
    ) -> None:
        """Store the arguments.

        Args:
            command: the words of the server's command, with `{port}` for its port.
            folder: a folder of its own.
            port: the port of the loopback on which it listens.
            settings: the environment variables with which clients reach it, with `{url}` for its
                address.
        """
        self._command = [word.format(port=port) for word in command]
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{port}"
        self.settings = {name: value.format(url=self.url) for name, value in settings.items()}

    def start(self) -> None:
        """Start the server, and return when it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=os.environ | MINIO_SETTINGS, stdout=log, stderr=subprocess.STDOUT
            )
        url = f"{self.url}/minio/health/live"  # other servers refuse it, which is an answer too
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            if is_answering(url):
                return
            time.sleep(0.05)
        raise RuntimeError(f"nothing answers on {url}: {self._log.read_text(errors='replace')}")

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(timeout=WAIT_SECONDS)
            self._process = None


def is_answering(url: str) -> bool:
    """Return whether a server answers. A refusal counts as an answer, an error 5xx does not."""
    try:
        urllib.request.urlopen(url, timeout=2)
    except urllib.error.HTTPError as refusal:
        return refusal.code < 500
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


@contextlib.contextmanager
def run_server(
    command: Sequence[str], folder: Path, settings: Mapping[str, str] = S3_SETTINGS
) -> Iterator[Server]:
    """Run the server of this command until the block ends.

    Args:
        settings: the environment variables with which clients reach it (`Server`).
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    server = Server(command, folder, free_port(), settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def find_binary(name: str, remedy: str) -> str:
    """Return the path of a binary on PATH or where `go install` puts binaries.

    Args:
        remedy: the command that installs it, for the message if it is missing.
    """
    folders = [None, os.environ.get("GOBIN", ""), str(Path.home() / "go" / "bin")]
    go = shutil.which("go")
    if go:
        answer = subprocess.run([go, "env", "GOPATH"], capture_output=True, text=True, check=True)
        folders.append(f"{answer.stdout.strip()}/bin")
    for folder in folders:
        path = shutil.which(name, path=folder)
        if path:
            return path
    raise RuntimeError(f"there is no `{name}` on PATH or in the Go bin folder: run {remedy}")


_reserved: list[socket.socket] = []
"""A socket name for each port that this process uses, until it ends: no other run of tests on this
machine gets the same port.
"""


def free_port() -> int:
    """Return a free port below those that the system gives to connections: no connection takes it
    before the server starts, nor while the server is stopped.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if sys.platform == "linux":
                name = socket.socket(socket.AF_UNIX)
                name.bind(f"\0mdsmix-tests-{port}")
                _reserved.append(name)
            return port
