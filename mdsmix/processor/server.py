"""The process that answers questions to processors: one for a whole run and all of its workers.

A processor needs transformers and torch: 10 s to import and 730 MB. So workers do not import them.
`python -m mdsmix.processor.server` starts with the run, imports both at the first question, and
ends with the run or with the process that started it. Outside a run the first question starts it.
`LoadedProcessor.answer` lists the questions.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from multiprocessing.connection import Client, Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.processor.loaded import LoadedProcessor

SERVER_BYTES = 730 << 20
"""Memory of the process: 730 MB with transformers 4.57 and torch 2.15, however many sizes it is
asked for.
"""
SOCKET_VARIABLE = "MDSMIX_COUNTING"
"Environment variable with the path of the run's socket. Workers inherit it."
SOCKET_PARENT = "/tmp"
"""The folder of the sockets. It is short, since Linux allows at most 107 characters in the path of
a socket.
"""
_started = list[int]()
"Process ids."


@contextmanager
def share_server() -> Iterator[None]:
    """Run the server until the block ends, unless one runs already.

    Workers that are started inside the block ask the same one.
    """
    if _is_running():
        yield
        return
    with TemporaryDirectory(prefix="mdsmix-", dir=SOCKET_PARENT) as folder:
        path = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()  # from here on questions wait for an answer
            process = subprocess.Popen(
                [sys.executable, "-m", "mdsmix.processor.server"],
                stdin=listening.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        os.environ[SOCKET_VARIABLE] = path
        _started.append(process.pid)
        try:
            yield
        finally:
            del os.environ[SOCKET_VARIABLE]
            _started.remove(process.pid)
            process.kill()
            process.wait()


def _is_running() -> bool:
    """Return whether a run's socket is there: inside `share_server`, or in a worker of that run."""
    return os.path.exists(os.environ.get(SOCKET_VARIABLE, ""))


def server_pids() -> list[int]:
    """Return the ids of the servers that this process has started and that still run."""
    return [*_started]


def ask_processor(folder: Path, question: Mapping[str, Any]) -> Any:
    """Return the answer of the processor in a folder to a question.

    Raises MdsmixError if the processor fails, Unreachable if the server has ended.
    """
    answer, error = try_to_ask(str(folder), question)
    if error:
        raise MdsmixError(
            f"the processor fails ({error}): name another one, or leave out `processor`."
        )
    return answer


def try_to_ask(name: str, question: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a processor's answer to a question, and "". If it fails, return {} and the error.

    Raises Unreachable if the server has ended.

    Args:
        name: a folder or hub name.
    """
    if not _is_running():
        until_exit = ExitStack()
        until_exit.enter_context(share_server())
        atexit.register(until_exit.close)
    try:
        with Client(os.environ[SOCKET_VARIABLE]) as connection:
            connection.send({"name": name, **question})
            return connection.recv()  # type: ignore[no-any-return]
    except (OSError, EOFError):
        raise Unreachable(
            "the process that counts the tokens of images has ended, most likely because memory "
            "ran out: run again with fewer workers; its counts so far are kept."
        ) from None


def serve(listening: socket.socket, answer: Callable[[Any], Any]) -> None:
    """Answer one question after the other, until the parent process has ended."""
    parent = os.getppid()
    listening.settimeout(1)
    while os.getppid() == parent:
        with suppress(OSError, EOFError):  # nobody asks, or the process that asked is dead
            accepted, _ = listening.accept()
            with Connection(accepted.detach()) as connection:
                connection.send(try_to_answer(answer, connection.recv()))


def try_to_answer(answer: Callable[[Any], Any], question: Any) -> tuple[Any, str]:
    """Return the answer to a question, and "". If it fails, return {} and the error."""
    try:
        return answer(question), ""
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}" if str(error) else repr(error)


def main() -> None:
    """Serve at the socket that is this process's stdin."""
    open_processor_once = cache(LoadedProcessor)

    def answer(question: Any) -> Any:
        return open_processor_once(question["name"]).answer(question)

    serve(socket.socket(fileno=0), answer)


if __name__ == "__main__":
    main()
