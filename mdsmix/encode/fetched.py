"""A tokenizer that lies beside the streams, for whoever reads them on a machine that has it nowhere else.

`convert` keeps it at the root of the mix as `tokenizer-<hash8>/`, and a YAML rendered for S3 names a folder of that name on the training
nodes. Until somebody has copied it there, `mdsmix` reads its own copy: fetched once, into the cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import xxhash

from mdsmix.encode.tokenizer import cache_folder, content_hash, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.recipe import TokenizerSpec
from mdsmix.recipe.rules import TOKENIZER_FOLDER
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.storage import Location, locate, together

CARD = "mdsmix.tokenizer"
"Written last: a folder with it is whole."


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


def _files(home: Location, card: bytes) -> dict[str, bytes]:
    """Unreachable where they are not the tokenizer that was published there."""
    try:
        tree: Any = orjson.loads(card)
        names = [str(name) for name in tree["files"]]
        said = TokenizerCard(**tree["tokenizer"])
        contents = together(lambda name: (home / name).read(), names)
        files = dict(zip(names, contents, strict=True))
        found = content_hash(files["tokenizer.json"], said.bos_id, said.eos_id, said.pad_id)
        if (found, said.folder_name) == (said.hash, home.name):
            return files
    except (orjson.JSONDecodeError, KeyError, TypeError):
        pass
    raise Unreachable(
        f"{home} does not hold the tokenizer as it was published, so its ids would be others: delete that folder and run "
        "`mdsmix convert` again, which publishes it anew"
    )
