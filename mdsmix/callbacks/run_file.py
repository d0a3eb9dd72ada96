"""The file with the figures of a run: one line of JSON for each step that was logged.

The first line has the run's streams as they were planned. A resumed run drops the lines after its
checkpoint, since it trains those steps again, and goes on. `mdsmix report --run FILE` reads it.

    {"mdsmix_run": 1, "planned": [{"name": "web", "size": 900, "samples": 450, ...}, ...]}
    {"step": 10, "streams": {"web": {"samples": 52, "tokens": 26624, "loss": 6.1, ...}, ...}}
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import orjson

from mdsmix import schema
from mdsmix.callbacks.stream_figures import PlannedStream, StreamFigures, compute_planned_shares
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.frozen import frozen
from mdsmix.messages import flatten_error

log = logging.getLogger(__name__)
HEAD = "mdsmix_run"
"The key of a first line. Its value is the version of the file's form."
VERSION = 1
FIX = "name the file that the run's callback wrote (its option `file`)"


@frozen(kw_only=True)
class LoggedStream:
    """The figures of one stream in a line; see `StreamFigures`."""

    samples: int
    tokens: int
    trained: int
    passes: float | None = None
    loss: float | None = None
    mean_loss: float | None = None
    shares: dict[str, float | None] = field(default_factory=dict)


@frozen(kw_only=True)
class LoggedStep:
    """One line: the figures after a step."""

    step: int
    streams: dict[str, LoggedStream]


@frozen(kw_only=True)
class _Head:
    """The first line."""

    mdsmix_run: int
    planned: list[PlannedStream]


@frozen(kw_only=True)
class RunFigures:
    """The content of a run's file."""

    path: str
    planned: Sequence[PlannedStream]
    steps: Sequence[LoggedStep]
    torn: int = 0
    "Bytes at the end that are not a whole line, as a run that was killed leaves them."

    @property
    def planned_shares(self) -> dict[str, dict[str, float | None]]:
        return compute_planned_shares(self.planned)

    @property
    def streams(self) -> list[str]:
        """The names of all streams: those of the plan, then those that only steps have."""
        names = dict.fromkeys(stream.name for stream in self.planned)
        for step in self.steps:
            names |= dict.fromkeys(step.streams)
        return list(names)


class RunFile:
    """Writes the file of a run, on one rank."""

    def __init__(self, path: str, streams: Sequence[PlannedStream], step: int) -> None:
        """Begin the file, or go on with it.

        A run that begins at step 0 keeps the file of an earlier run under the name `<path>.old`.

        Args:
            path: the file; its folder is made.
            streams: the streams of the run.
            step: the step that the run begins after; 0 for a new run.

        Raises Unreachable if the file cannot be written, and RecipeError if a resumed run finds a
        file there that is not a run's.
        """
        self.path = Path(path)
        earlier_steps = list[LoggedStep]()
        if self.path.exists():
            if step:
                earlier_steps = [line for line in read_run(path).steps if line.step <= step]
            else:
                old = self.path.with_name(f"{self.path.name}.old")
                log.warning("%s is of an earlier run; it is kept as %s.", path, old)
        head = _Head(mdsmix_run=VERSION, planned=list(streams))
        lines = [_dump(head), *map(_dump, earlier_steps)]
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not step:
                self.path.replace(self.path.with_name(f"{self.path.name}.old"))
            temporary.write_bytes(b"".join(lines))
            temporary.replace(self.path)
        except OSError as error:
            raise self._failure(error) from None

    def write(self, step: int, figures: Mapping[str, StreamFigures]) -> None:
        """Append the figures of a step. Raises Unreachable if they cannot be written."""
        streams = {}
        for name, stream in figures.items():
            values = stream._asdict()
            values.pop("planned")
            streams[name] = LoggedStream(**values)
        try:
            with self.path.open("ab") as file:
                file.write(_dump(LoggedStep(step=step, streams=streams)))
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> Unreachable:
        return Unreachable(
            f"cannot write {self.path} ({error.strerror}), the file of this run's streams: name "
            "one in a folder that can be written, or leave the option file out."
        )


def _dump(line: Any) -> bytes:
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def read_run(path: str) -> RunFigures:
    """Read the file of a run. A last line without an end is left out and counted in `torn`.

    Raises RecipeError if it is not such a file, Unreachable if it cannot be read.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file; {FIX}.") from None
    except OSError as error:
        raise Unreachable(f"{path} cannot be read ({error.strerror}); {FIX}.") from None
    *lines, torn_line = content.split(b"\n")  # empty if the last line has its end
    parsed = [_parse_line(path, number, line) for number, line in enumerate(lines, 1)]
    head = parsed[0] if parsed else None
    if not isinstance(head, _Head):
        raise RecipeError(f"{path} is not the file of a run: it has no whole first line; {FIX}.")
    return RunFigures(path=path, planned=head.planned, steps=parsed[1:], torn=len(torn_line))


def _parse_line(path: str, number: int, line: bytes) -> Any:
    """Parse a line: the first one to a _Head, any other to a LoggedStep."""
    try:
        tree = orjson.loads(line)
        version = tree.get(HEAD, VERSION) if isinstance(tree, dict) else VERSION
        if version != VERSION:
            raise RecipeError(
                f"{path} was written by another version of mdsmix: its format has version "
                f"{version}, and this mdsmix reads only version {VERSION}. Read the file with the "
                "mdsmix that wrote it."
            )
        return schema.parse_mapping(_Head if number == 1 else LoggedStep, tree)
    except (orjson.JSONDecodeError, schema.Misfit) as error:
        raise RecipeError(
            f"{path}, line {number}, is not a line of the file that a callback of a run writes: "
            f"{flatten_error(error)}; {FIX}."
        ) from None
