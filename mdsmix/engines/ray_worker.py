"""The worker's side of a task on a Ray cluster: it does the task on some node, and tells a board what it is doing.

The board is an actor on the driver's node, which the driver reads. A worker tells it once a second what it has done and which
records are in work; where a try of the same task has ended in a death, it tells each piece before it touches it and waits for the
answer, because a record that kills whoever touches it is then to be found. A board that does not answer holds up no work.

A node may be set up in another way than the driver's: with another mdsmix, without the shared folder, with another store. Each
is found before the first task of a worker and is a sentence, since a unit that is written elsewhere would be published and not there.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from socket import gethostname
from typing import Any

from mdsmix.encode.counting import join
from mdsmix.engines.attempts import Attempt, Place
from mdsmix.engines.base import Task
from mdsmix.engines.channel import sendable
from mdsmix.engines.memory import holds_more, own
from mdsmix.errors import Unreachable
from mdsmix.storage import Location
from mdsmix.storage.waiting import said_by

BEAT_SECONDS = 1.0
"Between two messages of a worker: 1,000 workers send as many a second, a tenth of what an actor takes."
ANSWER_SECONDS = 10.0
"A board that has not answered by then is not waited for."
MEETING = re.compile(r"run-[0-9a-f]{16}")
"Names of the files that drivers leave where tasks write; the driver deletes its own, `mdsmix gc` that of a driver that was killed."


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one execution of a task says: how much it has done since it last did, and where it is."""

    execution: str
    node: str
    "The id of its node."
    place: Place | None = None
    size: int = 0
    tokens: int = 0
    used: int = 0
    "Processor time in milliseconds of the worker's main thread, which does the task: what moves lives. Ray's own threads always move."
    held: int = 0
    "Bytes of memory of its own."
    said: tuple[str, ...] = ()
    "Sentences that the user should read: a store is waited for."

    def after(self, older: News | None) -> News:
        """Both in one."""
        if older is None:
            return self
        size, tokens = self.size + older.size, self.tokens + older.tokens
        return replace(self, size=size, tokens=tokens, said=older.said + self.said)


class Board:
    """An actor. It keeps of each execution what the driver has not read, so it stays small however long nobody reads."""

    def __init__(self) -> None:
        self._news: dict[str, News] = {}

    def begin(self, execution: str, node: str) -> None:
        """A try has a worker, which has not loaded mdsmix yet."""
        self.tell(News(execution=execution, node=node))

    def tell(self, news: News) -> None:
        self._news[news.execution] = news.after(self._news.get(news.execution))

    def take(self) -> list[News]:
        found, self._news = list(self._news.values()), {}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What goes with every task of a run."""

    memory: int
    "Bytes that the task may hold."
    settings: Mapping[str, str]
    "Environment variables that a node has as its own, or else takes from the driver: where the store is; no credential."
    meeting: Location | None
    "A file that the driver has written where tasks write."
    of: str
    "What it holds: the name of the run."
    many: bool
    "There are other nodes than the driver's."


class RayReporter:
    """The Reporter of a task on a cluster."""

    def __init__(
        self, tell: Callable[[News, bool], None], news: News, memory: int, sure: bool
    ) -> None:
        """`sure`: whether each piece of records is told, and heard, before it is touched."""
        self._tell, self._news, self._sure = tell, news, sure
        self._whole: News | None = None
        self._lock = threading.Lock()
        self.memory = memory

    def on_progress(self, size: int, tokens: int) -> None:
        with self._lock:
            news = self._news
            self._news = replace(news, size=news.size + size, tokens=news.tokens + tokens)

    def on_records(self, place: Place | None) -> None:
        with self._lock:
            self._news = replace(self._news, place=place)
        if self._sure:
            self.tell()

    def wait_for_room(self) -> None:
        """There is: Ray starts a task where the memory is free that it asks for."""

    def is_tight(self) -> bool:
        return holds_more(self.memory)

    def say(self, sentence: str) -> None:
        with self._lock:
            self._news = replace(self._news, said=(*self._news.said, sentence))

    def tell(self) -> None:
        self._tell(self.news(), self._sure)

    def news(self) -> News:
        """What was not told yet."""
        with self._lock:
            found, self._news = self._news, replace(self._news, size=0, tokens=0, said=())
            found = replace(found, used=_used(), held=own(os.getpid()))
            self._whole = found.after(self._whole)
        return found

    def whole(self) -> News:
        """All of the try, told or not: the board may learn the last of it after the driver has the answer."""
        last = self.news()
        return self._whole or last

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Inside of the block a thread tells the board where the task is."""
        over = threading.Event()
        heart = threading.Thread(target=self._beat, args=[over], name="board", daemon=True)
        heart.start()
        try:
            yield
        finally:
            over.set()
            heart.join(ANSWER_SECONDS)

    def _beat(self, over: threading.Event) -> None:
        self._tell(self.news(), False)
        while not over.wait(BEAT_SECONDS):
            self._tell(self.news(), False)


