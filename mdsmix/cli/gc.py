"""`mdsmix gc`: the files of published streams that are no longer needed."""

from __future__ import annotations

from functools import partial
from typing import Any

from mdsmix.cli.options import (
    AS_JSON,
    STREAMS,
    Number,
    echo,
    flag,
    for_each,
    option,
)
from mdsmix.words import plural

KEYS = ("kind", "name", "bytes", "age")


def gc(
    streams: list[str] = STREAMS,
    older_than: str = option("7d", "Only files written longer ago: 7d, 12h, 30m or 0s.", "AGE"),
    keep: Number = option(
        None,
        "Of a stream published as versions, keep only the newest N and those replaced since AGE ago.",
        "N",
        least=1,
        shown="all",
    ),
    delete: bool = flag("--delete", "Delete the files; otherwise they are only listed."),
    as_json: bool = AS_JSON,
) -> None:
    """List the files at each STREAM that nothing names any more: shards, unit records, quarantine
    files, killed writes.

    Files that the index, the manifest or a unit record in use names always stay, as do shards of
    indexes replaced since AGE ago. Versions stay unless --keep says how many are enough. Of a
    recipe, only the streams that it makes are looked at.
    """
    from mdsmix.convert import garbage as collector

    warn = partial(echo, err=True)
    age, days = collector.seconds_of(older_than), collector.KEEP_SECONDS // 86_400
    if age < collector.KEEP_SECONDS:
        warn(f"WARNING: running jobs and caches may still name what is younger than {days} days")

    def one(stream: str) -> Any:
        folder = collector.find_folder(stream)
        garbage = (
            collector.delete_garbage(folder, age, warn, keep)
            if delete
            else collector.find_garbage(folder, age, keep)
        )
        if as_json:
            items = [{key: getattr(item, key) for key in KEYS} for item in garbage]
            return {"stream": str(folder), "deleted": delete, "garbage": items}
        for item in garbage:
            days = item.age / 86_400
            echo(f"{item.kind:16}  {item.bytes:>13,} bytes  {days:>6.1f} days  {item.name}")
        left = "nothing is deleted without --delete" if garbage else "all is in use"
        size = f"{plural(len(garbage), 'file')}, {sum(item.bytes for item in garbage):,} bytes"
        return echo(f"{folder}: {size}: {'deleted' if delete else left}")

    for_each(streams, as_json, one, only_made=True)
