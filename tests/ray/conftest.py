"""One cluster for all tests here: a head without processors, and two nodes of one processor each, all on this machine.

Ray's own folder is in the system's temporary one, under a short name, because sockets lie in it. A node that stands still
is given up within seven seconds, not within a minute as Ray's own settings have it.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.alarm import SECONDS

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


@dataclass
class Cluster:
    """The cluster, and nodes that tests take away from it."""

    cluster: Any

    @property
    def engine(self) -> str:
        return f"ray://{self.cluster.address}"

    def add(self) -> None:
        self.cluster.add_node(num_cpus=1, wait=False, **SMALL)
        self.cluster.wait_for_nodes(SECONDS)

    def replace(self, raylet: int) -> None:
        """Another node in the place of one whose raylet is dead or stopped."""
        nodes = {
            node.all_processes["raylet"][0].process.pid: node for node in self.cluster.worker_nodes
        }
        self.cluster.remove_node(nodes[raylet], allow_graceful=False)
        self.add()


@pytest.fixture(scope="session")
def cluster(_minio_settings: dict[str, str]) -> Iterator[Cluster]:
    """This process is its driver. Its nodes have the credentials of the tests' MinIO, and know not where it is."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        for name, value in _minio_settings.items():
            if "ENDPOINT" not in name:
                patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster as Made

        made = Made(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "_system_config": IMPATIENT,
                **SMALL,
            },
        )
        try:
            for _ in range(2):
                made.add_node(num_cpus=1, wait=False, **SMALL)
            made.wait_for_nodes(SECONDS)
            ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
            yield Cluster(made)
        finally:
            ray.shutdown()
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
