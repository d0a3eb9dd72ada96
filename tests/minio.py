"""A real MinIO for the tests that need S3: one that runs already, or a server of their own.

`MDSMIX_TEST_S3_ENDPOINT` names a running one, used with the AWS_* credentials of the environment.
Otherwise the `minio` binary that `make minio` installs is started on a free loopback port with a
folder of its own. Without either the tests fail: a skipped S3 test would look like a passed one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 60
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
    user, password = "mdsmix-tests", "a-password-for-loopback"
    port = _free_port()
    server = _start(folder, port, {"MINIO_ROOT_USER": user, "MINIO_ROOT_PASSWORD": password})
    try:
        _wait_until_live(f"http://127.0.0.1:{port}", server, folder)
        yield {
            "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": user,
            "AWS_SECRET_ACCESS_KEY": password,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.terminate()
        server.wait(timeout=30)


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(folder: Path, port: int, credentials: dict[str, str]) -> subprocess.Popen[bytes]:
    (folder / "data").mkdir(parents=True)
    listen = ["--address", f"127.0.0.1:{port}", "--console-address", "127.0.0.1:0"]
    command = [minio_binary(), "server", "--quiet", *listen, str(folder / "data")]
    offline = {"MINIO_UPDATE": "off", "MINIO_BROWSER": "off"}
    with (folder / "minio.log").open("wb") as log:
        environment = os.environ | credentials | offline
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait_until_live(endpoint: str, server: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{endpoint}/minio/health/live", timeout=2)
            return
        time.sleep(0.05)
    log = (folder / "minio.log").read_text(errors="replace")
    raise RuntimeError(f"MinIO did not answer on {endpoint} within {START_SECONDS} s: {log}")
