"""Lets workers without a task assist others: an assistant does parts of another worker's task.

The engine connects the two by a pair of sockets (`Worker.assist`). The worker sends parts, and the
assistant answers each in order (`MemoryPipe`). Either may close its end at any time:
- The worker closes it when its task has no more parts, or when it dies.
- The assistant closes it when the engine needs it elsewhere or memory is short, or when it dies.
  The worker then does the unanswered parts itself, so no part is lost. If a record has killed the
  assistant, it now kills the worker, which has reported it as active.

Both send the engine a sign of life each second while they wait for each other. So the engine finds
the one that hangs.
"""

from __future__ import annotations

import pickle
import socket
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple, Protocol

from mdsmix.engines.memory_pipe import MemoryPipe, NotPassed, can_create_memory_files
from mdsmix.engines.tasks import SIGN_OF_LIFE, ActiveRecords, Part, SharedTask, Task

LEAST_SHARE = 4 << 20
"""Bytes of a task that are left for each of the workers that share it: about one part for each.
"""
LEAST_NEW_SHARE = 16 << 20
"""The same if a process is started for it. That takes 60 ms of processor time, and if fewer workers
share the processors, the tokenizer of each has more threads. So one work unit of 30 MB of text is
ready as soon without an assistant.
"""


class Assist(NamedTuple):
    """The message to a worker that it shall assist another one."""

    task: Task[Any]
    "A SharedTask."
    number: int
    """Counts the assistances of the worker. The worker reports the end of an assistance with its
    number.
    """


ASSISTANT = "assistant"
"The message to a worker that it has an assistant."
MOST_UNTAKEN = 32
"""How many assistants are sent to a worker that has not taken them, since it takes messages only
between records. The pipe to a worker has room for about 130, and the engine must never wait for it.
"""


class Failure(NamedTuple):
    """The answer to a part that has raised an exception."""

    error: Exception


def make_picklable(error: Exception) -> Exception:
    """Return the error itself if it can be pickled and unpickled, otherwise a RuntimeError with its
    message.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def find_shared_bytes(task: Task[Any]) -> int:
    """Return how many bytes of a task other workers may do; 0 if none."""
    if not isinstance(task, SharedTask) or not can_create_memory_files():
        return 0
    return task.shared_bytes


def count_sharers(size: int, least_share: int) -> int:
    """Return for how many workers there is work in a task, its own worker included; at least 1.

    Args:
        size: bytes that can be shared.
        least_share: the least bytes that a worker does: LEAST_SHARE or LEAST_NEW_SHARE.
    """
    return max(1, size // least_share)


def send_descriptor(pipe: Connection, message: Any, end: socket.socket, pid: int) -> None:
    """Send a message to a worker, and then the end of a pair of sockets.

    Args:
        pipe: the engine's pipe to the worker.
        message: Assist or ASSISTANT.
        end: the end.
        pid: the process id of the worker.
    """
    pipe.send(message)
    send_handle(pipe, end.fileno(), pid)


def receive_pipe(pipe: Connection) -> MemoryPipe:
    """Receive the end of a pair of sockets, which follows a message Assist or ASSISTANT."""
    return MemoryPipe(recv_handle(pipe))


class PipeToAssistant:
    """A worker's end of the connection to its assistant (`tasks.Assistant`)."""

    def __init__(self, pipe: MemoryPipe) -> None:
        """Keep the pipe. No part was sent yet."""
        self._pipe = pipe
        self.has_left = False
        self._sent = 0
        self._unanswered = deque[int]()
        "The numbers of the parts that were sent and not taken back, and whose answer is not taken."
        self._answers = deque[Any]()
        "The answers to the first of these parts."

    @property
    def unanswered(self) -> int:
        return len(self._unanswered) - len(self._answers)

    def send(self, part: Part) -> bool:
        try:
            self._send_message(self._sent, part)
        except NotPassed:
            return False
        if self.has_left:
            return False
        self._unanswered.append(self._sent)
        self._sent += 1
        return True

    def take_back(self) -> None:
        self._send_message(self._unanswered.pop(), None)

    def has_answer(self, seconds: float = 0) -> bool:
        while not self._answers and not self.has_left and self._pipe.poll(seconds):
            try:
                number, answer = self._pipe.receive()
            except (EOFError, NotPassed):
                self.close()
            else:
                # A part that was taken back too late is answered all the same.
                if number in self._unanswered:
                    self._answers.append(answer)
        return bool(self._answers) or self.has_left

    def receive(self) -> Any:
        while not self.has_answer(SIGN_OF_LIFE):
            pass
        self._unanswered.popleft()
        if not self._answers:
            return None
        answer = self._answers.popleft()
        if isinstance(answer, Failure):
            raise answer.error
        return answer

    def close(self) -> None:
        self.has_left = True
        self._pipe.close()

    def _send_message(self, number: int, part: Part | None) -> None:
        """Send a part with its number, or None in its place if the part is taken back.

        Raises NotPassed if the part cannot be pickled.
        """
        if not self.has_left:
            try:
                self._pipe.send((number, part))
            except OSError:  # the assistant has closed its end
                self.close()


class AssistantChannel(Protocol):
    """An assistant's connection to its engine."""

    def on_records(self, records: ActiveRecords | None) -> None: ...

    def is_recalled(self) -> bool:
        """Return whether the engine has ended the assistance."""

    def wait_for_part(self, pipe: MemoryPipe) -> bool:
        """Wait for a message of the worker that is assisted. Return False if the engine has ended
        the assistance.
        """


def assist(channel: AssistantChannel, task: Task[Any], pipe: MemoryPipe) -> None:
    """Do parts of a task as they arrive, one after the other, until one of the two ends is closed.
    If the memory is not sufficient for a part, or a part cannot be unpickled, leave this part and
    all later ones to the worker. If an answer cannot be pickled, leave only its part to the worker.

    Args:
        channel: the connection to the engine.
        task: the task of the worker at the other end of `pipe`.
        pipe: the connection to that worker; closed at the end.
    """
    assert isinstance(task, SharedTask), "other tasks have no assistants"
    do_part: Callable[[Any], Any] | None = None
    parts = dict[int, Part]()  # in the order of their numbers
    with closing(pipe), suppress(EOFError, OSError, NotPassed):
        while not channel.is_recalled():
            # Receive all that has arrived: a later message may take a part back.
            while not parts or pipe.poll():
                if not channel.wait_for_part(pipe):
                    return
                number, new_part = pipe.receive()
                if new_part is None:
                    parts.pop(number, None)
                else:
                    parts[number] = new_part
            number = next(iter(parts))
            part = parts.pop(number)
            channel.on_records(part.records)
            try:
                do_part = do_part or task.open_assistant()
                answer = do_part(part.content)
            except MemoryError:
                return
            except Exception as error:
                answer = Failure(make_picklable(error))
            channel.on_records(None)
            try:
                pipe.send((number, answer))
            except NotPassed:
                pipe.send((number, None))
