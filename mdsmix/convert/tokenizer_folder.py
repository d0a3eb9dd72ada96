"""The tokenizer's files beside the streams, so that whoever converts or trains on another machine has them.

`tokenizer-<hash8>/` at the root of the mix holds what `AutoTokenizer.from_pretrained` opens to the same tokenizer, and
`mdsmix.tokenizer`, a small card that is written last: a folder with a card is whole. Its name follows from what every manifest
says of its tokenizer, so the manifests tell which folders are needed. It is no part of a stream and no lease guards it: two
runs that write it at once write the same.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from mdsmix.convert.job import Job
from mdsmix.encode.fetched import CARD, FolderCard, read_card, refuse_other
from mdsmix.encode.tokenizer import Tokenizer, cache_folder, keep_in_cache
from mdsmix.errors import Unreachable
from mdsmix.recipe.rules import TOKENIZER_FOLDER
from mdsmix.shards.manifest import TokenizerCard, read_manifest
from mdsmix.storage import Location, locate, together


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFolder:
    """One that is whole."""

    folder: Location
    files: tuple[str, ...]
    "Those that were written, the card not among them."
    bytes: int
    written: float
    "Seconds since 1970."

    def discard(self) -> None:
        """Deletes the card first, so that the next run does not take the remaining files for a whole folder."""
        (self.folder / CARD).delete()
        together(lambda name: (self.folder / name).delete(), self.files)
        self.folder.delete()


def tokenizer_card(job: Job) -> TokenizerCard:
    """What the manifest says of the tokenizer; of a folder's path only the folder's name."""
    card = TokenizerCard.of(job.tokenizer)
    name = card.name.rstrip("/")
    return replace(card, name=name.rsplit("/", 1)[1] if name.startswith("/") else name)


def publish_tokenizer(job: Job) -> None:
    """Makes the folder of the job's tokenizer whole, if it is not: one request where it is."""
    tokenizer, card = job.tokenizer, tokenizer_card(job)
    home = job.root / card.folder_name
    if (home / CARD).stat():
        return
    snapshot = locate(Path(tokenizer.path).parent)
    together(lambda name: (home / name).write((snapshot / name).read()), tokenizer.files)
    (home / CARD).write(orjson.dumps(FolderCard(tokenizer=card, files=tokenizer.files)))


def at_hand(job: Job) -> Tokenizer:
    """The job's tokenizer with a path on this machine. One whose snapshot was taken on another is fetched from the mix's root,
    once; Unreachable where what lies there is not it."""
    tokenizer = job.tokenizer
    if Path(tokenizer.path).is_file():
        return tokenizer
    path = cache_folder() / "tokenizers" / tokenizer.hash / "tokenizer.json"
    if not path.is_file():
        home = job.root / TokenizerCard.of(tokenizer).folder_name
        content = (home / path.name).read()
        refuse_other(home, content, tokenizer)
        keep_in_cache(path, content)
    return replace(tokenizer, path=str(path))


def needless(root: Location, older_than: float) -> list[TokenizerFolder]:
    """Tokenizers at the root of a mix that are at least so many seconds old and that no stream published there names. Where a
    manifest there cannot be read, none is needless, since it may name any."""
    names = filter(TOKENIZER_FOLDER.fullmatch, root.folders())
    found = [home for home in map(_look, map(root.__truediv__, names)) if home]
    old = [home for home in found if time.time() - home.written >= older_than]
    with suppress(Unreachable):
        needed = _named(root) if old else set()
        return [home for home in old if home.folder.name not in needed]
    return []


def _look(home: Location) -> TokenizerFolder | None:
    """None where no card says that mdsmix wrote this folder: anything else of such a name is left alone."""
    found = (home / CARD).fetch()
    card = read_card(home, found[1]) if found else None
    if not found or not card:
        return None
    sizes = {name: stat for name, stat in home.list(recursive=True) if name in (CARD, *card.files)}
    return TokenizerFolder(
        folder=home,
        files=tuple(card.files),
        bytes=sum(stat.size for stat in sizes.values()),
        written=found[0].modified,
    )


def _named(root: Location) -> set[str]:
    """By the manifests of all splits and versions of all streams at the root."""
    streams = [root / name for name in root.folders() if not TOKENIZER_FOLDER.fullmatch(name)]
    splits = together(lambda stream: [stream / name for name in stream.folders()], streams)
    manifests = together(read_manifest, [split for found in splits for split in found])
    return {manifest.tokenizer.folder_name for manifest in manifests if manifest}
