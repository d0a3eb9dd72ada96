"""`mdsmix gc`: what of published streams is no longer needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mdsmix.cli.options import AsJson, echo
from mdsmix.cli.several import Streams, for_each
from mdsmix.words import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mdsmix.convert.garbage import Garbage
    from mdsmix.storage import Location


def gc(
    streams: Streams,
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
    """List what nothing names any more at each STREAM: shards, unit records, quarantine files, writes that were killed.

    What the index, the manifest or a unit record in use names always stays, as do shards of indexes replaced since AGE ago.
    Versions stay unless --keep says how many are enough. Of a recipe only the streams that it makes are looked at.
    """
    from mdsmix.convert.garbage import (
        KEEP_SECONDS,
        delete_garbage,
        find_folder,
        find_garbage,
        seconds_of,
    )

    age = seconds_of(older_than)
    if age < KEEP_SECONDS:
        _warn(
            f"WARNING: running jobs and caches may still name what is younger than {KEEP_SECONDS // 86_400} days"
        )
    told: set[Location] = set()

    def one(stream: str) -> Any:
        folder = find_folder(stream)
        found = (
            delete_garbage(folder, age, _warn, keep) if delete else find_garbage(folder, age, keep)
        )
        root = folder.parent.parent  # its tokenizers and processors are those of all streams in it
        garbage = [
            item
            for item in found
            if item.kind not in ("tokenizer", "processor") or root not in told
        ]
        told.add(root)
        return _json(folder, garbage, delete) if as_json else _print(folder, garbage, delete)

    for_each(streams, as_json, one, only_made=True)


def _json(folder: Location, garbage: Sequence[Garbage], delete: bool) -> dict[str, Any]:
    keys = ("kind", "name", "bytes", "age")
    found = [{key: getattr(item, key) for key in keys} for item in garbage]
    return {"stream": str(folder), "deleted": delete, "garbage": found}


def _print(folder: Location, garbage: Sequence[Garbage], delete: bool) -> None:
    for item in garbage:
        days = item.age / 86_400
        echo(f"{item.kind:16}  {item.bytes:>13,} bytes  {days:>6.1f} days  {item.name}")
    size = f"{plural(len(garbage), 'file')}, {sum(item.bytes for item in garbage):,} bytes"
    left = "nothing is deleted without --delete" if garbage else "all is in use"
    echo(f"{folder}: {size}: {'deleted' if delete else left}")


def _warn(sentence: str) -> None:
    echo(sentence, err=True)
