"""The connection to a Ray cluster, a running one or one that this process starts on its machine;
and the supervisor of a node.

Ray is imported only in this file and ray_engine.py, and only where it was asked for. The driver
must run on a node of the cluster, as under `ray job submit`. Ray Client, whose URLs begin with
ray:// too, passes results through a proxy, and loses them with the connection.

A supervisor is an actor that Ray keeps on a node, and that runs the local engine there. The driver
sends it units and asks for news: the answer comes within a second, or as soon as a unit has ended.
Workers are spawned, never forked, since the actor's threads would not survive a fork; they end with
the actor. The local engine handles their deaths, hangs and memory.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from socket import gethostname
from typing import Any

from mdsmix import __version__
from mdsmix.engines.hang import SILENT_SECONDS
from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.memory import choose_memory_cap, count_cpus
from mdsmix.engines.tasks import Task
from mdsmix.engines.workers import make_picklable
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.processor.server import share_server

STORE_BYTES = 80 << 20
"""Memory for objects of a cluster that this process starts: the least that Ray takes, since tasks
and results are a few KB.
"""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}
"Environment of a cluster that this process starts: it sends nobody statistics."
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
"""Variables of Ray's token. Without any, Ray writes a new cluster's token into the home folder, for
good, or does not start.
"""
WANTS_TOKEN = "it asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to that of its head where ~/.ray/auth_token is another or none"
FOLDER_SECONDS = 5
"How long deleting a cluster's folder is tried: Ray's last processes still write logs into it."
LONGEST_FOLDER = 40
"""Where the temporary folder's path has more characters, /tmp is taken: Ray adds a long name, and a
Unix socket's path has 107 at most.
"""


def parse_engine(engine: str) -> str | None:
    """The address of a cluster in `--engine`: ADDRESS of `ray://ADDRESS`; RAY_ADDRESS or "" of
    `ray`; None of `local`. RecipeError for any other text, and where Ray is not installed.
    """
    if engine == "local":
        return None
    name, sign, address = engine.partition("://")
    if name != "ray" or (sign and not address):
        raise RecipeError(
            f"--engine {engine} is none: `local` is the processes of this machine, `ray` a Ray cluster of this machine's own, or the one "
            "that RAY_ADDRESS names, and ray://ADDRESS the one at that address, such as ray://10.0.0.5:6379 or ray://auto."
        )
    if find_spec("ray") is None:
        raise RecipeError(
            f"--engine {engine} wants Ray, which is not installed in this environment: pip install 'mdsmix[ray]', on every node."
        )
    return address or os.environ.get("RAY_ADDRESS", "")


@contextmanager
def connect_to_cluster(address: str, workers: int | None) -> Iterator[None]:
    """Makes this process a driver of the cluster inside the block, unless it is one already.

    Ray replaces the handler of SIGTERM when it starts, so callers enter and leave the block within
    `terminable_later`, which restores it. Ray ends this process, with a sentence, where the
    cluster's head is gone for a minute.

    Args:
        address: blank starts a cluster on this machine. It is stopped, and its folder deleted, at
        the end of the block.
        workers: processors of a cluster that is started; None or 0: all that this process may use.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    with _folder() if not address else nullcontext() as folder:
        try:
            _start(folder, workers) if folder else _join(address)
            yield
        finally:
            ray.shutdown()


