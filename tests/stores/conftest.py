"""A running store for the tests of a module, and a bucket in it for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mdsmix.storage import Location, retries
from tests.conftest import IDENTITIES
from tests.faults import Proxy, make_failing_proxy
from tests.stores.servers import NAMED, Store, run_store


@pytest.fixture(scope="session")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """Run a store for all tests that use it. A test names it by `parametrize`, with
    `indirect=True`.
    """
    with run_store(request.param, tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def store(running: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Set the store in the environment of the test and of the processes that it starts."""
    for name in () if NAMED else IDENTITIES:
        monkeypatch.delenv(name, raising=False)
    for name, value in running.settings.items():
        monkeypatch.setenv(name, value)
    return running


@pytest.fixture
def root(store: Store) -> Location:
    """Return a new bucket."""
    return store.make_bucket()


@pytest.fixture
def proxy(root: Location, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Return a proxy between mdsmix and the store, to make it fail. Pauses are short, since the
    faults of tests are.
    """
    monkeypatch.setattr(retries, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(retries, "_LONGEST_PAUSE_SECONDS", 0.1)
    with make_failing_proxy(store.url) as proxy:
        monkeypatch.setenv(store.variable, store.value.format(url=proxy.endpoint))
        yield proxy
