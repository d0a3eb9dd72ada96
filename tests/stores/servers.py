"""Stores of several makers, each a real server on a free loopback port with a folder of its own.

`make stores` installs them: MinIO and versitygw as Go binaries, moto in an environment of its own.
A missing one fails the tests, since a skipped store would look like one that passed.
`MDSMIX_TEST_STORE` names an endpoint that runs already, used with the AWS_* credentials of the
environment: so a store that cannot be started here can be tried by hand.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.faults import IGNORES, RACES, Rule, make_failing_proxy
from tests.minio import KEYS, find_binary, run_server, start_own_minio

PYTHON = Path(__file__).resolve().parents[2] / ".venv-stores" / "bin" / "python"
NAMED = os.environ.get("MDSMIX_TEST_STORE")
STORES = [NAMED] if NAMED else ["MinIO", "versitygw", "moto", IGNORES, RACES]
"The last two are MinIO behind a proxy that drops conditions as some stores do."


@dataclass(frozen=True)
class Store:
    """A running server."""

    name: str
    settings: Mapping[str, str]
    "The environment variables with which boto3 and mdsmix reach it."
    keeps_conditions: bool = True


@contextlib.contextmanager
def run_store(name: str, folder: Path) -> Iterator[Store]:
    """Run the store of this name until the block ends."""
    if name == NAMED:
        keeps_conditions = not os.environ.get("MDSMIX_TEST_STORE_IGNORES")
        yield Store(name, {"S3_ENDPOINT_URL": name}, keeps_conditions)
    elif name in COMMANDS:
        with run_server(COMMANDS[name](folder), folder) as server:
            yield Store(name, server.settings)
    else:
        with start_own_minio(folder) as server:
            if name == "MinIO":
                yield Store(name, server.settings)
                return
            with make_failing_proxy(server.settings["S3_ENDPOINT_URL"]) as proxy:
                proxy.rules = [Rule(name, "PUT", times=10**9)]
                yield Store(name, {**server.settings, "S3_ENDPOINT_URL": proxy.endpoint}, False)


def _versitygw(folder: Path) -> list[str]:
    (folder / "sidecar").mkdir()
    credentials = ["--access", KEYS["AWS_ACCESS_KEY_ID"], "--secret", KEYS["AWS_SECRET_ACCESS_KEY"]]
    backend = ["posix", "--sidecar", str(folder / "sidecar"), str(folder / "data")]
    binary = find_binary("versitygw", "make stores")
    return [binary, *credentials, "--port", "127.0.0.1:{port}", *backend]


def _moto(folder: Path) -> list[str]:
    if not PYTHON.exists():
        raise RuntimeError(f"there is no {PYTHON}: run make stores")
    return [str(PYTHON), str(Path(__file__).with_name("moto_in_turn.py")), "{port}"]


COMMANDS = {"versitygw": _versitygw, "moto": _moto}
