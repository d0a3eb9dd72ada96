"""The images of a stream's first records: the fields that hold them, what stands for one in the tokens, and whether they are where the
records say. Beside the records first; where one is not there, the folders around are tried.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mdsmix.encode.pretrained import Tokenizer
from mdsmix.errors import MdsmixError
from mdsmix.images.fetching import find, is_http
from mdsmix.images.judge import Bad
from mdsmix.init.data_files import Said
from mdsmix.init.drafts import Draft
from mdsmix.kinds.pictured import token_of
from mdsmix.recipe import ImagesSpec
from mdsmix.storage import Location
from mdsmix.words import plural, printable

TOKENS = ("<|image_pad|>", "<image>", "<|image|>", "<image_soft_token>", "[IMG]")
"What models call it, where a tokenizer does not declare it as its image_token."
MOST_ROOTS = 64
"Folders that are tried."
FIRST = 5
"Images that are looked for in each of them."


def set_images(draft: Draft, tokenizer: Tokenizer, folder: Path, said: Said) -> bool:
    """Sets the keys that the images of a stream want; false if the tokenizer knows no token for one.

    Args:
        folder: of the recipe.
        said: takes sentences on what is not as it should be.
    """
    keys, why = dict[str, Any](), list[str]()
    if fields := draft.guess.images:
        keys["field"] = fields[0] if len(fields) == 1 else list(fields)
    if not token_of(ImagesSpec(), tokenizer):
        keys["token"] = next((t for t in TOKENS if t in tokenizer.special_tokens), None)
        why.append("the tokenizer declares no image_token")
    if keys.get("token", "") is None:
        said.append(
            f"{draft.name} is left out: its records have images, and the tokenizer knows no token for one: name that of a model that sees"
        )
        return False
    pictures, beside = draft.guess.pictures, draft.files[0].location.parent
    paths = [each for each in pictures if isinstance(each, str) and not is_http(each)]
    first = paths[:FIRST]
    roots = islice(_roots(beside), MOST_ROOTS if paths else 1)
    base = max(roots, key=lambda root: sum(_is_there(path, root) for path in first))
    if base.url != beside.url:
        keys["root"] = base.url if base.is_store else os.path.relpath(base.url, folder)
        why.append("where the paths were found")
    draft.set("images", keys, "; ".join(why) or "paths begin beside the records")
    lost = [path for path in paths if not _is_there(path, base)]
    draft.notes.append(
        f"images of these records: {len(pictures):,}; {len(paths):,} by a path, {len(lost):,} of these not found; others in the records, or "
        "at http(s) URLs, which images.http: fetch fetches"
    )
    if lost:
        said.append(
            f"WARNING: {draft.name}: of {plural(len(paths), 'image')} looked for {len(lost):,} not there, such as "
            f"{printable(lost[0][:200])}: write images.root, the folder that their paths begin at"
        )
    return True


def _roots(beside: Location) -> Iterator[Location]:
    """The folders beside the records' file, the one above it, and those in that."""
    yield beside
    try:
        yield from (beside / name for name in beside.folders())
        yield beside.parent
        yield from (beside.parent / name for name in beside.parent.folders())
    except MdsmixError:
        return


def _is_there(path: str, base: Location) -> bool:
    try:
        place = find(path, base).place
        return place is not None and place.stat() is not None
    except (Bad, MdsmixError):
        return False
