"""Each test of this folder runs against each store in turn; a server lives as long as the tests that use it."""

import uuid
from collections.abc import Iterator

import pytest

from mdsmix.storage import Location, locate
from tests.conftest import IDENTITIES
from tests.stores.servers import NAMED, STORES, Store, running


@pytest.fixture(scope="session", params=STORES)
def _running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    with running(request.param, tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def store(_running: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store, set for the test and for the processes that it starts."""
    if not NAMED:
        for name in IDENTITIES:
            monkeypatch.delenv(name, raising=False)
    for name, value in _running.settings.items():
        monkeypatch.setenv(name, value)
    return _running


@pytest.fixture
def root(store: Store) -> Location:
    """A fresh bucket."""
    import boto3

    name = f"mdsmix-{uuid.uuid4().hex[:12]}"
    endpoint = store.settings["S3_ENDPOINT_URL"]
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=name)
    return locate(f"s3://{name}")
