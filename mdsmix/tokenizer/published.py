"""Publishes the tokenizer or processor of a mix in a folder next to its streams, and fetches it on
machines that have no other copy.

`convert` writes the folder `tokenizer-<hash8>/` or `processor-<hash8>/` at the root of the mix. It
contains the files from which transformers opens the same tokenizer or processor, and a small card.
The card is written last, so a folder with a card is complete. Every manifest contains the hash, so
the manifests show which folders are needed. A YAML that is rendered for a bucket names a folder of
the same name on the training nodes. If a node does not have that folder, mdsmix fetches a copy once
into the cache. No lease guards the folder, since two runs that write it at the same time write the
same files.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import xxhash

from mdsmix import schema
from mdsmix.cache import cache_folder, keep_in_cache, refuse_cache
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.frozen import frozen
from mdsmix.messages import join_names
from mdsmix.processor.card import Processor
from mdsmix.recipe import TokenizerSpec
from mdsmix.recipe.rules import is_pretrained_folder
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.storage import Location, is_for_streaming_alone, locate, map_threads
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.content_hash import hash_bytes, hash_content
from mdsmix.tokenizer.transformers_five import TOKENIZER_JSON


@frozen(kw_only=True)
class FolderCard:
    """The card of a published tokenizer or processor: a JSON file in its folder that names the
    files and their hash. The fields are the keys of the file.
    """

    name: str
    """The hub name of the tokenizer or processor. If it was read from a folder, only the last part
    of the folder's path.
    """
    hash: str
    "The hash of the tokenizer or processor, as in the manifests."
    folder: str
    "The name of the published folder, such as `tokenizer-0f3a9c21`."
    content: str
    "xxh128 of the names and contents of all files except the card."
    files: list[str]
    "Names of the files in the folder, without the card."


def card_file_name(folder: str) -> str:
    """Return the name of the card in a published folder: `mdsmix.tokenizer` in the folder
    `tokenizer-0f3a9c21`, and `mdsmix.processor` in `processor-0f3a9c21`.
    """
    return f"mdsmix.{folder.partition('-')[0]}"


def read_card(home: Location) -> FolderCard | None:
    """Return the card (the JSON file that describes a published tokenizer or processor) in the
    folder `home`. Return None if the card is missing, or if it cannot be read or was written for a
    folder with another name.
    """
    answer = (home / card_file_name(home.name)).fetch()
    if answer is None:
        return None
    _, content = answer
    card = schema.parse_json_if_fit(FolderCard, content)
    if card is None or card.folder != home.name:
        return None
    return card


def publish_folder(home: Location, snapshot: Path, pretrained: Tokenizer | Processor) -> None:
    """Write the files of a snapshot and their card to `home`. Nothing is written if `home` has a
    card already.

    Args:
        home: the folder `tokenizer-<hash8>` or `processor-<hash8>` at the root of the mix.
        snapshot: the folder in the cache with the files.
        pretrained: the tokenizer or processor of the snapshot.
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
    """Return the xxh128 of the names and contents of some files, in 32 hex digits.

    Args:
        files: name -> content.
    """
    digest = xxhash.xxh128()
    for name, content in sorted(files.items()):
        digest.update(orjson.dumps([name, len(content)]))
        digest.update(content)
    return digest.hexdigest()


def fetch_folder(home: Location) -> Path | None:
    """Return a copy in the cache of the folder that was published at `home`. The folder is fetched
    if the cache does not have it yet, or only a damaged copy. Return None if `home` has no card.

    Raises Unreachable if the files at `home` have changed since they were published.
    """
    card = read_card(home)
    if card is None:
        return None
    card_name = card_file_name(home.name)
    card_bytes = orjson.dumps(card)
    folder = cache_folder() / "fetched" / xxhash.xxh128_hexdigest(card_bytes) / home.name
    if _is_whole_copy(folder, card):
        return folder
    contents = map_threads(lambda file: (home / file).read(), card.files)
    files = dict(zip(card.files, contents, strict=True))
    if _hash_files(files) != card.content:
        raise Unreachable(
            f"the files of {home} have changed since the {card_name.removeprefix('mdsmix.')} was "
            "published, so its ids could differ. Delete that folder and run `mdsmix convert` "
            "again, which publishes the folder again"
        )
    for file, content in files.items():
        keep_in_cache(folder / file, content)
    keep_in_cache(folder / card_name, card_bytes)  # last: a folder with a card is complete
    return folder


