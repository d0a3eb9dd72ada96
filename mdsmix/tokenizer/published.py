"""The tokenizer or processor of a mix as a folder beside its streams, for machines that have it
nowhere else.

`convert` writes the folder at the root of the mix as `tokenizer-<hash8>/` or `processor-<hash8>/`:
the files that transformers opens to the same tokenizer or processor, and a small card. The card is
written last: a folder with a card is complete. Every manifest has the hash, so the manifests tell
which folders are needed. A YAML rendered for S3 names a folder of that name on the training nodes.
Until somebody has copied the folder there, `mdsmix` reads a copy that it fetches once, into the
cache. No lease guards the folder, since two runs that write it at once write the same files.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import xxhash

from mdsmix import schema
from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.processor.card import Processor
from mdsmix.recipe import TokenizerSpec
from mdsmix.recipe.rules import is_folder_beside
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.storage import Location, is_for_streaming_alone, locate, map_threads
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.content_hash import hash_bytes, hash_content
from mdsmix.tokenizer.transformers_five import TOKENIZER_JSON


@dataclass(frozen=True, kw_only=True)
class FolderCard:
    """The card in the folder of a tokenizer or processor."""

    name: str
    """The hub's name of the tokenizer or processor; for one from a folder, that folder's last name
    only.
    """
    hash: str
    "The hash of the tokenizer or processor, as manifests have it."
    folder: str
    "The folder's own name."
    content: str
    "xxh128 of the files."
    files: list[str]
    "Names of the files in the folder, without the card."


def card_file_name(folder: str) -> str:
    """The name of the card's file in a folder of this name: `mdsmix.tokenizer` or
    `mdsmix.processor`.
    """
    return f"mdsmix.{folder.partition('-')[0]}"


def read_card(home: Location) -> FolderCard | None:
    """The card of the folder `home`; None where there is none, or one that mdsmix did not write for
    a folder of this name.
    """
    if found := (home / card_file_name(home.name)).fetch():
        card = schema.parse_json_if_fit(FolderCard, found[1])
        return card if card and card.folder == home.name else None
    return None


def publish_folder(home: Location, snapshot: Path, of: Tokenizer | Processor) -> None:
    """Writes the files of a snapshot and their card to `home`, unless its card is there: one
    request then.
    """
    if read_card(home):
        return
    files = {file: (snapshot / file).read_bytes() for file in of.files}
    map_threads(lambda file: (home / file).write(files[file]), files)
    shown = of.name.rstrip("/").rpartition("/")[2] if of.name.startswith("/") else of.name
    card = FolderCard(
        name=shown, hash=of.hash, folder=home.name, content=_hash_of(files), files=[*files]
    )
    (home / card_file_name(home.name)).write(orjson.dumps(card))


def _hash_of(files: Mapping[str, bytes]) -> str:
    digest = xxhash.xxh128()
    for name, content in sorted(files.items()):
        digest.update(orjson.dumps([name, len(content)]))
        digest.update(content)
    return digest.hexdigest()


def fetch_folder(home: Location) -> Path | None:
    """The copy on this machine of the folder published at `home`; None where no card is there.
    Unreachable where its files have changed.
    """
    said = read_card(home)
    if said is None:
        return None
    name, card = card_file_name(home.name), orjson.dumps(said)
    folder = cache_folder() / "fetched" / xxhash.xxh128_hexdigest(card) / home.name
    if not (folder / name).exists():
        contents = map_threads(lambda file: (home / file).read(), said.files)
        files = dict(zip(said.files, contents, strict=True))
        if _hash_of(files) != said.content:
            raise Unreachable(
                f"{home} does not hold the {name.removeprefix('mdsmix.')} as it was published, so its ids would be others: delete that "
                "folder and run `mdsmix convert` again, which publishes it anew"
            )
        for file, content in {**files, name: card}.items():  # the card last
            keep_in_cache(folder / file, content)
    return folder


HASH = re.compile("[0-9a-f]{32}")


class PublishedTokenizer(NamedTuple):
    """The tokenizer of a published stream, and the root of its mix."""

    card: TokenizerCard
    root: Location


def adopt_hash(tokenizer: Tokenizer, published: Iterable[PublishedTokenizer]) -> Tokenizer:
    """Return the tokenizer under the hash that published streams have of it.

    An earlier version of mdsmix gave the same tokenizer another hash (`tokenizer_hash`). Streams
    that have that hash keep it: their keys, locks and folder names stay. The tokenizer is returned
    as it is if a stream has its own hash, or if none has an earlier one of it.
    """
    others = {of.card.hash: of for of in published}
    if tokenizer.hash in others:
        return tokenizer
    for of in others.values():
        if find_current_hash(of) == tokenizer.hash:
            return replace(tokenizer, hash=of.card.hash)
    return tokenizer


def find_current_hash(published: PublishedTokenizer) -> str:
    """Return the hash that a published tokenizer has by today's rule.

    It is worked out from the tokenizer's published folder, once on this machine. If the folder
    cannot be read, or is not what the card was made of, the card's own hash is returned.
    """
    card = published.card
    if not HASH.fullmatch(card.hash):  # a damaged manifest's
        return card.hash
    known = cache_folder() / "tokenizer_hashes" / f"{card.hash}-1"
    if known.is_file():
        return known.read_text()
    ids = {key: getattr(card, key) for key in ("bos_id", "eos_id", "pad_id")}
    with suppress(MdsmixError):
        folder = fetch_folder(published.root / card.folder_name)
        if folder is None:
            return card.hash
        tree = orjson.loads((folder / TOKENIZER_JSON).read_bytes())
        if hash_bytes(tree, ids) == card.hash:
            digest = hash_content(tree, ids)
            keep_in_cache(known, digest.encode())
            return digest
    return card.hash


def localize_spec(spec: TokenizerSpec, streams: Iterable[str]) -> TokenizerSpec:
    """The tokenizer, with its name replaced by a folder on this machine where `localize_name` finds
    one.
    """
    return replace(spec, name=localize_name(spec.name, streams))


def localize_name(name: str, streams: Iterable[str]) -> str:
    """A folder on this machine with the tokenizer or processor `name`.

    A name such as `/data/tokenizer-0f3a9c21` whose folder is not on this machine is fetched from
    the folder of that name beside `streams` (folders or URLs); a URL is fetched from itself. Any
    other name stays, and so does one that is published nowhere.
    """
    folder = os.path.basename(name.rstrip("/"))
    if not is_folder_beside(folder) or os.path.isdir(name):
        return name
    opened = (place for place in streams if not is_for_streaming_alone(place))
    roots = dict.fromkeys(locate(place).parent for place in opened)
    homes = [locate(name)] if "://" in name else [root / folder for root in roots]
    return str(next(filter(None, map(fetch_folder, homes)), name))


def with_tokenizer_fetched(config: dict[str, Any]) -> dict[str, Any]:
    """A training config of LLM-Foundry, whose tokenizer's URL (beside streams) is replaced by a
    folder on this machine.

    Foundry calls this function in every process, before it looks at the config
    (`llmfoundry_config_transforms` in pyproject.toml). The processes of a node take turns: the
    first fetches the files, the others only the card. Unreachable where the URL holds no tokenizer.
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
    """Copies the tokenizer or processor published at `home` into `folder`; returns the names of its
    files. Unreachable where none is published there, or `folder` cannot be written.
    """
    found = fetch_folder(home)
    if found is None:
        raise Unreachable(
            f"{home} holds no tokenizer and no processor that `mdsmix convert` published: name one, as {home.parent}/tokenizer-0f3a9c21."
        )
    names = sorted(str(path.relative_to(found)) for path in found.rglob("*") if path.is_file())
    for name in names:
        (locate(str(folder)) / name).write((found / name).read_bytes())
    return names
