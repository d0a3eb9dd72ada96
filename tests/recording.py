"""Records the changes of a run at its target in their order, for tests of order and durability.

On a disk the system calls are recorded (also those of forked workers, in one log that all append
to), with the content of a file when it was flushed, renamed or linked; so a missing fsync is
noticed. In a store the requests are recorded, by the proxy of `tests/faults.py`. Both make `Step`s:
a name below the root has new content, or is gone. A step has a beginning and an end on the
machine's one clock, since of two that overlap nobody can know which was first.
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
    """A finished system call: open (for writing), sync, rename, link, unlink, mkdir, rmdir."""

    what: str
    name: str
    "Relative to the root, as `to` is; the root itself is the empty name."
    to: str
    content: str
    "The hash of the file's content then; empty for a folder."
    began: int
    ended: int


@dataclass(frozen=True, slots=True)
class Step:
    """A change at the target."""

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
    """Records the calls that change `root`, in the new folder `log`."""

    def __init__(self, root: Path, log: Path) -> None:
        log.mkdir(parents=True)
        self.root = root
        self._contents = log
        self._log = log / "calls"
        self._log.touch()

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, what in _CALLS.items():
                patch.setattr(os, name, self._wrap_call(getattr(os, name), what))
            for module in (builtins, io):
                patch.setattr(module, "open", self._wrap_open(open))
            yield

    @property
    def calls(self) -> list[Call]:
        return [Call(**json.loads(line)) for line in self._log.read_text().splitlines()]

    def content(self, call: Call) -> bytes:
        return (self._contents / call.content).read_bytes()

    @property
    def steps(self) -> list[Step]:
        return list(_make_steps(self.calls, self.content))

    def _wrap_call(self, real: Callable[..., Any], what: str) -> Callable[..., Any]:
        paths_of_call = 2 if what in _MOVES else 1

        @functools.wraps(real)
        def call(*arguments: Any, **keywords: Any) -> Any:
            began = time.monotonic_ns()
            result = real(*arguments, **keywords)
            names = [self._relative_name(path) for path in arguments[:paths_of_call]]
            if names[0] is not None:
                self._record(what, began, *(name or "" for name in names))
            return result

        return call

    def _wrap_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            began = time.monotonic_ns()
            opened = real(file, mode, *arguments, **keywords)
            if set(mode) & set("wxa"):
                name = self._relative_name(file)
                if name is not None:
                    self._record("open", began, name)
            return opened

        return call

    def _relative_name(self, path: Any) -> str | None:
        """Return the name of a path or a descriptor relative to the root; None if it is outside."""
        text = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
        if not isinstance(text, str):
            return None
        name = os.path.relpath(text, self.root)
        if name.split("/")[0] == "..":
            return None
        return "" if name == "." else name

    def _record(self, what: str, began: int, name: str, to: str = "") -> None:
        has_content = what in ("sync", *_MOVES)
        digest = self._keep_content(self.root / (to or name)) if has_content else ""
        call = Call(what, name, to, digest, began, time.monotonic_ns())
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        os.write(log, json.dumps(asdict(call)).encode() + b"\n")
        os.close(log)

    def _keep_content(self, path: Path) -> str:
        """Copy the content of a file to a file named by its hash, and return the hash."""
        if stat.S_ISDIR(path.stat().st_mode):
            return ""
        content = path.read_bytes()
        digest = xxhash.xxh128_hexdigest(content)
        copy = os.open(self._contents / digest, os.O_WRONLY | os.O_CREAT)
        os.write(copy, content)
        os.close(copy)
        return digest


_CALLS = {"fsync": "sync", "fdatasync": "sync", "replace": "rename", "remove": "unlink"}
_CALLS |= {name: name for name in ("rename", "link", "unlink", "rmdir", "mkdir")}
_MOVES = ("rename", "link")


def _make_steps(calls: Iterable[Call], content: Callable[[Call], bytes]) -> Iterator[Step]:
    """Yield the changes of visible names that the calls made."""
    created = set()
    for call in calls:
        name = call.to or call.name
        times = (call.began, call.ended)
        if TEMPORARY.search(name):
            continue
        if call.what == "open":
            created.add(name)
        elif call.what == "unlink":
            yield Step("delete", name, None, *times)
        elif call.what == "rename":
            yield Step("write", name, content(call), *times)
        elif call.what == "link":
            how = "create" if TEMPORARY.search(call.name) else "link"
            yield Step(how, name, content(call), *times)
        elif call.what == "sync" and name in created:
            yield Step("create", name, content(call), *times)


def list_store_steps(proxy: Proxy, root: str, before: State) -> list[Step]:
    """Return the changes that the requests made below `root`, a bucket with a prefix.

    Args:
        before: the objects before the first request.
    """
    objects = dict(before)
    steps = list[Step]()
    for request in sorted(proxy.requests, key=lambda request: request.ended):
        if 200 <= request.status < 300 and request.key.startswith(f"/{root}/"):
            name = request.key.removeprefix(f"/{root}/")
            step = _apply_request(request, name, root, objects)
            if step:
                steps.append(step)
    return steps


def _apply_request(
    request: Request, name: str, root: str, objects: dict[str, bytes]
) -> Step | None:
    """Change `objects` as the request does, and return the step; None if it changes nothing."""
    headers = request.headers
    times = (request.began, request.ended)
    if request.operation == "DELETE":
        was_there = objects.pop(name, None) is not None
        return Step("delete", name, None, *times) if was_there else None
    if request.operation != "PUT":
        assert request.operation in ("GET", "HEAD", "GET list"), request.operation
        return None
    if "x-amz-copy-source" in headers:
        source = unquote(headers["x-amz-copy-source"]).strip("/").removeprefix(f"{root}/")
        objects[name] = objects[source]
        return Step("copy", name, objects[name], *times)
    assert "content-encoding" not in headers
    objects[name] = request.body
    if "if-none-match" in headers:
        how = "create"
    elif "if-match" in headers:
        how = "replace"
    else:
        how = "write"
    return Step(how, name, request.body, *times)