def _is_whole_copy(folder: Path, card: FolderCard) -> bool:
    """Return whether a folder of the cache has the files of a published folder, with the content
    that its card names.
    """
    with suppress(OSError):
        contents = {file: (folder / file).read_bytes() for file in card.files}
        return (folder / card_file_name(folder.name)).is_file() and (
            _hash_files(contents) == card.content
        )
    return False


HASH = re.compile("[0-9a-f]{32}")
"The form of a tokenizer's hash: 32 hex digits."


class PublishedTokenizer(NamedTuple):
    """The tokenizer of a published stream."""

    card: TokenizerCard
    "The tokenizer's card in the stream's manifest."
    root: Location
    "The root of the mix, which contains the tokenizer's folder."


def adopt_hash(tokenizer: Tokenizer, published: Iterable[PublishedTokenizer]) -> Tokenizer:
    """Return the tokenizer with the hash that published streams have for the same tokenizer.

    An earlier version of mdsmix gave a tokenizer another hash (`hash_bytes`). Streams that were
    published with such a hash keep it, and so do their keys, locks and folder names. If a stream
    has today's hash of this tokenizer, or if no stream has an earlier hash of it, the tokenizer is
    returned unchanged.

    Args:
        tokenizer: the tokenizer, with its hash by today's rule.
        published: the tokenizers of published streams.
    """
    by_hash = {candidate.card.hash: candidate for candidate in published}
    if tokenizer.hash in by_hash:
        return tokenizer
    for candidate in by_hash.values():
        if find_current_hash(candidate) == tokenizer.hash:
            return replace(tokenizer, hash=candidate.card.hash)
    return tokenizer


def find_current_hash(published: PublishedTokenizer) -> str:
    """Return the hash of a published tokenizer by today's rule (`hash_content`).

    The hash is computed once on this machine, from the tokenizer's published folder. Two conditions
    must hold: the folder can be read, and the manifest has the hash of the folder's tokenizer.json
    by the earlier rule (`hash_bytes`). Otherwise return the hash in the manifest.
    """
    card = published.card
    if not HASH.fullmatch(card.hash):  # the manifest is damaged
        return card.hash
    stored = cache_folder() / "tokenizer_hashes" / f"{card.hash}-1"
    with suppress(OSError, UnicodeDecodeError):
        stored_hash = stored.read_text()
        if HASH.fullmatch(stored_hash):  # otherwise the file is damaged
            return stored_hash
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
    """Return the recipe's settings of a tokenizer with the name of a folder on this machine. If the
    tokenizer is only published next to the streams, its folder is fetched (`localize_name`).
    """
    return replace(spec, name=localize_name(spec.name, streams))


def localize_name(name: str, streams: Iterable[str]) -> str:
    """Return a folder on this machine with the tokenizer or processor `name`.

    A folder like `/data/tokenizer-0f3a9c21` that is not on this machine is fetched from the folder
    `tokenizer-0f3a9c21` next to one of the streams. The URL of such a folder is fetched directly.
    Any other name is returned unchanged, and so is a name that is not published anywhere.

    Args:
        name: a folder, URL or hub name.
        streams: folders or URLs of streams.
    """
    folder_name = os.path.basename(name.rstrip("/"))
    if not is_pretrained_folder(folder_name) or os.path.isdir(name):
        return name
    if "://" in name:
        homes = [locate(name)]
    else:
        # mdsmix cannot open URLs that only Streaming reads, such as oci://bucket/key.
        readable = (stream for stream in streams if not is_for_streaming_alone(stream))
        roots = dict.fromkeys(locate(stream).parent for stream in readable)
        homes = [root / folder_name for root in roots]
    for home in homes:
        folder = fetch_folder(home)
        if folder:
            return str(folder)
    return name


