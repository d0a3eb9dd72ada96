"""A node's side of a run on a Ray cluster: an actor that Ray keeps on the node, and that runs the local engine there.

The driver sends units and asks for news, once a second or as soon as there is some. Workers are started as new processes, never as forks of
the actor's own, whose threads would not survive that; they end with the actor. Their deaths, hangs and memory are the local engine's affair.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from socket import gethostname
from typing import Any

from mdsmix import __version__
from mdsmix.encode.processor_server import shared
from mdsmix.engines.hang import SILENT_SECONDS
from mdsmix.engines.local_engine import LocalEngine, PoolSettings
from mdsmix.engines.memory import default_cap
from mdsmix.engines.tasks import Task
from mdsmix.engines.workers import sendable
from mdsmix.errors import Unreachable

Message = tuple[Any, ...]
"""("progress", bytes, tokens), ("say", sentence), ("done", number, result) or ("failed", exception)."""


class Supervisor:
    """The local engine of a node, over units that come a few at a time."""

    def __init__(self, version: str, pool: PoolSettings, environment: Mapping[str, str]) -> None:
        """`version`: the driver's mdsmix; `pool`: its `memory` is the cap that the user asked for, 0: half of what the node has;
        `environment`: variables that the node has as its own or takes from the driver, no credential."""
        # Workers would import Ray, by the file of its main module.
        vars(sys.modules["__main__"]).pop("__file__", None)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        self._version, self._messages, self._ends = version, list[Message](), ExitStack()
        self.engine = LocalEngine(replace(pool, memory=pool.memory or default_cap()))
        self.engine.begin(self._on_progress, self._say)
        if pool.aside:
            self._ends.enter_context(shared())

    def exchange(self, given: Sequence[tuple[int, Task[Any]]], seconds: float) -> list[Message]:
        """Takes units and works on; returns what is to be told as soon as a unit has ended, and after so long at the latest."""
        if self._version != __version__:
            return [("failed", _other_version(self._version))]
        # Ray does not end a node that nobody asks any more.
        signal.alarm(int(SILENT_SECONDS))
        for number, task in given:
            self.engine.add(number, task)
        deadline, ended = time.monotonic() + seconds, list[Message]()
        try:
            while not ended and time.monotonic() < deadline:
                ended = [("done", *found) for found in self.engine.step()]
        except Exception as error:
            ended = [("failed", sendable(error))]
        told, self._messages = [*self._messages, *ended], []
        return told

    def end(self) -> None:
        """Returns when all workers have ended, after they have taken back what is half written."""
        self.engine.stop()
        self.engine.close()
        self._ends.close()

    def _on_progress(self, size: int, tokens: int) -> None:
        self._messages.append(("progress", size, tokens))

    def _say(self, sentence: str) -> None:
        self._messages.append(("say", sentence))


def _other_version(version: str) -> Unreachable:
    return Unreachable(
        f"the node {gethostname()} has mdsmix {__version__}, and this run is of mdsmix {version}: install the same one on every node, or "
        f'send it along: ray job submit --runtime-env-json \'{{"pip": ["mdsmix=={version}"]}}\'.'
    )
