"""The process that opens processors and answers questions about them: one process for a whole run
and all of its workers.

A processor needs transformers and torch, which take 10 s to import and 730 MB. So workers do not
import them. The server, `python -m mdsmix.processor.server`, starts with the run and imports both
at the first question. It ends with the run, or with the process that started it. Outside a run, the
first question starts the server. `answers.answer_question` lists the questions.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.interrupts import delay_signals

if TYPE_CHECKING:  # 3 ms to import, and few commands start a server
    import socket

SERVER_BYTES = 730 << 20
"""Memory of the server: 730 MB with transformers 4.57 and torch 2.15, for any number of
questions.
"""
SOCKET_VARIABLE = "MDSMIX_COUNTING"
"Environment variable with the path of the run's socket. Workers inherit it."
SOCKET_PARENT = "/tmp"
"""The folder of the sockets. Its path is short, since Linux allows at most 107 characters in the
path of a socket.
"""
_started = list[int]()
"Process ids of the servers that this process has started and not yet stopped."


@contextmanager
def share_server() -> Iterator[None]:
    """Run the server during a `with` block. If a server of this run exists already, use that
    server.

    Workers that are started inside the block use the same server.
    """
    if _is_running():
        yield
        return
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="mdsmix-", dir=SOCKET_PARENT) as folder:
        path = f"{folder}/socket"
        with ExitStack() as at_end:
            with delay_signals():
                process = _start_server(path)
                at_end.callback(_stop_server, process)
            yield


def _start_server(path: str) -> subprocess.Popen[bytes]:
    """Start the server with a socket at `path`, and return its process."""
    import socket

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()  # from here on questions wait for an answer
        process = subprocess.Popen(
            [sys.executable, "-m", "mdsmix.processor.server"],
            stdin=listening.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A notebook's Interrupt goes to the whole process group, and the kernel goes on.
            start_new_session=True,
        )
    os.environ[SOCKET_VARIABLE] = path
    _started.append(process.pid)
    return process


def _stop_server(process: subprocess.Popen[bytes]) -> None:
    """Stop the server."""
    with delay_signals():
        del os.environ[SOCKET_VARIABLE]
        _started.remove(process.pid)
        process.kill()
        process.wait()


def _is_running() -> bool:
    """Return whether this process can ask a server: it is inside `share_server`, or it is a worker
    of a process that is.
    """
    return os.path.exists(os.environ.get(SOCKET_VARIABLE, ""))


def list_server_pids() -> list[int]:
    """Return the process ids of the running servers that this process has started."""
    return [*_started]


def ask_processor(folder: Path, question: Mapping[str, Any]) -> Any:
    """Ask the server a question about the processor in `folder`, and return the answer.

    Raises MdsmixError if the processor fails.
    Raises Unreachable if the server has ended.

    Args:
        folder: the processor's folder.
        question: a dict such as {"sizes": [(480, 640)]}, which asks for numbers of tokens;
            `LoadedProcessor.answer` lists all questions.
    """
    answer, error = try_to_ask(str(folder), question)
    if error:
        raise MdsmixError(
            f"the processor fails ({error}): name another processor in the recipe, or remove the "
            "key `processor`."
        )
    return answer


def try_to_ask(name: str, question: Mapping[str, Any]) -> tuple[Any, str]:
    """Ask the server a question about a processor. Return (answer, ""), or ({}, error) if the
    processor fails.

    Raises Unreachable if the server has ended.

    Args:
        name: the processor's folder or hub name.
        question: a dict such as {"sizes": [(480, 640)]}, which asks for numbers of tokens;
            `LoadedProcessor.answer` lists all questions.
    """
    if not _is_running():
        # Start a server that runs until this process exits.
        until_exit = ExitStack()
        until_exit.enter_context(share_server())
        atexit.register(until_exit.close)
    from multiprocessing.connection import Client  # 2.4 ms, and few commands ask a processor

    try:
        with Client(os.environ[SOCKET_VARIABLE]) as connection:
            connection.send({"name": name, **question})
            return connection.recv()  # type: ignore[no-any-return]
    except (OSError, EOFError):
        raise Unreachable(
            "the process that counts the tokens of images has ended, most likely because memory "
            "ran out: run the same command again with fewer workers; counts that were finished are "
            "kept."
        ) from None


def serve(listening: socket.socket, answer: Callable[[Any], Any]) -> None:
    """Answer questions, one after the other, until the parent process has ended.

    Args:
        listening: the socket at which questions arrive.
        answer: the function that answers a question.
    """
    from multiprocessing.connection import Connection

    parent = os.getppid()
    listening.settimeout(1)
    while os.getppid() == parent:
        # An error means that no question came within a second, or that the asking process is dead.
        with suppress(OSError, EOFError):
            accepted, _ = listening.accept()
            with Connection(accepted.detach()) as connection:
                connection.send(try_to_answer(answer, connection.recv()))


def try_to_answer(answer: Callable[[Any], Any], question: Any) -> tuple[Any, str]:
    """Call `answer` with a question. Return (its result, ""), or ({}, message) if it raises an
    error.
    """
    try:
        return answer(question), ""
    except Exception as error:
        message = str(error)
        if not message:
            return {}, repr(error)
        return {}, f"{type(error).__name__}: {message}"


def serve_at_stdin() -> None:
    """Serve at the socket that is this process's stdin."""
    import socket

    from mdsmix.processor.answers import answer_question
    from mdsmix.processor.loaded import LoadedProcessor

    open_processor_once = cache(LoadedProcessor)

    def answer(question: Any) -> Any:
        """Open the processor that the question names, if it is not open yet, and return its
        answer.
        """
        return answer_question(open_processor_once(question["name"]), question)

    serve(socket.socket(fileno=0), answer)


if __name__ == "__main__":
    serve_at_stdin()
