"""A cluster that loses nodes, workers and its driver writes the bytes of one process, and reports
the losses.

All tests here use one cluster: a head without processors, and two nodes of one processor each, all
on this machine. Ray's own folder is in the system's temporary one, under a short name, because it
contains sockets. A lost node is given up within seven seconds, not within a minute as with Ray's
own settings.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mdsmix.conversion.planning import Options
from mdsmix.conversion.run import convert
from mdsmix.engines import ray_engine
from mdsmix.engines.local_engine import PoolSettings
from mdsmix.engines.ray_engine import RayEngine
from mdsmix.kinds import open_recipe
from tests import converting
from tests.alarm import WAIT_SECONDS
from tests.converting import (
    documents,
    mdsmix,
    pairs,
    read_files,
    read_location,
    write_jsonl,
    write_recipe,
)
from tests.processes import SET_UNIT_SIZE
from tests.ray.delayed_engine import DelayingEngine, ProcessTree, SharingEngine, wait_until
from tests.tasks import ignore_progress, make_call, wait_for_file, write_slowly

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
SMALL: dict[str, Any] = {"object_store_memory": 80 << 20, "memory": 4 << 30}
IMPATIENT = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
    "memory_monitor_refresh_ms": 0,
}
"Lost nodes are noticed fast, and no worker is ended because the machine is short of memory."
WINDOW = 4_000


@dataclass
class Cluster:
    """The cluster, with nodes that tests remove."""

    cluster: Any

    @property
    def engine(self) -> str:
        return f"ray://{self.cluster.address}"

    def add(self, nodes: int = 1) -> None:
        for _ in range(nodes):
            self.cluster.add_node(num_cpus=1, wait=False, **SMALL)
        self.cluster.wait_for_nodes(WAIT_SECONDS)

    def replace(self, raylet: int) -> None:
        """Replace a node whose raylet is dead by a new one."""
        raylets = {n.all_processes["raylet"][0].process.pid: n for n in self.cluster.worker_nodes}
        self.cluster.remove_node(raylets[raylet], allow_graceful=False)
        self.add()


@pytest.fixture(scope="session")
def cluster(_minio_settings: dict[str, str]) -> Iterator[Cluster]:
    """Start the cluster, with this process as its driver. Its nodes have the credentials of the
    tests' MinIO, but not its address.
    """
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        for name, value in _minio_settings.items():
            if "ENDPOINT" not in name:
                patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster as RayCluster

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": IMPATIENT, **SMALL}
        ray_cluster = RayCluster(initialize_head=True, head_node_args=head)
        try:
            cluster = Cluster(ray_cluster)
            cluster.add(2)
            ray.init(address=ray_cluster.address, logging_level=logging.ERROR, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            ray_cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recipe of two streams; `web` has leftover tokens in each unit, and bad records."""
    converting.set_window_size(monkeypatch, WINDOW)
    texts = [{"text": f"Document {n} says so. " * (n % 7)} for n in range(400)]
    project = write_jsonl(tmp_path / "a.jsonl", [*texts, {"text": 5}, {"no": "text"}])
    questions = [
        {"prompt": f"What is {n % 90}?", "response": f"It is {n % 90}."} for n in range(300)
    ]
    faq = write_jsonl(tmp_path / "c.jsonl", questions)
    streams = {"web": documents(project), "faq": pairs(faq, duplicates="drop")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams, shared=True)


def convert_in_one_process(recipe: Path) -> dict[str, bytes]:
    """Return the files of `web` as one process writes them."""
    folder = recipe.parent / "one"
    converting.run_recipe(recipe, f"local={folder}", only=["web"])
    return read_published(folder)


def read_published(root: Path) -> dict[str, bytes]:
    """Return all files except the lease and temporary files of killed writers."""
    files = read_files(root).items()
    return {name: data for name, data in files if not name.endswith((".tmp", "/lease"))}


POOL = PoolSettings(workers=0, memory=0)


def test_a_cluster_writes_the_bytes_of_one_process(
    cluster: Cluster, recipe: Path, bucket: str
) -> None:
    """It writes to a folder that all nodes share, and to a bucket, whose endpoint the nodes get
    from the driver.
    """
    answer = mdsmix("convert", recipe, f"remote=s3://{bucket}", "--engine", cluster.engine)
    assert answer.code == 0, answer.err
    assert re.search(r"web +402 +342 +58 +2 ", answer.out), answer.out
    watcher = converting.RecordingWatcher()
    with closing(RayEngine("", POOL, {})) as engine:
        list(convert(open_recipe(recipe), Options(), watcher, engine))
    home = recipe.parent
    converting.run_recipe(recipe, f"local={home / 'one'}")
    assert read_files(home / "out") == read_files(home / "one") == read_location(f"s3://{bucket}")
    sizes = [(home / name).stat().st_size for name in ("a.jsonl", "c.jsonl")]
    assert watcher.sizes == sizes[0] + 2 * sizes[1], "a stream that drops duplicates is read twice"
    again = mdsmix("convert", recipe, "--engine", cluster.engine)
    assert "web: up to date" in again.out


