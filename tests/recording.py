"""What a run changes at its target, in the order in which it does: an instrument for tests of order
and durability.

On a disk the system calls themselves are noted (also those of forked workers, in one log that all
append to), with what a file held when it was flushed, renamed or linked; so a missing fsync is
seen. Of a store the requests are, by the proxy of `tests/faults.py`. Both make `Step`s: a name
below the root has new content, or is gone. A step has a beginning and an end on the machine's one
clock, since of two that overlap nobody can say which was first.
"""

from __future__ import annotations

import builtins
import functools
import io
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import pytest
import xxhash

from tests.faults import Proxy, Request

State = Mapping[str, bytes]
"Name below the root -> content."
TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp$")


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that was done: open (for writing), sync, rename, link, unlink, mkdir, rmdir."""

    what: str
    name: str
    "Below the root, as `to` is; the root itself is the empty name."
    to: str
    content: str
    "The hash of what the file held then; none of a folder."
    began: int
    ended: int


@dataclass(frozen=True, slots=True)
class Step:
    """A change of what lies at the target."""

    how: str
    "write, create, replace, copy, link or delete"
    name: str
    content: bytes | None
    began: int
    ended: int

    @property
    def base(self) -> str:
        return PurePosixPath(self.name).name

    @property
    def home(self) -> str:
        return str(PurePosixPath(self.name).parent)

    def __str__(self) -> str:
        return f"{self.how} {self.name}"


class Disk:
    """Notes the calls that change `root`. `within` keeps the log."""

    def __init__(self, root: Path, within: Path) -> None:
        within.mkdir(parents=True)
        self.root, self._within, self._log = root, within, within / "calls"
        self._log.touch()

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, what in _CALLS.items():
                patch.setattr(os, name, self._noting(getattr(os, name), what))
            for module in (builtins, io):
                patch.setattr(module, "open", self._opening(open))
            yield

    @property
    def calls(self) -> list[Call]:
        return [Call(**json.loads(line)) for line in self._log.read_text().splitlines()]

    def content(self, call: Call) -> bytes:
        return (self._within / call.content).read_bytes()

    @property
    def steps(self) -> list[Step]:
        return list(_steps(self.calls, self.content))

    def _noting(self, real: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*given: Any, **named: Any) -> Any:
            began = time.monotonic_ns()
            result = real(*given, **named)
            paths = [self._below(path) for path in given[: 2 if what in _MOVES else 1]]
            if paths[0] is not None:
                self._note(what, began, *(path or "" for path in paths))
            return result

        return call

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
            began = time.monotonic_ns()
            opened = real(file, mode, *given, **named)
            if set(mode) & set("wxa") and (name := self._below(file)) is not None:
                self._note("open", began, name)
            return opened

        return call

    def _below(self, path: Any) -> str | None:
        """The name below the root; None of what lies elsewhere."""
        text = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
        name = os.path.relpath(text, self.root) if isinstance(text, str) else ".."
        return None if name.split("/")[0] == ".." else "" if name == "." else name

    def _note(self, what: str, began: int, name: str, to: str = "") -> None:
        held = self._held(self.root / (to or name)) if what in ("sync", *_MOVES) else ""
        call = Call(what, name, to, held, began, time.monotonic_ns())
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        os.write(log, json.dumps(asdict(call)).encode() + b"\n")
        os.close(log)

    def _held(self, path: Path) -> str:
        if stat.S_ISDIR(path.stat().st_mode):
            return ""
        content = path.read_bytes()
        held = xxhash.xxh128_hexdigest(content)
        kept = os.open(self._within / held, os.O_WRONLY | os.O_CREAT)
        os.write(kept, content)
        os.close(kept)
        return held


_CALLS = {"fsync": "sync", "fdatasync": "sync", "replace": "rename", "remove": "unlink"}
_CALLS |= {name: name for name in ("rename", "link", "unlink", "rmdir", "mkdir")}
_MOVES = ("rename", "link")


def _steps(calls: Iterable[Call], content: Callable[[Call], bytes]) -> Iterator[Step]:
    created = set()
    for call in calls:
        at, times = call.to or call.name, (call.began, call.ended)
        if TEMPORARY.search(at):
            continue
        if call.what == "open":
            created.add(at)
        elif call.what == "unlink":
            yield Step("delete", at, None, *times)
        elif call.what in _MOVES or (call.what == "sync" and at in created):
            is_made = call.what == "sync" or TEMPORARY.search(call.name)
            how = "write" if call.what == "rename" else "create" if is_made else "link"
            yield Step(how, at, content(call), *times)


def list_store_steps(proxy: Proxy, root: str, before: State) -> list[Step]:
    """What the requests changed below `root`, a bucket with a prefix."""
    lying, steps = dict(before), list[Step]()
    for request in sorted(proxy.requests, key=lambda request: request.ended):
        if 200 <= request.status < 300 and request.key.startswith(f"/{root}/"):
            name = request.key.removeprefix(f"/{root}/")
            steps += [step] if (step := _step_of(request, name, root, lying)) else []
    return steps


def _step_of(request: Request, name: str, root: str, lying: dict[str, bytes]) -> Step | None:
    headers, times = request.headers, (request.began, request.ended)
    if request.operation == "DELETE":
        return Step("delete", name, None, *times) if lying.pop(name, None) is not None else None
    if request.operation != "PUT":
        assert request.operation in ("GET", "HEAD", "GET list"), request.operation
        return None
    if source := headers.get("x-amz-copy-source"):
        source = unquote(source).strip("/").removeprefix(f"{root}/")
        lying[name] = lying[source]
        return Step("copy", name, lying[name], *times)
    assert "content-encoding" not in headers
    lying[name] = request.body
    conditions = {"if-none-match": "create", "if-match": "replace"}
    how = next((how for header, how in conditions.items() if header in headers), "write")
    return Step(how, name, request.body, *times)
