"""A real MinIO for the tests that need S3: one that runs already, or a server of their own.

`MDSMIX_TEST_S3_ENDPOINT` names a running one, used with the AWS_* credentials of the environment.
Otherwise the `minio` binary that `make minio` installs is started on a free loopback port with a
folder of its own. Without either the tests fail: a skipped S3 test would look like a passed one.
"""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tests.alarm import SECONDS

T = TypeVar("T")

MISSING = (
    "no MinIO for the S3 tests: MDSMIX_TEST_S3_ENDPOINT is not set and there is no `minio` binary "
    "on PATH or in the Go bin folder; run `make minio` (4.5 minutes the first time)"
)


@contextlib.contextmanager
def running_minio(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment variables with which boto3, streaming and mdsmix reach the server."""
    if endpoint := os.environ.get("MDSMIX_TEST_S3_ENDPOINT"):
        yield {"S3_ENDPOINT_URL": endpoint}
        return
    with own_minio(folder) as server:
        yield server.settings


class Ended(RuntimeError):
    """A server that ended before it answered, as one does that finds its port taken."""


class Server:
    """A MinIO that a test may stop and start again, on the same port and with the same data."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> dict[str, str]:
        return {
            "S3_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "mdsmix-tests",
            "AWS_SECRET_ACCESS_KEY": "a-password-for-loopback",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        user, password = (self.settings[f"AWS_{n}"] for n in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        credentials = {"MINIO_ROOT_USER": user, "MINIO_ROOT_PASSWORD": password}
        self._process = _start(self._folder, self._port, credentials)
        _wait_until_live(self.settings["S3_ENDPOINT_URL"], self._process, self._folder)

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(timeout=SECONDS)
            self._process = None


@contextlib.contextmanager
def own_minio(folder: Path) -> Iterator[Server]:
    """A server of the test's own, even where another one is named."""
    server = on_a_free_port(lambda port: _started(folder, port))
    try:
        yield server
    finally:
        server.stop()


def _started(folder: Path, port: int) -> Server:
    server = Server(folder, port)
    try:
        server.start()
    except Ended:
        server.stop()
        raise
    return server


def on_a_free_port(start: Callable[[int], T]) -> T:
    """What `start` gives for a port that nobody has taken when its server comes to it: one that was free may not be so any more."""
    for _ in range(4):
        with contextlib.suppress(Ended):
            return start(free_port())
    return start(free_port())


def minio_binary() -> str:
    for folder in (None, *_go_bin_folders()):
        if found := shutil.which("minio", path=folder):
            return found
    raise RuntimeError(MISSING)


def _go_bin_folders() -> Iterator[str]:
    """Where `go install` puts binaries, with or without a Go on this machine."""
    yield os.environ.get("GOBIN", "")
    if go := shutil.which("go"):
        answer = subprocess.run([go, "env", "GOPATH"], capture_output=True, text=True, check=True)
        yield f"{answer.stdout.strip()}/bin"
    yield str(Path.home() / "go" / "bin")


_ours: list[socket.socket] = []
"Names that this process holds until it ends, one of each port: no other run of tests on this machine is given the same one."


def free_port() -> int:
    """Below those that the system gives to connections: none of these takes it before the server, nor while that is stopped."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if sys.platform == "linux":
                name = socket.socket(socket.AF_UNIX)
                name.bind(f"\0mdsmix-tests-{port}")
                _ours.append(name)
            return port


def _start(folder: Path, port: int, credentials: dict[str, str]) -> subprocess.Popen[bytes]:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    listen = ["--address", f"127.0.0.1:{port}", "--console-address", "127.0.0.1:0"]
    command = [minio_binary(), "server", "--quiet", *listen, str(folder / "data")]
    offline = {"MINIO_UPDATE": "off", "MINIO_BROWSER": "off"}
    with (folder / "minio.log").open("ab") as log:
        environment = os.environ | credentials | offline
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait_until_live(endpoint: str, server: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{endpoint}/minio/health/live", timeout=2)
            return
        time.sleep(0.05)
    log = (folder / "minio.log").read_text(errors="replace")
    failure = RuntimeError if server.poll() is None else Ended
    raise failure(f"MinIO does not answer on {endpoint}: {log}")
