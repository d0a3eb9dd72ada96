"""`mdsmix gc`: the files of published streams that are no longer needed."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from mdsmix.cli.options import (
    AsJson,
    LogFile,
    Streams,
    echo,
    for_each_stream,
)
from mdsmix.messages import plural

KEYS = ("kind", "name", "bytes", "age")
"What --json prints of each file."
SECONDS_OF_DAY = 86_400


def gc(
    streams: Streams,
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Only files written longer ago: 7d, 12h, 30m or 0s."),
    ] = "7d",
    keep: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Of a stream published as versions, keep only the newest N and those replaced "
            "since AGE ago.",
            show_default="all",
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the files; otherwise they are only listed.")
    ] = False,
    as_json: AsJson = False,
    log_file: LogFile = None,
) -> None:
    """List the files at each STREAM that nothing refers to any more: shards, records of work
    units, quarantine files, interrupted writes.

    Files that the published index or manifest refers to are always kept, and so are shards of
    finished work that a conversion can use again. Shards of an index that was replaced less than
    AGE ago are kept too. Versions are kept unless --keep limits them. Streams of a recipe without
    a source are skipped.
    """
    from mdsmix.conversion import gc as collector

    warn = partial(echo, err=True)
    age = collector.parse_age(older_than)
    if age < collector.KEEP_SECONDS:
        days = collector.KEEP_SECONDS // SECONDS_OF_DAY
        warn(
            f"WARNING: --older-than is {older_than}, but running jobs and caches may still use "
            f"files younger than {days} days"
        )

    def collect(stream: str) -> Any:
        folder = collector.find_folder(stream)
        if delete:
            garbage = collector.delete_garbage(folder, age, warn, keep)
        else:
            garbage = collector.find_garbage(folder, age, keep)
        if as_json:
            items = [{key: getattr(item, key) for key in KEYS} for item in garbage]
            return {"stream": str(folder), "deleted": delete, "garbage": items}
        for item in garbage:
            age_in_days = item.age / SECONDS_OF_DAY
            echo(f"{item.kind:16}  {item.bytes:>13,} bytes  {age_in_days:>6.1f} days  {item.name}")
        size = f"{plural(len(garbage), 'file')}, {sum(item.bytes for item in garbage):,} bytes"
        if delete:
            outcome = "deleted"
        elif garbage:
            outcome = "nothing is deleted without --delete"
        else:
            outcome = "all files are in use"
        echo(f"{folder}: {size}: {outcome}")
        return None

    for_each_stream(streams, as_json, collect, only_made=True)
