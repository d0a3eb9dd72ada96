"""Stores of several makers, each a real server on a free loopback port with a folder of its own.

`make stores` installs them: MinIO, versitygw and fake-gcs-server as Go binaries, moto and Azurite
in an environment of their own.
A missing one fails the tests, since a skipped store would look like one that passed.
`MDSMIX_TEST_STORE` names an endpoint that runs already, used with the AWS_* credentials of the
environment: so a store that cannot be started here can be tried by hand.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3

from mdsmix.storage import Location, azure_client, gcs_client, locate, s3_client
from tests import azurite
from tests.fake_gcs import create_gcs_bucket, start_fake_gcs
from tests.faults import IGNORES, RACES, Rule, make_failing_proxy
from tests.minio import KEYS, find_binary, run_server, start_own_minio

PYTHON = Path(__file__).resolve().parents[2] / ".venv-stores" / "bin" / "python"
NAMED = os.environ.get("MDSMIX_TEST_STORE")
GOOGLE = "fake-gcs-server"
UNCONDITIONAL = [IGNORES, RACES, f"{GOOGLE}, {IGNORES}"]
"Stores that are reached through a proxy that drops conditions: MinIO, and Google's emulator."
AZURE = "Azurite"
PROTOCOLS = [GOOGLE, AZURE]
"Stores of a protocol of their own."
STORES = [NAMED] if NAMED else ["MinIO", "versitygw", "moto", *PROTOCOLS, *UNCONDITIONAL]


@dataclass(frozen=True)
class Store:
    """A running server."""

    name: str
    url: str
    settings: Mapping[str, str]
    "The environment variables with which clients and mdsmix reach it."
    keeps_conditions: bool = True
    scheme: str = "s3://"
    variable: str = "S3_ENDPOINT_URL"
    "The environment variable with its address, which is set to that of a proxy."
    value: str = "{url}"
    "The value of this variable for an address `{url}`."
    client: Any = s3_client
    "The module of mdsmix that sends requests to it, with `_READ_SECONDS`."
    temporary_faults: Sequence[str] = ()
    "Faults of the proxy after which a request is sent again."
    lasting_faults: Sequence[tuple[str, str, str]] = ()
    "Faults that last, the place (`tests.e2e.test_faults.PLACES`), and words of the sentence."

    def make_bucket(self) -> Location:
        """Return a new bucket. The store's settings are in the environment."""
        name = f"mdsmix-{uuid.uuid4().hex[:12]}"
        if self.scheme == "azure://":
            azurite.create_container(self.settings[self.variable], name)
            return locate(f"azure://{azurite.HOST}/{name}")
        if self.scheme == "gs://":
            create_gcs_bucket(self.settings[self.variable], name)
        else:
            endpoint = self.settings[self.variable]
            boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=name)
        return locate(self.scheme + name)


OF_GOOGLE: Mapping[str, Any] = {
    "scheme": "gs://",
    "variable": "STORAGE_EMULATOR_HOST",
    "client": gcs_client,
    "temporary_faults": (
        "500",
        "503",
        "408",
        "429 rateLimitExceeded",
        "403 rateLimitExceeded",
        "reset",
        "reset in the request",
        "damaged",
    ),
    "lasting_faults": (
        ("reset", "a shard", "the store closed the connection; run the same command again"),
        ("403 forbidden", "a shard", "access denied; give these credentials the permission"),
        ("401 required", "a shard", "the store does not accept the credentials"),
        ("429 rateLimitExceeded", "a unit record", "the store asks to slow down"),
        ("503", "the index", "the store is overloaded or down (503)"),
    ),
}

OF_AZURE: Mapping[str, Any] = {
    "scheme": "azure://",
    "variable": azurite.VARIABLE,
    "value": azurite.STRING,
    "client": azure_client,
    "temporary_faults": ("500", "503", "408", "429", "reset", "reset in the request", "damaged"),
    "lasting_faults": (
        ("reset", "a shard", "the store closed the connection; run the same command again"),
        ("403", "a shard", "access denied; give these credentials the role Storage Blob Data"),
        ("401", "a shard", "the token of the login is not valid, or has expired; log in again"),
        ("429", "a unit record", "the store is overloaded or down (429); run the same command"),
        ("503", "the index", "the store is overloaded or down (503); run the same command"),
    ),
}


@contextlib.contextmanager
def run_store(name: str, folder: Path) -> Iterator[Store]:
    """Run the store of this name until the block ends."""
    if name == NAMED:
        keeps_conditions = not os.environ.get("MDSMIX_TEST_STORE_IGNORES")
        yield Store(name, name, {"S3_ENDPOINT_URL": name}, keeps_conditions)
    elif name in COMMANDS:
        with run_server(COMMANDS[name](folder), folder) as server:
            yield Store(name, server.url, server.settings)
    elif name.startswith(GOOGLE):
        with start_fake_gcs(folder) as server:
            yield from _behind_proxy(Store(name, server.url, server.settings, **OF_GOOGLE))
    elif name == AZURE:
        with azurite.start_azurite(folder) as server:
            yield Store(name, server.url, server.settings, **OF_AZURE)
    else:
        with start_own_minio(folder) as server:
            yield from _behind_proxy(Store(name, server.url, server.settings))


def _behind_proxy(store: Store) -> Iterator[Store]:
    """Yield the store; through a proxy if its name ends with a fault of conditions."""
    fault = next((fault for fault in (IGNORES, RACES) if store.name.endswith(fault)), "")
    if not fault:
        yield store
        return
    with make_failing_proxy(store.url) as proxy:
        proxy.rules = [Rule(fault, "PUT", times=10**9)]
        value = store.value.format(url=proxy.endpoint)
        settings = {**store.settings, store.variable: value}
        yield replace(store, settings=settings, keeps_conditions=False)


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
