"""A tokenizer or a processor that lies beside the streams, for whoever reads them on a machine that has it nowhere else.

`convert` keeps it at the root of the mix as `tokenizer-<hash8>/` or `processor-<hash8>/`, and a YAML rendered for S3 names a folder of that
name on the training nodes. Until somebody has copied it there, `mdsmix` reads its own copy: fetched once, into the cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import xxhash

from mdsmix import typed
from mdsmix.encode import processor
from mdsmix.encode.pretrained import cache_folder, keep_in_cache
from mdsmix.encode.tokenizer import Tokenizer, content_hash
from mdsmix.errors import Unreachable
from mdsmix.recipe import TokenizerSpec
from mdsmix.recipe.rules import PROCESSOR_FOLDER, TOKENIZER_FOLDER
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.storage import Location, locate, together

CARD = "mdsmix.tokenizer"
"Written last: a folder with it is whole."
AGAIN = "delete that folder and run `mdsmix convert` again, which publishes it anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCard:
    """What is said of a tokenizer's folder in it."""

    tokenizer: TokenizerCard
    files: list[str]
    "Those that were written, the card not among them."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorCard:
    """What is said of a processor."""

    name: str
    "As a hub names it; a folder by its last name only."
    hash: str
    "That of `mdsmix.encode.processor.Processor`, which the manifests name."
    class_name: str
    image_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFolderCard:
    """What is said of a processor's folder in it."""

    processor: ProcessorCard
    folder: str
    "Its own name."
    content: str
    "xxh128 of the files, `content_of`."
    files: list[str]


def read_card(home: Location, content: bytes) -> FolderCard | None:
    """The folder's card; None where it is not one that mdsmix wrote of this folder."""
    with suppress(typed.Misfit):
        card = typed.load(FolderCard, content)
        return card if card.tokenizer.folder_name == home.name else None
    return None


def read_processor_card(home: Location, content: bytes) -> ProcessorFolderCard | None:
    """The card of a processor's folder; None where it is not one that mdsmix wrote of this folder."""
    with suppress(typed.Misfit):
        card = typed.load(ProcessorFolderCard, content)
        return card if card.folder == home.name else None
    return None


def content_of(files: Mapping[str, bytes]) -> str:
    """The hash of some files, by their names."""
    digest = xxhash.xxh128()
    for name, content in sorted(files.items()):
        digest.update(orjson.dumps([name, len(content)]))
        digest.update(content)
    return digest.hexdigest()


def refuse_other(home: Location, content: bytes, own: Tokenizer | TokenizerCard | None) -> None:
    """Unreachable where the tokenizer.json in a folder does not give the ids of the tokenizer that was published there."""
    with suppress(orjson.JSONDecodeError, KeyError, TypeError):
        if own and content_hash(content, own.bos_id, own.eos_id, own.pad_id) == own.hash:
            return
    raise Unreachable(
        f"{home} does not hold the tokenizer as it was published, so its ids would be others: {AGAIN}"
    )


def at_hand(spec: TokenizerSpec, streams: Iterable[str]) -> TokenizerSpec:
    """The tokenizer with a folder on this machine. Where `spec` names a folder of a training node that is not here, it is fetched
    from beside `streams`, their folders or URLs. Where it is here, is no such folder or lies beside no stream, `spec` stays."""
    name = os.path.basename(spec.name.rstrip("/"))
    if not TOKENIZER_FOLDER.fullmatch(name) or os.path.isdir(spec.name):
        return spec
    for root in roots_of(streams):
        home = root / name
        if found := (home / CARD).fetch():
            return replace(spec, name=str(_fetched_tokenizer(home, found[1])))
    return spec


def processor_at_hand(name: str, streams: Iterable[str]) -> str:
    """The processor's folder on this machine, or `name` as it is: the same for a processor."""
    folder = os.path.basename(name.rstrip("/"))
    if not PROCESSOR_FOLDER.fullmatch(folder) or os.path.isdir(name):
        return name
    found = filter(None, (fetched_processor(root / folder) for root in roots_of(streams)))
    return str(next(found, name))


def roots_of(streams: Iterable[str]) -> list[Location]:
    """Where what lies beside these streams is looked for: above their folders."""
    return list(dict.fromkeys(locate(place).parent for place in streams))


def fetched_processor(home: Location) -> Path | None:
    """The copy of this machine of a processor that was published at `home`; None where none was. Unreachable where it is not what
    was published."""
    if not (found := (home / processor.CARD).fetch()):
        return None
    folder = _copy_of(home, found[1])
    if not (folder / processor.CARD).exists():
        card = read_processor_card(home, found[1])
        files = _read(home, card.files if card else [])
        if not card or content_of(files) != card.content:
            raise Unreachable(
                f"{home} does not hold the processor as it was published, so images would become other tokens: {AGAIN}"
            )
        _keep(folder, files, processor.CARD, found[1])
    return folder


def processor_card_of(folder: Path) -> ProcessorCard:
    """Of a copy that `fetched_processor` made."""
    content = (folder / processor.CARD).read_bytes()
    return typed.load(ProcessorFolderCard, content).processor


def _fetched_tokenizer(home: Location, content: bytes) -> Path:
    """Unreachable where it is not the tokenizer that was published there."""
    folder = _copy_of(home, content)
    if not (folder / CARD).exists():
        card = read_card(home, content)
        files = _read(home, card.files if card else [])
        refuse_other(home, files.get("tokenizer.json", b""), card.tokenizer if card else None)
        _keep(folder, files, CARD, content)
    return folder


def _copy_of(home: Location, card: bytes) -> Path:
    """Where this machine keeps what lies there under such a card."""
    return (
        cache_folder() / "fetched" / xxhash.xxh128_hexdigest(home.url.encode() + card) / home.name
    )


def _read(home: Location, names: Sequence[str]) -> dict[str, bytes]:
    return dict(zip(names, together(lambda name: (home / name).read(), names), strict=True))


def _keep(folder: Path, files: Mapping[str, bytes], name: str, card: bytes) -> None:
    """The card is written last."""
    for file, content in files.items():
        keep_in_cache(folder / file, content)
    keep_in_cache(folder / name, card)
