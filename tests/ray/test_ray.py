"""On a cluster that loses nodes, workers and its driver: the bytes of one process, and what is told
of it.

It is one cluster for all tests here: a head without processors, and two nodes of one processor
each, all on this machine. Ray's own folder is in the system's temporary one, under a short name,
because sockets lie in it. A lost node is given up within seven seconds, not within a minute as
Ray's own settings have it.
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
from tests.converting import documents, files, lying_at, mdsmix, pairs, write_jsonl, write_recipe
from tests.processes import SET_UNIT_SIZE
from tests.ray.delayed_engine import DelayingEngine, ProcessTree, wait_until
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
"And none of its workers is ended because others on this machine take memory."
WINDOW = 4_000


@dataclass
class Cluster:
    """The cluster, and nodes that tests take away from it."""

    cluster: Any

    @property
    def engine(self) -> str:
        return f"ray://{self.cluster.address}"

    def add(self, nodes: int = 1) -> None:
        for _ in range(nodes):
            self.cluster.add_node(num_cpus=1, wait=False, **SMALL)
        self.cluster.wait_for_nodes(WAIT_SECONDS)

    def replace(self, raylet: int) -> None:
        """Another node in the place of one whose raylet is dead."""
        raylets = {n.all_processes["raylet"][0].process.pid: n for n in self.cluster.worker_nodes}
        self.cluster.remove_node(raylets[raylet], allow_graceful=False)
        self.add()


@pytest.fixture(scope="session")
def cluster(_minio_settings: dict[str, str]) -> Iterator[Cluster]:
    """This process is its driver. Its nodes have the credentials of the tests' MinIO, and know not
    where it is.
    """
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        for name, value in _minio_settings.items():
            if "ENDPOINT" not in name:
                patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster as Made

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": IMPATIENT, **SMALL}
        made = Made(initialize_head=True, head_node_args=head)
        try:
            cluster = Cluster(made)
            cluster.add(2)
            ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two streams; `web` leaves tokens over in each unit and holds bad records."""
    converting.windows(monkeypatch, WINDOW)
    texts = [{"text": f"Document {n} says so. " * (n % 7)} for n in range(400)]
    web = write_jsonl(tmp_path / "a.jsonl", [*texts, {"text": 5}, {"no": "text"}])
    asked = [{"prompt": f"What is {n % 90}?", "response": f"It is {n % 90}."} for n in range(300)]
    faq = write_jsonl(tmp_path / "c.jsonl", asked)
    streams = {"web": documents(web), "faq": pairs(faq, duplicates="drop")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams, shared=True)


def by_one_process(recipe: Path) -> dict[str, bytes]:
    """What one process makes of `web`."""
    one = recipe.parent / "one"
    converting.run_recipe(recipe, f"local={one}", only=["web"])
    return published(one)


def published(root: Path) -> dict[str, bytes]:
    """All that lies there but the lease and what a killed process leaves of a write."""
    found = files(root).items()
    return {name: data for name, data in found if not name.endswith((".tmp", "/lease"))}


POOL = PoolSettings(workers=0, memory=0)


def test_the_bytes_are_those_of_one_process(cluster: Cluster, recipe: Path, bucket: str) -> None:
    """Into a folder that all nodes share, and into a bucket, whose endpoint the nodes learn from
    the driver.
    """
    answer = mdsmix("convert", recipe, f"remote=s3://{bucket}", "--engine", cluster.engine)
    assert answer.code == 0, answer.err
    assert re.search(r"web +402 +342 +58 +2 ", answer.out), answer.out
    watcher = converting.Told()
    with closing(RayEngine("", POOL, {})) as engine:
        list(convert(open_recipe(recipe), Options(), watcher, engine))
    home = recipe.parent
    converting.run_recipe(recipe, f"local={home / 'one'}")
    assert files(home / "out") == files(home / "one") == lying_at(f"s3://{bucket}")
    sizes = [(home / name).stat().st_size for name in ("a.jsonl", "c.jsonl")]
    assert watcher.sizes == sizes[0] + 2 * sizes[1], "what drops duplicates is read twice"
    again = mdsmix("convert", recipe, "--engine", cluster.engine)
    assert "web: up to date" in again.out