def with_tokenizer_fetched(config: dict[str, Any]) -> dict[str, Any]:
    """Fetch the published tokenizer of an LLM-Foundry training config if this node does not have
    it: `tokenizer.name` is its URL, or a folder such as `/cache/tokenizer-0f3a9c21` that is missing
    here and published next to a stream of the config. Return the config with the fetched folder.

    Foundry calls this function in every process, before it reads the config
    (`llmfoundry_config_transforms` in pyproject.toml). So training on a node with mdsmix needs no
    step by hand. The processes of a node take turns: the first fetches the files, the others only
    the card.
    Raises Unreachable if no tokenizer is published there.
    """
    section = config.get("tokenizer")
    if not isinstance(section, dict):
        return config
    name = section.get("name")
    if not isinstance(name, str) or not is_pretrained_folder(os.path.basename(name.rstrip("/"))):
        return config
    if os.path.isdir(name):
        return config
    streams = _list_remotes(config)
    lock = cache_folder() / "fetched" / ".lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock_file = lock.open("w")
    except OSError as error:
        raise refuse_cache("write", lock, error) from None
    with lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        folder = localize_name(name, streams)
    if folder == name:
        raise _make_missing_error(name, streams)
    return {**config, "tokenizer": {**section, "name": folder}}


def _make_missing_error(name: str, streams: Sequence[str]) -> Unreachable:
    """Return the error on a tokenizer of a training config that is nowhere published.

    Args:
        name: `tokenizer.name` of the config: a URL, or a folder that this node does not have.
        streams: the remotes of the config's streams.
    """
    if "://" in name:
        return Unreachable(
            f"no tokenizer is published at {name}, which the training config names: run `mdsmix "
            "convert` again, which publishes the tokenizer there."
        )
    searched = f"is not published next to {join_names(streams, 3)}" if streams else "has no remote"
    return Unreachable(
        f"the training config names the tokenizer {name}, which is not on this node and "
        f"{searched}: copy it there by the command at the top of the rendered YAML, or run "
        "`mdsmix convert` again, which publishes the tokenizer."
    )


def _list_remotes(config: Mapping[str, Any]) -> list[str]:
    """Return the remotes of all streams of a training config, each once."""
    evaluations = config.get("eval_loader")
    loaders = [config.get("train_loader")]
    loaders += evaluations if isinstance(evaluations, list) else [evaluations]
    remotes: dict[str, None] = {}
    for loader in loaders:
        dataset = loader.get("dataset") if isinstance(loader, Mapping) else None
        if not isinstance(dataset, Mapping):
            continue
        streams = dataset.get("streams")
        sections = [*streams.values()] if isinstance(streams, Mapping) else []
        for section in [dataset, *sections]:
            remote = section.get("remote") if isinstance(section, Mapping) else None
            if isinstance(remote, str) and remote:
                remotes[remote] = None
    return [*remotes]


def copy_folder(home: Location, folder: Path) -> list[str]:
    """Copy the tokenizer or processor published at `home` into `folder`, and return the names of
    its files.

    Raises Unreachable if nothing is published at `home`, or `folder` cannot be written.
    """
    source = fetch_folder(home)
    if source is None:
        inner = [name for name in home.folders() if name.startswith(("tokenizer-", "processor-"))]
        example = home / inner[0] if inner else home.parent / "tokenizer-0f3a9c21"
        raise Unreachable(
            f"{home} does not contain a tokenizer or processor that `mdsmix convert` published: "
            f"name the folder of one, such as {example}."
        )
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    for name in names:
        (locate(str(folder)) / name).write((source / name).read_bytes())
    return names
