"""`mdsmix repair`: the damaged shards of a published stream, made again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mdsmix.cli.options import (
    AS_JSON,
    MEMORY,
    OVERRIDES,
    QUARANTINE_CRASHES,
    QUIET,
    WORKERS,
    Number,
    Text,
    Texts,
    argument,
    echo,
    echo_json,
    option,
)


def repair(
    stream: str = argument("STREAM", "A published stream: a folder or s3:// URL."),
    recipe: Path = option(..., "The recipe that made it.", shown=False),
    overrides: Texts = OVERRIDES,
    workers: Number = WORKERS,
    memory: Text = MEMORY,
    quarantine_crashes: bool = QUARANTINE_CRASHES,
    quiet: bool = QUIET,
    as_json: bool = AS_JSON,
) -> None:
    """Verify STREAM and convert again only the work units whose shards fail: the stream comes out
    byte for byte as it was.
    """
    from mdsmix.convert.damage import repair as make_whole
    from mdsmix.convert.planning import Options
    from mdsmix.engines.memory import bytes_of
    from mdsmix.kinds import open_recipe
    from mdsmix.report.progress import watching
    from mdsmix.shards.published import find_published
    from mdsmix.storage import locate

    options = Options(
        workers=workers,
        memory=None if memory is None else bytes_of(memory),
        quarantine_crashes=quarantine_crashes,
    )
    folder = find_published(locate(stream))
    with watching(quiet) as watcher:
        done = make_whole(open_recipe(recipe, overrides or ()), folder, options, watcher)
    if as_json:
        echo_json(asdict(done))
        return
    for fault in done.faults:
        echo(f"fault {fault.file}: {fault.problem}")
    said = "whole, nothing to repair"
    if done.faults:
        said = f"repaired, {done.units} of {done.of} work units made again, byte for byte as before"
    if not quiet:
        echo(f"{done.stream}: {said}")
