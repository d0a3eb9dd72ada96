"""A connection with a Ray cluster: one that runs, or one of this machine that lives as long as the connection.

Ray is imported here and in its two neighbours alone, and only where it was asked for. The driver must run on a node of the cluster, as
`ray job submit` has it: Ray Client, whose URLs begin with ray:// too, hands results through a proxy that loses them with the connection.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

from mdsmix.engines.memory import cpu_count
from mdsmix.errors import RecipeError, Unreachable

STORE_BYTES = 80 << 20
"Of a cluster of our own for objects, the least that Ray takes: tasks and results are a few KB."
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}
"For a cluster of our own: it tells nobody that it runs."
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
"Where none is set, Ray writes a token for a cluster of our own into the home folder, for good, and does not start where it cannot."
WANTS_TOKEN = "it asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to that of its head where ~/.ray/auth_token is another or none"
CONNECT_SECONDS = 5
ANSWER_SECONDS = 20
"Of a head that is busy."
HEAD_SECONDS = 2
"Of a head that is asked between two looks at its nodes, whether it is there."
FOLDER_SECONDS = 5
"Within which the last of its own processes have ended, which write a log while their folder is deleted."
LONGEST_FOLDER = 40
"Characters that leave room in a Unix socket's name of 107 for what Ray adds."


def address_of(engine: str) -> str | None:
    """Of `ray://ADDRESS` what follows; "" of `ray`; None of `local`. RecipeError of anything else, and where Ray is not installed."""
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
def connected(address: str, workers: int | None) -> Iterator[None]:
    """Inside of the block this process is a driver. One that is already stays one. `address`: blank for a cluster of its own, which
    is stopped at the end, and whose folder is deleted. Ray takes SIGTERM for itself when it starts, so it is entered and left within
    `terminable_later`, which gives it back."""
    import ray

    if ray.is_initialized():
        yield
        return
    with _folder() if not address else nullcontext() as folder:
        try:
            _start(folder, workers) if folder else _join(address)
            yield
        finally:
            _leave(is_own=bool(folder))


def _leave(is_own: bool) -> None:
    """Ends the connection; one whose head is gone is left open, since Ray may wait for the head for ever. Where nothing was joined
    nobody asks for the head: Ray would start a cluster of this machine to answer."""
    import ray

    if is_own or not ray.is_initialized() or head_answers():
        ray.shutdown()
        return
    _headless.set()
    atexit.register(end_without_ray, Unreachable.exit_code)


_headless = threading.Event()
"Set where a connection was left open, since its head is gone."


def end_without_ray(code: object) -> None:
    """Where a head has gone, ends this process with its exit code before Ray's own end would, which waits for the head for ever."""
    if _headless.is_set():
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else bool(code))


@contextmanager
def terminable_later() -> Iterator[None]:
    """SIGTERM that comes inside of the block is heeded at its end, since Ray makes exit code 1 of whatever a handler raises
    while it waits."""
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
    import ray

    if "://" in address:
        raise RecipeError(
            f"RAY_ADDRESS is {address}, an address of Ray Client, which loses a run with its connection: start mdsmix on a node of the "
            "cluster, by `ray job submit`, or name the cluster's own address, such as ray://10.0.0.5:6379."
        )
    _refuse_deaf(address)
    try:
        ray.init(address=address, **_SILENT)
    except Exception as error:  # of no kind where it asks for a token, and none is here
        said = f"{type(error).__name__} {error.__cause__}"
        asks = "InvalidAuthToken" in said or "AuthenticationError" in said
        why = WANTS_TOKEN if asks else _first_line(error)
        raise Unreachable(_NOT_JOINED.format(address=address, why=why)) from None


_NOT_JOINED = (
    "no Ray cluster can be joined at {address} ({why}): this machine must be a node of it, with the same version of Ray and the same "
    "minor version of Python; `ray job submit` starts mdsmix on one."
)


HEADLESS = (
    "the head of the Ray cluster has not answered for {seconds:.0f} s; finished units are kept: start the cluster again and run the same "
    "command."
)
NODELESS = (
    "Ray's node on this machine has ended, and without it this run can reach no other: finished units are kept; start the node again "
    "(ray start --address HEAD) and run the same command."
)


def _refuse_deaf(address: str) -> None:
    """Unreachable where nobody listens at the address, or one that speaks no gRPC: Ray asks there for ever."""
    if address == "auto":
        return
    try:
        is_ray = _speaks_grpc(address, ANSWER_SECONDS)
    except ValueError:
        raise RecipeError(
            f"{address} is no address of a Ray cluster: write the head's host and port, such as ray://10.0.0.5:6379, or ray://auto."
        ) from None
    except OSError as error:
        why = error.strerror or "nobody answers"
        raise Unreachable(_NOT_JOINED.format(address=address, why=why)) from None
    if not is_ray:
        why = "who listens there speaks no gRPC, so it is not Ray's port, 6379 as a rule"
        raise Unreachable(_NOT_JOINED.format(address=address, why=why))


def head_answers() -> bool:
    """Whether the head of the cluster is there. Ray asks one that is not for a minute, and then ends this process."""
    import ray

    try:
        return _speaks_grpc(ray.get_runtime_context().gcs_address, HEAD_SECONDS)
    except OSError:
        return False


def _speaks_grpc(address: str, seconds: float) -> bool:
    """Whether the first words of HTTP/2 are answered by a frame of settings, whose type is 4. OSError where nobody is there. Nobody is
    asked behind TLS."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as peer:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return True
        peer.settimeout(seconds)
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        return peer.recv(4, socket.MSG_WAITALL)[3:] == b"\4"


def _start(folder: str, workers: int | None) -> None:
    import ray

    given = QUIET if any(map(os.environ.get, TOKENS)) else QUIET | {TOKENS[0]: _token()}
    quiet = {name: value for name, value in given.items() if name not in os.environ}
    os.environ.update(quiet)
    try:
        ray.init(
            address="local",
            num_cpus=workers or cpu_count(),
            num_gpus=0,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            _temp_dir=folder,
            **_SILENT,
        )
    except Exception as error:  # of no kind where a node is not up in time
        raise Unreachable(
            f"Ray could not be started on this machine ({_first_line(error)}): see that memory and the disk of {folder} have room, or "
            "leave --engine out, which takes processes of this machine."
        ) from None
    finally:
        for name in quiet:
            del os.environ[name]


@cache
def _token() -> str:
    """The same for every cluster of this process: Ray goes on with the first one that it has read."""
    return secrets.token_hex(32)


_SILENT: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


@contextmanager
def _folder() -> Iterator[str]:
    """For the sockets and logs of a cluster of our own, deleted with it."""
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")[:200]
