"""A node's side of a run on a Ray cluster: an actor that Ray keeps on the node, and beside it a process with the local engine.

The driver sends units and asks for news, once a second or as soon as there is some. The actor passes bytes on and knows nothing of them, so
a node may have no mdsmix, or another one: the actor says which. The process is a subprocess, never a fork of Ray's own, whose threads
would not survive that. It ends with the actor; its workers end with it. Deaths, hangs and memory of workers are the local engine's affair.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from socket import gethostname
from typing import Any

from mdsmix import __version__
from mdsmix.encode.processor_server import shared
from mdsmix.engines.hang import SILENT_SECONDS
from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.memory import default_cap
from mdsmix.engines.workers import sendable
from mdsmix.errors import Denied, RecipeError, Unreachable
from mdsmix.storage import Location
from mdsmix.words import listed

STOP = b"stop"
"Instead of a unit: the node's process ends."
BEAT_SECONDS = 1.0
"Between two messages of a node that has no result to tell."
MEETING = re.compile(r"run-[0-9a-f]{16}")
"Names of the files that drivers leave where units are written; the driver deletes its own, `mdsmix gc` that of a driver that was killed."

STORES = (
    "S3_ENDPOINT_URL",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
)
"Variables that say where a store is. Credentials are each node's own, or the job's."


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How a node works, as plain data from the driver."""

    pool: PoolSettings
    "Its `memory` is the cap that the user asked for; 0: half of what the node has."
    environment: Mapping[str, str]
    "Variables that the node has as its own, or else takes from the driver: where the store is; no credential."
    meeting: Location | None
    "A file that the driver has written where units are written; no other run has one of this name."


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The progress of a node since its last beat, and what the user should know of it."""

    size: int = 0
    tokens: int = 0
    peak: int = 0
    "Bytes that the node's process and its workers held at most so far."
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class Supervisor:
    """The process of a node: the local engine over units that come one by one."""

    driver: Connection
    engine: LocalEngine
    beat: Beat = field(default_factory=Beat)
    beaten: float = 0.0
    heard: float = field(default_factory=time.monotonic)
    "When the driver last asked."

    def work(self) -> None:
        """Until the driver says so or asks no more, or the actor is gone; the first exception of a unit ends it too, and is sent.
        Ray itself ends no actor whose node is lost."""
        self.engine.begin(self.on_progress, self.say)
        try:
            while time.monotonic() - self.heard < SILENT_SECONDS:
                while self.driver.poll():
                    self._receive()
                found = list(self.engine.step(self.driver))
                if found or time.monotonic() - self.beaten > BEAT_SECONDS:
                    self._beat()
                for number, result in found:
                    self._send("done", number, result)
        except (EOFError, ConnectionError):
            pass
        except Exception as error:
            self._send("failed", sendable(error))
        finally:
            self.engine.stop()
            self.engine.close()

    def on_progress(self, size: int, tokens: int) -> None:
        self.beat = replace(self.beat, size=self.beat.size + size, tokens=self.beat.tokens + tokens)

    def say(self, sentence: str) -> None:
        self._send("say", sentence)

    def _receive(self) -> None:
        """A unit, or nothing but that the driver asks; EOFError where it wants no more."""
        message = self.driver.recv_bytes()
        self.heard = time.monotonic()
        if message == STOP:
            raise EOFError
        if message:
            number, task = pickle.loads(message)
            self.engine.add(number, task)

    def _beat(self) -> None:
        said = tuple(self.engine.warnings())
        self._send("beat", replace(self.beat, peak=self.engine.peak, warnings=said))
        self.beat, self.beaten = Beat(), time.monotonic()

    def _send(self, *message: Any) -> None:
        self.driver.send_bytes(pickle.dumps(message))


def main(descriptor: int) -> None:
    """The node's process. Ctrl-C is the driver's affair, which closes the connection then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = Connection(descriptor)
    settings: NodeSettings = pickle.loads(driver.recv_bytes())
    for name, value in settings.environment.items():
        os.environ.setdefault(name, value)
    cap = settings.pool.memory or default_cap()
    supervisor = Supervisor(driver, LocalEngine(replace(settings.pool, memory=cap)))
    try:
        refuse_elsewhere(settings.meeting)
    except Unreachable as error:
        driver.send_bytes(pickle.dumps(("failed", error)))
        return
    with shared() if settings.pool.aside else nullcontext():
        supervisor.work()


def refuse_elsewhere(meeting: Location | None) -> None:
    """Unreachable where the driver's file is not here: a unit that is written elsewhere would be published, and missing."""
    if meeting and not meeting.stat():
        raise Unreachable(
            f"the node {gethostname()} does not see what this run has written to {meeting.parent}, so its shards would lie where no "
            "reader finds them: mount that folder on every node, or give every node the store's endpoint and credentials."
        )


def refuse_another(name: str, version: str) -> None:
    """Unreachable where a node has another mdsmix, or none: its version is blank then."""
    if version != __version__:
        has = f"has mdsmix {version}" if version else "has no mdsmix"
        raise Unreachable(
            f"the node {name} {has}, and this run is of mdsmix {__version__}: install the same one on every node, or "
            f'send it along: ray job submit --runtime-env-json \'{{"pip": ["mdsmix=={__version__}"]}}\'.'
        )


def refuse_unshared(found: dict[str, dict[str, Any]], local: Sequence[str]) -> None:
    """RecipeError where units would look for folders of this machine on other nodes."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    others = sorted(node["NodeManagerHostname"] for id, node in found.items() if id != here)
    if others and local:
        raise RecipeError(
            f"the cluster has nodes beside this one ({listed(others)}), and {listed(local)} is of this machine alone: publish to and read "
            "from s3://, or, where every node mounts the same folders under the same names, say shared: true in the recipe."
        )


def named_by(error: Exception, name: str) -> Exception:
    """With the node's name, since what could not be reached there may be there elsewhere."""
    if type(error) in (Unreachable, Denied):
        return type(error)(f"on the node {name}: {error}")
    return error


def actor() -> Any:
    """The class that Ray carries to a node by its code."""

    class MdsmixNode:
        """Starts the node's process and passes messages on, as bytes."""

        def begin(self, version: str, settings: bytes) -> str:
            """The version of mdsmix on this node, blank where it has none; the process is started where it is `version`."""
            import multiprocessing
            import os
            import subprocess

            try:
                from mdsmix import __version__ as found
            except ImportError:
                return ""
            if found == version:
                self.pipe, its = multiprocessing.Pipe()
                code = f"from mdsmix.engines.ray_node import main; main({its.fileno()})"
                self.process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=[its.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
                its.close()
                self.pipe.send_bytes(settings)
            return found

        def exchange(self, given: list[bytes], seconds: float) -> tuple[list[bytes], str]:
            """Passes messages on to the process; its own, waited for no longer than that, and how it ended where it has."""
            found = list[bytes]()
            try:
                for message in given or [b""]:
                    self.pipe.send_bytes(message)
                while self.pipe.poll(0 if found else seconds):
                    found.append(self.pipe.recv_bytes())
            except (EOFError, ConnectionError):
                return found, f"its process ended with exit code {self.process.wait()}"
            return found, ""

        def end(self, message: bytes, seconds: float) -> None:
            """Tells the process to end, and returns when it has, or has been silent for so long."""
            try:
                self.pipe.send_bytes(message)
                while self.pipe.poll(seconds):
                    self.pipe.recv_bytes()
            except (EOFError, ConnectionError):
                self.process.wait(seconds)

    return MdsmixNode