def test_a_late_worker_of_a_lost_node_changes_nothing(cluster: Cluster, recipe: Path) -> None:
    """A raylet is killed while its worker has the first unit, and the worker waits until its unit
    was done again and all is published. Then it goes on, in other pieces, to its end.
    """
    expected, out = by_one_process(recipe), recipe.parent / "out"
    engine, watcher = DelayingEngine(recipe.parent / "told"), converting.Told()
    ended = engine.folder / "ended"

    def strike() -> ProcessTree:
        found = engine.holder()
        os.kill(found.raylet, signal.SIGKILL)
        return found

    with ThreadPoolExecutor(1) as pool, closing(engine):
        striker = pool.submit(strike)
        list(convert(open_recipe(recipe), Options(only=["web"]), watcher, engine))
    late = striker.result()
    try:
        (lost,) = [sentence for sentence in watcher.messages if "was lost" in sentence]
        assert "work unit" in lost
        assert published(out) == expected
        assert not ended.exists(), "it is to be late"
        os.kill(late.worker, 0)
        (engine.folder / "go").touch()
        wait_until(ended.exists)
        assert published(out) == expected
        assert mdsmix("verify", out / "web/train").code == 0
        assert "web: up to date" in mdsmix("convert", recipe, "--only", "web").out
    finally:
        os.kill(late.supervisor, signal.SIGKILL)
        cluster.replace(late.raylet)


@pytest.mark.usefixtures("cluster")
@mock.patch.object(ray_engine, "GRACE_SECONDS", 30)  # on a busy machine
def test_a_closed_run_leaves_nobody_at_work_and_nothing_half_written(
    tmp_path: Path,
) -> None:
    halves = [make_call(write_slowly, tmp_path / f"half-{n}", False) for n in range(4)]
    tasks = [make_call(wait_for_file, tmp_path, "half-*"), *halves]
    with closing(RayEngine("", POOL, {})) as engine:
        run = engine.run(tasks, ignore_progress, print)
        next(run)
        assert list(tmp_path.glob("half-*"))
        run.close()
        assert list(tmp_path.glob("half-*")) == []


def ended(recipe: Path, number: int, *arguments: str, **more: str) -> tuple[int, str]:
    """`mdsmix convert` as a process of its own that ends by this signal in the middle: its exit
    code, and what it said.
    """
    program = f"{SET_UNIT_SIZE.format(WINDOW)}; from tests.ray.delayed_engine import end_after_first_answer as end; end({number}); from mdsmix.cli.main import run; run()"
    words = [sys.executable, "-c", program, "convert", str(recipe), "--only", "web", *arguments]
    driver = subprocess.run(words, env=os.environ | more, capture_output=True, text=True)
    return driver.returncode, driver.stderr


def test_a_driver_that_was_killed_goes_on_where_it_was(cluster: Cluster, recipe: Path) -> None:
    assert ended(recipe, signal.SIGKILL, "--engine", cluster.engine)[0] == -signal.SIGKILL
    (outcome,) = converting.run_recipe(recipe, only=["web"], engine=cluster.engine)
    assert outcome.reused > 0
    assert published(recipe.parent / "out") == by_one_process(recipe)


def test_a_cluster_of_its_own_ends_with_a_run_that_is_terminated(recipe: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        arguments = ("--engine", "ray", "--workers", "1", "shared=false")
        code, said = ended(recipe, signal.SIGTERM, *arguments, TMPDIR=folder)
        assert code == 143, said
        assert said.splitlines()[-1].startswith("interrupted: nothing was half published")
        assert not list(Path(folder).iterdir())
        names = [path.name for path in (recipe.parent / "out").rglob("*")]
        assert any(name.endswith(".unit") for name in names)
        assert not [name for name in names if name.endswith((".tmp", "lease", "index.json"))]
        wait_until(lambda: not processes_with(folder))


def processes_with(word: str) -> list[str]:
    """Of all that run, the command lines that hold this word."""
    found = list[str]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return [line for line in found if word in line]
