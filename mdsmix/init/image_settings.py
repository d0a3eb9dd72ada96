"""The images of a stream's first records: the fields that hold them, what stands for one in the tokens, and whether they are where the
records say. Beside the records first; where few are there, the folders around are tried.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from mdsmix.encode.pretrained import Tokenizer
from mdsmix.errors import MdsmixError
from mdsmix.images.fetching import find, is_http
from mdsmix.images.judge import Bad
from mdsmix.init.drafts import Draft
from mdsmix.kinds.pictured import token_of
from mdsmix.recipe import ImagesSpec
from mdsmix.storage import Location
from mdsmix.words import does, plural, printable

TOKENS = ("<|image_pad|>", "<image>", "<|image|>", "<image_soft_token>", "[IMG]")
"What models call it, where a tokenizer does not declare it as its image_token."
MOST_ROOTS = 64
"Folders that are tried."
FIRST = 5
"Images that are looked for in each of them."


def settled(draft: Draft, tokenizer: Tokenizer, folder: Path, said: list[str]) -> Draft | None:
    """The stream with the keys that its images want; None if the tokenizer knows no token for one. `folder`: of the recipe; `said`: takes
    sentences on what is not as it should be."""
    fields = draft.guess.images
    if fields is None:
        return draft
    keys: dict[str, Any] = {}
    if fields:
        keys["field"] = fields[0] if len(fields) == 1 else list(fields)
    why = []
    if not token_of(ImagesSpec(), tokenizer):
        keys["token"] = next((t for t in TOKENS if t in tokenizer.special_tokens), None)
        if keys["token"] is None:
            said.append(
                f"{draft.name} is left out: its records have images, and the tokenizer knows no token for one: name that of a model that sees"
            )
            return None
        why.append("the tokenizer declares no image_token")
    paths = [each for each in draft.guess.pictures if isinstance(each, str) and not is_http(each)]
    beside = draft.files[0].location.parent
    base = _root(paths, beside)
    if base.url != beside.url:
        keys["root"] = base.url if base.is_store else os.path.relpath(base.url, folder)
        why.append("where the paths were found")
    lost = [path for path in paths if not _is_there(path, base)]
    if len(lost) * 10 > len(paths):
        said.append(
            f"WARNING: {draft.name}: of {plural(len(paths), 'image')} looked for {len(lost):,} {does(lost, 'is', 'are')} not there, such as "
            f"{printable(lost[0][:200])}: write images.root, the folder that their paths begin at"
        )
    own = {"images": (keys, "; ".join(why) or "paths begin beside the records")}
    notes = [*draft.notes, _note(draft, paths, lost)]
    return replace(draft, settings={**own, **draft.settings}, notes=notes)


def _note(draft: Draft, paths: Sequence[str], lost: Sequence[str]) -> str:
    """What was found of the images of the records that were looked at."""
    remote = sum(isinstance(each, str) and is_http(each) for each in draft.guess.pictures)
    inside = len(draft.guess.pictures) - len(paths) - remote
    said = [f"{len(paths) - len(lost):,} found, {len(lost):,} not found"] if paths else []
    said += [f"{inside:,} in the records themselves"] if inside else []
    said += [f"{remote:,} at http(s) URLs, which images.http: fetch fetches"] if remote else []
    return f"images of these records: {'; '.join(said)}"


def _root(paths: Sequence[str], beside: Location) -> Location:
    """Where most of the first paths are; `beside` the records where nowhere is better."""
    first = list(dict.fromkeys(paths))[:FIRST]
    tried = {root.url: root for root in islice(_roots(beside), MOST_ROOTS)} if first else {}
    best, most = beside, sum(_is_there(path, beside) for path in first)
    for root in tried.values():
        if most * 2 > len(first):
            break
        if (count := sum(_is_there(path, root) for path in first)) > most:
            best, most = root, count
    return best


def _roots(beside: Location) -> Iterator[Location]:
    """The folders beside the records' file, the one above it, and those in that."""
    for home in (beside, beside.parent):
        if home is not beside:
            yield home
        try:
            yield from (home / name for name in home.folders())
        except MdsmixError:
            return


def _is_there(path: str, base: Location) -> bool:
    try:
        place = find(path, base).place
        return place is not None and place.stat() is not None
    except (Bad, MdsmixError):
        return False
