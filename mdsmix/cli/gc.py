"""`mdsmix gc`: what of a published stream is no longer needed."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from mdsmix.cli.options import AsJson, Stream, echo_json
from mdsmix.words import plural


def gc(
    stream: Stream,
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Only what was written longer ago: 7d, 12h, 30m or 0s."),
    ] = "7d",
    keep: Annotated[
        Optional[int],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(
            min=1,
            metavar="N",
            help="Of a stream published as versions: only the newest N and those replaced since AGE ago stay.",
            show_default="all",
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete it; otherwise it is only listed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List what nothing names any more at STREAM: shards, unit records, quarantine files, writes that were killed.

    What the index, the manifest or a unit record in use names always stays, as do shards of indexes replaced since AGE ago.
    Versions stay unless --keep says how many are enough.
    """
    from mdsmix.convert.gc import (
        KEEP_SECONDS,
        delete_garbage,
        find_folder,
        find_garbage,
        seconds_of,
    )

    age, folder = seconds_of(older_than), find_folder(stream)
    if age < KEEP_SECONDS:
        _warn(
            f"WARNING: running jobs and caches may still name what is younger than {KEEP_SECONDS // 86_400} days"
        )
    garbage = (
        delete_garbage(folder, age, _warn, keep) if delete else find_garbage(folder, age, keep)
    )
    if as_json:
        keys = ("kind", "name", "bytes", "age")
        found = [{key: getattr(item, key) for key in keys} for item in garbage]
        echo_json({"stream": str(folder), "deleted": delete, "garbage": found})
        return
    for item in garbage:
        days = item.age / 86_400
        typer.echo(f"{item.kind:16}  {item.bytes:>13,} bytes  {days:>6.1f} days  {item.name}")
    files = plural(len(garbage), "file")
    size = f"{files}, {sum(item.bytes for item in garbage):,} bytes"
    done = (
        "deleted"
        if delete
        else "nothing is deleted without --delete"
        if garbage
        else "all is in use"
    )
    typer.echo(f"{folder}: {size}: {done}")


def _warn(sentence: str) -> None:
    typer.echo(sentence, err=True)
