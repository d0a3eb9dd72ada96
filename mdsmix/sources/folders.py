"""Folders that are one source: a published MDS stream, and what `save_to_disk` of `datasets` wrote, in its own order."""

from __future__ import annotations

import orjson

from mdsmix.errors import RecipeError, Unreachable
from mdsmix.shards.index import BASENAME as INDEX
from mdsmix.storage import Found, Location, Stat

STATE = "state.json"
SPLITS = "dataset_dict.json"


def inside(folder: Location) -> Found:
    """The files of such a folder, in their order; none where it is another one, or none at all."""
    if found := (folder / SPLITS).fetch():
        names = _said(folder / SPLITS, found[1], "splits")
        raise RecipeError(
            f"{folder} holds several splits of a data set: name one of them, as in {folder}/{names[0] if names else 'train'}"
        )
    found = (folder / STATE).fetch()
    if found is None:
        stat = (folder / INDEX).stat()
        return [(folder / INDEX, stat)] if stat else []
    entries = _said(folder / STATE, found[1], "_data_files")
    files = [folder / str(entry["filename"]) for entry in entries if isinstance(entry, dict)]
    return [(file, _stat(file)) for file in files]


def _said(at: Location, content: bytes, key: str) -> list[object]:
    try:
        said = orjson.loads(content)[key]
        if isinstance(said, list):
            return said
    except (ValueError, TypeError, KeyError):
        pass
    raise Unreachable(
        f"{at} does not say its {key}, so what lies beside it is not known: name the files themselves"
    )


def _stat(file: Location) -> Stat:
    stat = file.stat()
    if stat is None:
        raise Unreachable(
            f"{file} is missing, and {STATE} beside it names it: copy the folder again"
        )
    return stat