@contextmanager
def delay_sigterm() -> Iterator[None]:
    """Holds a SIGTERM back until the end of the block, and restores its handler: an exception that
    a handler raises while Ray waits would end the process with exit code 1.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if came:
            signal.raise_signal(signal.SIGTERM)


def _join(address: str) -> None:
    """Joins a running cluster. RecipeError for an address of Ray Client; Unreachable where no head
    answers within 40 s.
    """
    import ray

    if "://" in address:
        raise RecipeError(
            f"RAY_ADDRESS is {address}, an address of Ray Client, which loses a run with its connection: start mdsmix on a node of the "
            "cluster, by `ray job submit`, or name the cluster's own address, such as ray://10.0.0.5:6379."
        )
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")  # else Ray asks 20 times
    try:
        ray.init(address=address, **_SILENT)
    except Exception as error:  # a plain Exception where the cluster asks for a token
        said = f"{type(error).__name__} {error.__cause__}"
        asks = "InvalidAuthToken" in said or "AuthenticationError" in said
        raise Unreachable(
            f"no Ray cluster can be joined at {address} ({WANTS_TOKEN if asks else error_line(error)}): this machine must be a node of it, "
            "with the same version of Ray and the same minor version of Python; `ray job submit` starts mdsmix on one."
        ) from None


def _start(folder: str, workers: int | None) -> None:
    import ray

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if not any(map(os.environ.get, TOKENS)):  # Ray goes on with the first one that it has read
        os.environ[TOKENS[0]] = secrets.token_hex(32)
    try:
        ray.init(
            address="local",
            num_cpus=workers or count_cpus(),
            num_gpus=0,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            _temp_dir=folder,
            **_SILENT,
        )
    except Exception as error:  # a plain Exception where a node is not up in time
        raise Unreachable(
            f"Ray could not be started on this machine ({error_line(error)}): see that memory and the disk of {folder} have room, or "
            "leave --engine out, which takes processes of this machine."
        ) from None


_SILENT: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


@contextmanager
def _folder() -> Iterator[str]:
    """A folder for the sockets and logs of a cluster that this process starts, deleted at the end
    of the block.
    """
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(
        prefix="mdsmix-ray-", dir=parent if len(parent) <= LONGEST_FOLDER else "/tmp"
    )
    try:
        yield folder
    finally:
        deadline = time.monotonic() + FOLDER_SECONDS
        while os.path.exists(folder) and time.monotonic() < deadline:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.05)


def error_line(error: BaseException, number: int = 0) -> str:
    """A line of an error's words, the first or the one with this number; its class where it has no
    words.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[number].rstrip(".:")[:200]


Message = tuple[Any, ...]
"""("progress", bytes, tokens), ("say", sentence), ("done", number, result) or ("failed",
exception).
"""


class Supervisor:
    """An actor that runs the local engine on a node. It is given a few units at a time."""

    def __init__(self, version: str, pool: PoolSettings, environment: Mapping[str, str]) -> None:
        """Opens the local engine.

        Args:
            version: the driver's version of mdsmix.
            pool: settings of the local engine; `memory` is the user's cap, 0: half of the node's
            memory.
            environment: variables of the driver, without credentials; the node's own values go
            first.
        """
        # Spawned workers would run the file of the main module, which imports Ray.
        vars(sys.modules["__main__"]).pop("__file__", None)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        self._version, self._messages, self._ends = version, list[Message](), ExitStack()
        self.engine = LocalEngine(replace(pool, memory=pool.memory or choose_memory_cap()))
        self.engine.begin(self._on_progress, self._say)
        if pool.aside:
            self._ends.enter_context(share_server())

    def exchange(self, given: Sequence[tuple[int, Task[Any]]], seconds: float) -> list[Message]:
        """Takes units (number, task) and works on. Returns the messages since the last call as soon
        as a unit has ended, after `seconds` at the latest. Ends the process where no call comes for
        SILENT_SECONDS.
        """
        if self._version != __version__:
            unlike = Unreachable(
                f"the node {gethostname()} has mdsmix {__version__}, and this run is of mdsmix {self._version}: install the same one on "
                f'every node, or send it along: ray job submit --runtime-env-json \'{{"pip": ["mdsmix=={self._version}"]}}\'.'
            )
            return [("failed", unlike)]
        # Ray does not end a node that nobody asks any more.
        signal.alarm(int(SILENT_SECONDS))
        for number, task in given:
            self.engine.add(number, task)
        deadline, ended = time.monotonic() + seconds, list[Message]()
        try:
            while not ended and time.monotonic() < deadline:
                ended = [("done", *found) for found in self.engine.step()]
        except Exception as error:
            ended = [("failed", make_picklable(error))]
        told, self._messages = [*self._messages, *ended], []
        return told

    def end(self) -> None:
        """Ends all workers, after they have removed half-written files, and returns then."""
        self.engine.stop()
        self.engine.close()
        self._ends.close()

    def _on_progress(self, size: int, tokens: int) -> None:
        self._messages.append(("progress", size, tokens))

    def _say(self, sentence: str) -> None:
        self._messages.append(("say", sentence))