def do(packed: bytes, execution: str, sent: Sent, board: Any) -> tuple[str, Any, Any]:
    """("done", result, all that the try has told or would have) or ("failed", an exception, the same)."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # it has one processor of its node
    for name, value in sent.settings.items():
        os.environ.setdefault(name, value)
    join(sent.of)
    task: Task[Any]
    attempt: Attempt
    task, attempt = pickle.loads(packed)
    news = News(execution=execution, node=node_id())
    reporter = RayReporter(_telling(board), news, sent.memory, bool(attempt.deaths))
    try:
        with _stopped_once(), reporter.beating(), said_by(reporter.say):
            if sent.meeting:  # a mount that does not answer is found by its silence
                _refuse_elsewhere(sent.meeting, sent.of)
            return "done", task.do(attempt, reporter), reporter.whole()
    except Exception as error:
        return "failed", sendable(_placed(error) if sent.many else error), reporter.whole()


@contextmanager
def _stopped_once() -> Iterator[None]:
    """The driver asks more than once to stop: what it asks again does not interrupt whoever takes back what is half written."""

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _used() -> int:
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    return int(time.clock_gettime(clock) * 1000)


def node_id() -> str:
    """Of the node of this process."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _telling(board: Any) -> Callable[[News, bool], None]:
    """Tells an actor; waits for its answer where that is asked for."""
    import ray

    def tell(news: News, sure: bool) -> None:
        with suppress(ray.exceptions.RayError):
            told = board.tell.remote(news)
            if sure:
                ray.get(told, timeout=ANSWER_SECONDS)

    return tell


@cache
def _refuse_elsewhere(meeting: Location, of: str) -> None:
    """Unreachable where the driver's file is not here, once for each run of a process."""
    found = meeting.fetch(most=1 << 10)
    if found is None or found[1] != of.encode():
        raise Unreachable(
            f"the node {gethostname()} does not see what this run has written to {meeting.parent}, so its shards would lie where no "
            "reader finds them: mount that folder on every node, or give every node the store's endpoint and credentials."
        )


def _placed(error: Exception) -> Exception:
    """With the node's name, since what could not be reached there may be there elsewhere."""
    if isinstance(error, Unreachable):
        return type(error)(f"on the node {gethostname()}: {error}")
    return error


def board_at(here: str) -> Any:
    """The actor that workers tell, on the driver's node, so that it lives as long as the driver may."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(here, soft=False)
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=strategy)(Board)
    return actor.remote()


def shim() -> Any:
    """What Ray carries to a node by its code, since a node may have no mdsmix, or another: it says so, and else does the task."""

    def mdsmix_task(version: str, packed: bytes, name: str, sent: bytes, board: Any) -> Any:
        import pickle
        import socket
        from contextlib import suppress

        import ray

        with suppress(ray.exceptions.RayError):  # before what may stand still
            board.begin.remote(name, ray.get_runtime_context().get_node_id())
        try:
            from mdsmix import __version__ as found
            from mdsmix.engines import ray_worker
        except ImportError:
            found = ""
        if found != version:
            has = f"has mdsmix {found}" if found else "has no mdsmix with Ray's engine"
            return (
                "refused",
                f"the node {socket.gethostname()} {has}, and this run is of mdsmix {version}: install the same one on every node, or "
                f'send it along: ray job submit --runtime-env-json \'{{"pip": ["mdsmix=={version}"]}}\'.',
                None,
            )
        return ray_worker.do(packed, name, pickle.loads(sent), board)

    return mdsmix_task
