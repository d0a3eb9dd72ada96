"""`mdsmix gc`: the files of published streams that are no longer needed."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from mdsmix.cli.options import (
    AsJson,
    Streams,
    echo,
    for_each_stream,
)
from mdsmix.messages import plural

KEYS = ("kind", "name", "bytes", "age")


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
) -> None:
    """List the files at each STREAM that nothing refers to any more: shards, unit records,
    quarantine files, interrupted writes.

    A file that the index, the manifest or a unit record in use refers to is always kept, as are
    shards of indexes replaced since AGE ago. Versions are kept unless --keep limits them. In a
    recipe, streams without a source are skipped.
    """
    from mdsmix.conversion import gc as collector

    warn = partial(echo, err=True)
    age = collector.parse_age(older_than)
    if age < collector.KEEP_SECONDS:
        days = collector.KEEP_SECONDS // 86_400
        warn(f"WARNING: running jobs and caches may still use files younger than {days} days")

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
            days = item.age / 86_400
            echo(f"{item.kind:16}  {item.bytes:>13,} bytes  {days:>6.1f} days  {item.name}")
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
