"""Stores of other makers, each a real server on a free loopback port with a folder of its own.

`make stores` installs them: MinIO and versitygw as Go binaries, moto in an environment of its own. A missing one fails the
tests, since a skipped store would look like one that passed. `MDSMIX_TEST_STORE` names an endpoint that runs already, used
with the AWS_* credentials of the environment: so a store that cannot be started here is tried by hand.
"""

import contextlib
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.alarm import SECONDS
from tests.faults import IGNORES, RACES, Rule, failing
from tests.minio import Ended, _go_bin_folders, on_a_free_port, own_minio

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "AWS_ACCESS_KEY_ID": "mdsmix-tests",
    "AWS_SECRET_ACCESS_KEY": "a-password-for-loopback",
    "AWS_DEFAULT_REGION": "us-east-1",
}
NAMED = os.environ.get("MDSMIX_TEST_STORE")
STORES = [NAMED] if NAMED else ["MinIO", "versitygw", "moto", IGNORES, RACES]
"The last two are MinIO behind a proxy that drops conditions as some stores do."


@dataclass(frozen=True)
class Store:
    """A server that runs."""

    name: str
    settings: Mapping[str, str]
    "The environment variables with which boto3 and mdsmix reach it."
    keeps_conditions: bool = True


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[Store]:
    """The store of this name, until the block ends."""
    with contextlib.ExitStack() as stack:
        if name == NAMED:
            keeps = not os.environ.get("MDSMIX_TEST_STORE_IGNORES")
            yield Store(name, {"S3_ENDPOINT_URL": name}, keeps)
        elif name == "versitygw":
            yield Store(name, stack.enter_context(_started(_versitygw(folder), folder)))
        elif name == "moto":
            yield Store(name, stack.enter_context(_started(_moto(), folder)))
        else:
            settings = stack.enter_context(own_minio(folder)).settings
            if name == "MinIO":
                yield Store(name, settings)
                return
            proxy = stack.enter_context(failing(settings["S3_ENDPOINT_URL"]))
            proxy.rules = [Rule(name, "PUT", times=10**9)]
            yield Store(name, {**settings, "S3_ENDPOINT_URL": proxy.endpoint}, False)


def _versitygw(folder: Path) -> list[str]:
    found = (shutil.which("versitygw", path=place) for place in (None, *_go_bin_folders()))
    binary = next(filter(None, found), None)
    if binary is None:
        raise RuntimeError(
            "there is no versitygw on PATH or in the Go bin folder; run `make stores`"
        )
    for name in ("data", "sidecar"):
        (folder / name).mkdir()
    who = ["--access", KEYS["AWS_ACCESS_KEY_ID"], "--secret", KEYS["AWS_SECRET_ACCESS_KEY"]]
    served = ["posix", "--sidecar", str(folder / "sidecar"), str(folder / "data")]
    return [binary, *who, "--port", "127.0.0.1:{port}", *served]


def _moto() -> list[str]:
    python = ROOT / ".venv-stores" / "bin" / "python"
    if not python.exists():
        raise RuntimeError(f"there is no {python}; run `make stores`")
    return [str(python), str(Path(__file__).with_name("moto_in_turn.py")), "{port}"]


@contextlib.contextmanager
def _started(command: list[str], folder: Path) -> Iterator[dict[str, str]]:
    server, endpoint = on_a_free_port(lambda port: _answering(command, port, folder / "server.log"))
    try:
        yield {**KEYS, "S3_ENDPOINT_URL": endpoint}
    finally:
        _end(server)


def _answering(command: list[str], port: int, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    endpoint, words = f"http://127.0.0.1:{port}", [word.format(port=port) for word in command]
    with log.open("wb") as file:
        server = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    try:
        _wait_until_it_answers(endpoint, server, log)
    except Ended:
        _end(server)
        raise
    return server, endpoint


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait(timeout=SECONDS)


def _wait_until_it_answers(endpoint: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(endpoint, timeout=2)
            return
        except urllib.error.HTTPError:  # a refusal is an answer
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    failure = RuntimeError if server.poll() is None else Ended
    raise failure(f"nothing answers on {endpoint}: {log.read_text(errors='replace')}")