def test_a_late_worker_of_a_lost_node_changes_nothing(cluster: Cluster, recipe: Path) -> None:
    """A raylet is killed while its worker has the first unit, and the worker waits until its unit
    was done again and everything is published. Then it continues, in other pieces, to its end.
    """
    expected = convert_in_one_process(recipe)
    out = recipe.parent / "out"
    engine = DelayingEngine(recipe.parent / "delayed")
    watcher = converting.RecordingWatcher()
    ended = engine.folder / "ended"

    def kill_raylet() -> ProcessTree:
        processes = engine.find_processes()
        os.kill(processes.raylet, signal.SIGKILL)
        return processes

    with ThreadPoolExecutor(1) as pool, closing(engine):
        killing = pool.submit(kill_raylet)
        list(convert(open_recipe(recipe), Options(only=["web"]), watcher, engine))
    late = killing.result()
    try:
        (sentence,) = [message for message in watcher.messages if "was lost" in message]
        assert "work unit" in sentence
        assert read_published(out) == expected
        assert not ended.exists(), "the worker still waits"
        os.kill(late.worker, 0)
        (engine.folder / "go").touch()
        wait_until(ended.exists)
        assert read_published(out) == expected
        assert mdsmix("verify", out / "web/train").code == 0
        assert "web: up to date" in mdsmix("convert", recipe, "--only", "web").out
    finally:
        os.kill(late.supervisor, signal.SIGKILL)
        cluster.replace(late.raylet)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("victim", ["assistant", "worker"])
def test_a_unit_that_two_workers_share_loses_one_of_them(recipe: Path, victim: str) -> None:
    engine = SharingEngine(recipe.parent / "shared", victim)
    watcher = converting.RecordingWatcher()
    with closing(engine):
        list(convert(open_recipe(recipe), Options(only=["web"]), watcher, engine))
    assert (engine.folder / "died").exists()
    if victim == "worker":
        assert (engine.folder / "assisted").exists()
    assert read_published(recipe.parent / "out") == convert_in_one_process(recipe)
    assert mdsmix("verify", recipe.parent / "out/web/train").code == 0


@pytest.mark.usefixtures("cluster")
@mock.patch.object(ray_engine, "GRACE_SECONDS", 30)  # on a busy machine
def test_a_closed_run_ends_its_workers_and_leaves_no_half_written_file(tmp_path: Path) -> None:
    halves = [make_call(write_slowly, tmp_path / f"half-{n}", False) for n in range(4)]
    tasks = [make_call(wait_for_file, tmp_path, "half-*"), *halves]
    with closing(RayEngine("", POOL, {})) as engine:
        run = engine.run(tasks, ignore_progress, print)
        next(run)
        assert list(tmp_path.glob("half-*"))
        run.close()
        assert list(tmp_path.glob("half-*")) == []


def convert_and_signal(
    recipe: Path, number: int, *arguments: str, **environment: str
) -> tuple[int, str]:
    """Run `mdsmix convert` in a process of its own that sends itself this signal in the middle.
    Return its exit code and its stderr.
    """
    program = (
        f"{SET_UNIT_SIZE.format(WINDOW)}; "
        f"from tests.ray.delayed_engine import end_after_first_answer as end; end({number}); "
        "from mdsmix.cli.main import run; run()"
    )
    words = [sys.executable, "-c", program, "convert", str(recipe), "--only", "web", *arguments]
    driver = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)
    return driver.returncode, driver.stderr


def test_after_a_killed_driver_the_same_command_reuses_finished_units(
    cluster: Cluster, recipe: Path
) -> None:
    code, _ = convert_and_signal(recipe, signal.SIGKILL, "--engine", cluster.engine)
    assert code == -signal.SIGKILL
    (outcome,) = converting.run_recipe(recipe, only=["web"], engine=cluster.engine)
    assert outcome.reused > 0
    assert read_published(recipe.parent / "out") == convert_in_one_process(recipe)


def test_a_cluster_that_a_run_has_started_ends_when_the_run_is_terminated(recipe: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        arguments = ("--engine", "ray", "--workers", "1", "shared=false")
        code, errors = convert_and_signal(recipe, signal.SIGTERM, *arguments, TMPDIR=folder)
        assert code == 143, errors
        assert errors.splitlines()[-1].startswith("interrupted: nothing was half published")
        assert not list(Path(folder).iterdir())
        names = [path.name for path in (recipe.parent / "out").rglob("*")]
        assert any(name.endswith(".unit") for name in names)
        assert not [name for name in names if name.endswith((".tmp", "lease", "index.json"))]
        wait_until(lambda: not find_processes_with(folder))


def find_processes_with(word: str) -> list[str]:
    """Return the command lines of running processes that contain this word."""
    command_lines = list[str]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command_lines.append(path.read_bytes().decode(errors="replace"))
    return [line for line in command_lines if word in line]
