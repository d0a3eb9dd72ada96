"""The folder of a mix's tokenizer or processor next to its streams, for machines that have no other
copy of it.

`convert` writes the folder at the root of the mix as `tokenizer-<hash8>/` or `processor-<hash8>/`:
the files from which transformers opens the same tokenizer or processor, and a small card. The card
is written last: a folder with a card is complete. Every manifest contains the hash, so the
manifests show which folders are needed. A YAML rendered for S3 names a folder of that name on the
training nodes. If that folder is missing, `mdsmix` reads a copy that it fetches once into the
cache. No lease guards the folder, since two runs that write it at the same time write the same
files.
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
from mdsmix.recipe.rules import is_pretrained_folder
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.storage import Location, is_for_streaming_alone, locate, map_threads
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.content_hash import hash_bytes, hash_content
from mdsmix.tokenizer.transformers_five import TOKENIZER_JSON


@dataclass(frozen=True, kw_only=True)
class FolderCard:
    """The card in the folder of a tokenizer or processor. Its fields are the keys of the file."""

    name: str
    """The hub name of the tokenizer or processor. If it came from a folder, only the last part of
    that folder's path.
    """
    hash: str
    "The hash of the tokenizer or processor, as in the manifests."
    folder: str
    "The folder's own name."
    content: str
    "xxh128 of the files."
    files: list[str]
    "Names of the files in the folder, without the card."


def card_file_name(folder: str) -> str:
    """Return the name of the card in a folder of this name: `mdsmix.tokenizer` or
    `mdsmix.processor`.
    """
    return f"mdsmix.{folder.partition('-')[0]}"


def read_card(home: Location) -> FolderCard | None:
    """Return the card in the folder `home`. Return None if there is no card, or if it was written
    for a folder with another name.
    """
    answer = (home / card_file_name(home.name)).fetch()
    if answer is None:
        return None
    card = schema.parse_json_if_fit(FolderCard, answer[1])
    return card if card and card.folder == home.name else None


def publish_folder(home: Location, snapshot: Path, pretrained: Tokenizer | Processor) -> None:
    """Write the files of a snapshot and their card to `home`. If the card is there already, nothing
    is written.

    Args:
        home: the folder `tokenizer-<hash8>` or `processor-<hash8>` at the root of the mix.
        snapshot: the folder in the cache with the files.
        pretrained: the tokenizer or processor that they are the files of.
    """
    if read_card(home):
        return
    files = {file: (snapshot / file).read_bytes() for file in pretrained.files}
    map_threads(lambda file: (home / file).write(files[file]), files)
    name = pretrained.name
    if name.startswith("/"):  # a local path: only its last part means anything elsewhere
        name = name.rstrip("/").rpartition("/")[2]
    card = FolderCard(
        name=name,
        hash=pretrained.hash,
        folder=home.name,
        content=_hash_files(files),
        files=[*files],
    )
    (home / card_file_name(home.name)).write(orjson.dumps(card))


def _hash_files(files: Mapping[str, bytes]) -> str:
    """Return the xxh128 of files, given as name -> content."""
    digest = xxhash.xxh128()
    for name, content in sorted(files.items()):
        digest.update(orjson.dumps([name, len(content)]))
        digest.update(content)
    return digest.hexdigest()


def fetch_folder(home: Location) -> Path | None:
    """Return a copy in the cache of the folder that was published at `home`. It is fetched if the
    cache does not have it yet. Return None if there is no card at `home`.

    Raises Unreachable if the files at `home` have changed since they were published.
    """
    card = read_card(home)
    if card is None:
        return None
    card_name = card_file_name(home.name)
    card_bytes = orjson.dumps(card)
    folder = cache_folder() / "fetched" / xxhash.xxh128_hexdigest(card_bytes) / home.name
    if (folder / card_name).exists():
        return folder
    contents = map_threads(lambda file: (home / file).read(), card.files)
    files = dict(zip(card.files, contents, strict=True))
    if _hash_files(files) != card.content:
        raise Unreachable(
            f"the files of {home} have changed since the {card_name.removeprefix('mdsmix.')} was "
            "published, so its ids would differ: delete that folder and run `mdsmix convert` "
            "again, which publishes it again"
        )
    for file, content in files.items():
        keep_in_cache(folder / file, content)
    keep_in_cache(folder / card_name, card_bytes)  # last: a folder with a card is complete
    return folder


HASH = re.compile("[0-9a-f]{32}")
"The form of a tokenizer's hash."


class PublishedTokenizer(NamedTuple):
    """The tokenizer of a published stream, and the root of its mix."""

    card: TokenizerCard
    root: Location


def adopt_hash(tokenizer: Tokenizer, published: Iterable[PublishedTokenizer]) -> Tokenizer:
    """Return the tokenizer with the hash that published streams use for it.

    An earlier version of mdsmix gave the same tokenizer another hash (`hash_bytes`). Streams that
    were published with that hash keep it, and so do their keys, locks and folder names. The
    tokenizer is returned unchanged if a stream has today's hash of it, or if no stream has an
    earlier hash of it.
    """
    by_hash = {other.card.hash: other for other in published}
    if tokenizer.hash in by_hash:
        return tokenizer
    for other in by_hash.values():
        if find_current_hash(other) == tokenizer.hash:
            return replace(tokenizer, hash=other.card.hash)
    return tokenizer


def find_current_hash(published: PublishedTokenizer) -> str:
    """Return the hash of a published tokenizer by today's rule (`hash_content`).

    It is computed once on this machine, from the tokenizer's published folder. If the folder cannot
    be read, or the hash in the manifest is not that of its tokenizer.json by the earlier rule, the
    hash in the manifest is returned.
    """
    card = published.card
    if not HASH.fullmatch(card.hash):  # a damaged manifest's
        return card.hash
    stored = cache_folder() / "tokenizer_hashes" / f"{card.hash}-1"
    if stored.is_file():
        return stored.read_text()
    ids = {key: getattr(card, key) for key in ("bos_id", "eos_id", "pad_id")}
    with suppress(MdsmixError):
        folder = fetch_folder(published.root / card.folder_name)
        if folder is None:
            return card.hash
        tree = orjson.loads((folder / TOKENIZER_JSON).read_bytes())
        if hash_bytes(tree, ids) == card.hash:
            digest = hash_content(tree, ids)
            keep_in_cache(stored, digest.encode())
            return digest
    return card.hash


def localize_spec(spec: TokenizerSpec, streams: Iterable[str]) -> TokenizerSpec:
    """Return the spec of a tokenizer with the name of its folder on this machine, which is fetched
    if it is only published next to the streams (`localize_name`).
    """
    return replace(spec, name=localize_name(spec.name, streams))


def localize_name(name: str, streams: Iterable[str]) -> str:
    """Return a folder on this machine with the tokenizer or processor `name`.

    If `name` is like `/data/tokenizer-0f3a9c21` and is not on this machine, it is fetched from the
    folder of that name next to `streams`. A URL of such a folder is fetched directly. Any other
    name is returned unchanged, and so is one that is not published anywhere.

    Args:
        streams: folders or URLs.
    """
    folder_name = os.path.basename(name.rstrip("/"))
    if not is_pretrained_folder(folder_name) or os.path.isdir(name):
        return name
    if "://" in name:
        homes = [locate(name)]
    else:
        readable = (stream for stream in streams if not is_for_streaming_alone(stream))
        roots = dict.fromkeys(locate(stream).parent for stream in readable)
        homes = [root / folder_name for root in roots]
    for home in homes:
        folder = fetch_folder(home)
        if folder:
            return str(folder)
    return name


def with_tokenizer_fetched(config: dict[str, Any]) -> dict[str, Any]:
    """Fetch the tokenizer of an LLM-Foundry training config if its name is the URL of a published
    tokenizer. Return the config with the name of the fetched folder instead of the URL.

    Foundry calls this function in every process, before it reads the config
    (`llmfoundry_config_transforms` in pyproject.toml). The processes of a node take turns: the
    first fetches the files, the others only the card.
    Raises Unreachable if there is no tokenizer at the URL.
    """
    value = config.get("tokenizer")
    section: dict[str, Any] = value if isinstance(value, dict) else {}
    name = section.get("name")
    if (
        not isinstance(name, str)
        or "://" not in name
        or not is_pretrained_folder(locate(name).name)
    ):
        return config
    lock = cache_folder() / "fetched" / ".lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        folder = fetch_folder(locate(name))
    if folder is None:
        raise Unreachable(
            f"no tokenizer is published at {name}, which the config names: run `mdsmix convert` "
            "again, which publishes it there."
        )
    return {**config, "tokenizer": {**section, "name": str(folder)}}


def copy_folder(home: Location, folder: Path) -> list[str]:
    """Copy the tokenizer or processor published at `home` into `folder`, and return the names of
    its files.

    Raises Unreachable if nothing is published at `home`, or `folder` cannot be written.
    """
    source = fetch_folder(home)
    if source is None:
        raise Unreachable(
            f"{home} does not contain a tokenizer or processor that `mdsmix convert` published: "
            f"name one, such as {home.parent}/tokenizer-0f3a9c21."
        )
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    for name in names:
        (locate(str(folder)) / name).write((source / name).read_bytes())
    return names
