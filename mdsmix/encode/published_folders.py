"""A tokenizer or a processor that lies beside the streams, for whoever reads them on a machine that has it nowhere else.

`convert` keeps it at the root of the mix as `tokenizer-<hash8>/` or `processor-<hash8>/`, with what transformers opens to the same, and a
small card that is written last: a folder with a card is whole. The name follows from what every manifest says, so the manifests tell
which folders are needed. A YAML rendered for S3 names a folder of that name on the training nodes; until somebody has copied it there,
`mdsmix` reads its own copy: fetched once, into the cache. No lease guards it: two runs that write it at once write the same.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import xxhash

from mdsmix import typed
from mdsmix.encode.pretrained import cache_folder, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.recipe import TokenizerSpec
from mdsmix.recipe.rules import is_folder_beside
from mdsmix.storage import Location, locate, together


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCard:
    """What is said of a tokenizer's or a processor's folder in it."""

    name: str
    "As a hub names the tokenizer or processor; of a folder its last name only."
    hash: str
    "Its hash, which the manifests name."
    folder: str
    "The folder's own name."
    content: str
    "xxh128 of the files."
    files: list[str]
    "Those that were written, the card not among them."


def card_name(folder: str) -> str:
    """Of the card in a folder of this name: `mdsmix.tokenizer` or `mdsmix.processor`."""
    return f"mdsmix.{folder.partition('-')[0]}"


def read_card(home: Location) -> FolderCard | None:
    """None where there is no card, or none that mdsmix wrote of this folder."""
    if found := (home / card_name(home.name)).fetch():
        with suppress(typed.Misfit):
            card = typed.load(FolderCard, found[1])
            return card if card.folder == home.name else None
    return None


def publish(home: Location, snapshot: Path, name: str, hash: str, names: Iterable[str]) -> None:
    """Makes a folder whole, if it is not: one request where it is. `names`: of the files of the snapshot."""
    if read_card(home):
        return
    files = {file: (snapshot / file).read_bytes() for file in names}
    together(lambda file: (home / file).write(files[file]), files)
    shown = name.rstrip("/").rpartition("/")[2] if name.startswith("/") else name
    card = FolderCard(
        name=shown, hash=hash, folder=home.name, content=_hash_of(files), files=[*files]
    )
    (home / card_name(home.name)).write(orjson.dumps(card))


def _hash_of(files: Mapping[str, bytes]) -> str:
    digest = xxhash.xxh128()
    for name, content in sorted(files.items()):
        digest.update(orjson.dumps([name, len(content)]))
        digest.update(content)
    return digest.hexdigest()


def fetch_folder(home: Location) -> Path | None:
    """The copy on this machine of what was published at `home`; None where nothing was. Unreachable where it is not what was published."""
    said = read_card(home)
    if said is None:
        return None
    name, card = card_name(home.name), orjson.dumps(said)
    folder = cache_folder() / "fetched" / xxhash.xxh128_hexdigest(card) / home.name
    if not (folder / name).exists():
        contents = together(lambda file: (home / file).read(), said.files)
        files = dict(zip(said.files, contents, strict=True))
        if _hash_of(files) != said.content:
            raise Unreachable(
                f"{home} does not hold the {name.removeprefix('mdsmix.')} as it was published, so its ids would be others: delete that "
                "folder and run `mdsmix convert` again, which publishes it anew"
            )
        for file, content in {**files, name: card}.items():  # the card last
            keep_in_cache(folder / file, content)
    return folder


def at_hand(spec: TokenizerSpec, streams: Iterable[str]) -> TokenizerSpec:
    """The tokenizer with a folder on this machine (`name_at_hand`)."""
    return replace(spec, name=name_at_hand(spec.name, streams))


def name_at_hand(name: str, streams: Iterable[str]) -> str:
    """The folder on this machine of a tokenizer or processor. Where `name` is that of a folder of a training node that is not here, it is
    fetched from beside `streams`, their folders or URLs; where it is a URL, from there. Where it is here, is no such folder or lies beside
    no stream, `name` stays."""
    folder = os.path.basename(name.rstrip("/"))
    if not is_folder_beside(folder) or os.path.isdir(name):
        return name
    roots = dict.fromkeys(locate(place).parent for place in streams)
    homes = [locate(name)] if "://" in name else [root / folder for root in roots]
    return str(next(filter(None, map(fetch_folder, homes)), name))


def with_tokenizer_fetched(config: dict[str, Any]) -> dict[str, Any]:
    """A training config of LLM-Foundry with its tokenizer on this machine, where the config names one in a bucket beside streams.

    Foundry calls it in every process, before it looks at the config (`llmfoundry_config_transforms` in pyproject.toml). The processes of a
    node take turns, so the first fetches the files, and the others ask for the card alone. Unreachable where there is no such tokenizer.
    """
    given = config.get("tokenizer")
    section: dict[str, Any] = given if isinstance(given, dict) else {}
    name = section.get("name")
    if not isinstance(name, str) or "://" not in name or not is_folder_beside(locate(name).name):
        return config
    lock = cache_folder() / "fetched" / ".lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        folder = fetch_folder(locate(name))
    if folder is None:
        raise Unreachable(
            f"no tokenizer is published at {name}, which the config names: run `mdsmix convert` again, which publishes it there."
        )
    return {**config, "tokenizer": {**section, "name": str(folder)}}


def copy_folder(home: Location, folder: Path) -> list[str]:
    """Copies a tokenizer or processor from beside the streams into a folder; returns the names of its files. Unreachable where none is
    there, or the folder cannot be written."""
    found = fetch_folder(home)
    if found is None:
        raise Unreachable(
            f"{home} holds no tokenizer and no processor that `mdsmix convert` published: name one, as {home.parent}/tokenizer-0f3a9c21."
        )
    names = sorted(str(path.relative_to(found)) for path in found.rglob("*") if path.is_file())
    for name in names:
        (locate(str(folder)) / name).write((found / name).read_bytes())
    return names
