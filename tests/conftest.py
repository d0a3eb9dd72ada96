"""What every test may ask for: a small real corpus, its tokenizer, a MinIO, a fresh bucket.

No test reaches a hub, reads the user's cache or the user's own S3 settings.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import botocore.loaders
import botocore.session
import botocore.useragent
import hypothesis
import pytest
import typer.main
from hypothesis import HealthCheck

from mdsmix.freed_memory import release_freed_memory
from mdsmix.recipe import TokenizerSpec
from mdsmix.shards import lease
from mdsmix.storage import gcs_errors, retries, s3_client, s3_errors
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from mdsmix.tokenizer.opening import WITHOUT_FRAMEWORKS
from tests import in_process
from tests.converting import Project
from tests.corpus import train_tokenizer, write_corpus
from tests.faults import Proxy, make_failing_proxy
from tests.minio import provide_minio
from tests.pictures import seeing_tokenizer
from tests.styles import write_letter_tokenizer

# No test is timed: on a busy machine an example of 12 ms takes 250, hypothesis' own deadline is
# 200, and it fails what draws for more than a second. And a property has the same examples in every
# run, so that what fails is by a change and not by chance: other ones are what `make soak` is for.
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize="MDSMIX_TEST_SEED" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("steady")
# Read by huggingface_hub when it is imported, so it is set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
# transformers would import torch, and a process of 1.3 GB takes 0.3 s to fork, which every
# conversion of a test does.
os.environ.update(WITHOUT_FRAMEWORKS)
IDENTITIES = ("AWS_PROFILE", "AWS_SESSION_TOKEN")


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of this session's own, no store but the tests' own, and what takes long done
    once.
    """
    loader = botocore.loaders.create_loader()
    with (
        pytest.MonkeyPatch.context() as patch,
        in_process.use_own_process(),
        in_process.describe_by_forks(),
    ):
        patch.setenv("MDSMIX_CACHE", str(tmp_path_factory.mktemp("cache")))
        for name in (*s3_errors.ENDPOINT_VARIABLES, *gcs_errors.ENDPOINT_VARIABLES):
            patch.delenv(name, raising=False)
        # A run that was killed is taken over after two seconds.
        patch.setattr(lease, "BEAT_SECONDS", 0.5)
        # The model of S3 costs 85 ms and 12 MB a client, and nearly each test of S3 has an endpoint
        # of its own.
        patch.setattr(botocore.session, "create_loader", lambda path=None: loader)
        # boto3 words it anew for each request, a twentieth of what that takes.
        patch.setattr(botocore.useragent.UserAgentString, "to_string", lambda agent: "tests")
        # Typer reads the options off their functions at each call: 25 ms, as long as what many
        # tests ask of a command.
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        # A shell starts what runs in the background without it, and so would all commands that
        # tests start and interrupt.
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield


@pytest.fixture(scope="session")
def own_temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this process and those that it starts leave in the system's temporary folder, two lock
    files of each of Streaming's datasets, they leave in this one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture
def processes() -> Iterator[None]:
    """Conversions of the test are done by workers, as outside of tests."""
    with in_process.use_workers():
        yield


def pytest_collection_finish() -> None:
    """What is imported stays: a forked worker that collects its garbage need not go through it,
    which copies every page.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """What a module has left is given back: a process of 1 GB takes 20 ms to fork, which each
    conversion does. What it has imported stays, so that no later collection goes through it: with
    torch and transformers each would take 0.3 s.
    """
    yield
    gc.collect()
    gc.freeze()
    release_freed_memory()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 2,000 tokens with a ChatML template, eos id 0 and pad id 1, looked at
    already.
    """
    folder = train_tokenizer(tmp_path_factory.mktemp("tokenizer"), documents_n=30)
    open_tokenizer(TokenizerSpec(name=str(folder)))
    return folder


@pytest.fixture(scope="session")
def lettered(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per character (`letters`)."""
    return write_letter_tokenizer(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="session")
def seeing(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That tokenizer with tokens of images."""
    return seeing_tokenizer(tokenizer_folder, tmp_path_factory.mktemp("seeing") / "tokenizer")


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """web.jsonl.zst (20 records), docs (200), faq (200), chat (100) and heldout.jsonl (20)."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), (20, 200, 200, 100, 20))


@pytest.fixture
def project(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with a stream of the documents in `*.jsonl`, whose source the test writes."""
    return Project(tmp_path, tokenizer_folder, monkeypatch).configure()


@pytest.fixture(scope="session")
def _minio_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with provide_minio(tmp_path_factory.mktemp("minio")) as settings:
        yield settings


@pytest.fixture
def minio(_minio_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The endpoint of a running MinIO, set for the test and the subprocesses that it starts."""
    if "AWS_ACCESS_KEY_ID" in _minio_settings:
        for name in IDENTITIES:
            monkeypatch.delenv(name, raising=False)
    for name, value in _minio_settings.items():
        monkeypatch.setenv(name, value)
    return _minio_settings["S3_ENDPOINT_URL"]


@pytest.fixture
def bucket(minio: str) -> str:
    """The name of a fresh, empty bucket in that MinIO."""
    name = f"mdsmix-{uuid.uuid4().hex[:12]}"
    boto3.client("s3", endpoint_url=minio).create_bucket(Bucket=name)
    return name


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store nobody waits for more than a second. Named before the proxy is used."""
    monkeypatch.setattr(s3_client, "_READ_SECONDS", 1)


@pytest.fixture
def proxy(minio: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between mdsmix and that MinIO, to make it fail; pauses are short, since the faults of tests
    are. An answer that is late on a busy machine is waited for, but by `impatient` tests of a
    silent one: a request that is sent again would count twice.
    """
    monkeypatch.setattr(retries, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(retries, "_LONGEST_PAUSE_SECONDS", 0.1)
    with make_failing_proxy(minio) as proxy:
        monkeypatch.setenv("S3_ENDPOINT_URL", proxy.endpoint)
        yield proxy
