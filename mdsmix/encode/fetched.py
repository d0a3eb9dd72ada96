"""A tokenizer that lies beside the streams, for whoever reads them on a machine that has it nowhere else.

`convert` keeps it at the root of the mix as `tokenizer-<hash8>/`, and a YAML rendered for S3 names a folder of that name on the training
nodes. Until somebody has copied it there, `mdsmix` reads its own copy: fetched once, into the cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import xxhash

from mdsmix import typed
from mdsmix.encode.tokenizer import Tokenizer, cache_folder, content_hash, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.recipe import TokenizerSpec
from mdsmix.recipe.rules import TOKENIZER_FOLDER
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.storage import Location, locate, together

CARD = "mdsmix.tokenizer"
"Written last: a folder with it is whole."


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCard:
    """What is said of such a folder in it."""

    tokenizer: TokenizerCard
    files: list[str]
    "Those that were written, the card not among them."


def read_card(home: Location, content: bytes) -> FolderCard | None:
    """The folder's card; None where it is not one that mdsmix wrote of this folder."""
    with suppress(typed.Misfit):
        card = typed.load(FolderCard, content)
        return card if card.tokenizer.folder_name == home.name else None
    return None


def refuse_other(home: Location, content: bytes, own: Tokenizer | TokenizerCard | None) -> None:
    """Unreachable where the tokenizer.json in a folder does not give the ids of the tokenizer that was published there."""
    with suppress(orjson.JSONDecodeError, KeyError, TypeError):
        if own and content_hash(content, own.bos_id, own.eos_id, own.pad_id) == own.hash:
            return
    raise Unreachable(
        f"{home} does not hold the tokenizer as it was published, so its ids would be others: delete that folder and run "
        "`mdsmix convert` again, which publishes it anew"
    )


def at_hand(spec: TokenizerSpec, streams: Iterable[str]) -> TokenizerSpec:
    """The tokenizer with a folder on this machine. Where `spec` names a folder of a training node that is not here, it is fetched
    from beside `streams`, their folders or URLs. Where it is here, is no such folder or lies beside no stream, `spec` stays."""
    name = os.path.basename(spec.name.rstrip("/"))
    if not TOKENIZER_FOLDER.fullmatch(name) or os.path.isdir(spec.name):
        return spec
    for root in dict.fromkeys(locate(place).parent for place in streams):
        home = root / name
        if found := (home / CARD).fetch():
            return replace(spec, name=str(_fetched(home, found[1])))
    return spec


def _fetched(home: Location, card: bytes) -> Path:
    """The cache's copy, its card written last."""
    place = xxhash.xxh128_hexdigest(home.url.encode() + card)
    folder = cache_folder() / "fetched" / place / home.name
    if not (folder / CARD).exists():
        files = _files(home, card)
        for name, content in files.items():
            keep_in_cache(folder / name, content)
        keep_in_cache(folder / CARD, card)
    return folder


def _files(home: Location, content: bytes) -> dict[str, bytes]:
    """Unreachable where they are not the tokenizer that was published there."""
    card = read_card(home, content)
    names = card.files if card else []
    files = dict(zip(names, together(lambda name: (home / name).read(), names), strict=True))
    refuse_other(home, files.get("tokenizer.json", b""), card.tokenizer if card else None)
    return files
