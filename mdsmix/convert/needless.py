"""Folders of tokenizers and processors beside the streams that no stream names any more."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from mdsmix.encode import fetched, processor
from mdsmix.errors import Unreachable
from mdsmix.recipe.rules import TOKENIZER_FOLDER, is_folder_beside
from mdsmix.shards.manifest import read_manifest
from mdsmix.storage import Location, together


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFolder:
    """One that is whole."""

    folder: Location
    card: str
    "The file that says so."
    files: tuple[str, ...]
    "Those that were written, the card not among them."
    bytes: int
    written: float
    "Seconds since 1970."

    @property
    def kind(self) -> str:
        return "tokenizer" if self.card == fetched.CARD else "processor"

    def discard(self) -> None:
        """Deletes the card first, so that the next run does not take the remaining files for a whole folder."""
        (self.folder / self.card).delete()
        together(lambda name: (self.folder / name).delete(), self.files)
        self.folder.delete()


def needless(root: Location, older_than: float) -> list[KeptFolder]:
    """Tokenizers and processors at the root of a mix that are at least so many seconds old and that no stream published there names.
    Where a manifest there cannot be read, none is needless, since it may name any."""
    names = filter(is_folder_beside, root.folders())
    found = [home for home in map(_look, map(root.__truediv__, names)) if home]
    old = [home for home in found if time.time() - home.written >= older_than]
    with suppress(Unreachable):
        needed = _named(root) if old else set()
        return [home for home in old if home.folder.name not in needed]
    return []


def _look(home: Location) -> KeptFolder | None:
    """None where no card says that mdsmix wrote this folder: anything else of such a name is left alone."""
    holds_tokenizer = TOKENIZER_FOLDER.fullmatch(home.name)
    name = fetched.CARD if holds_tokenizer else processor.CARD
    read = fetched.read_card if holds_tokenizer else fetched.read_processor_card
    found = (home / name).fetch()
    card = read(home, found[1]) if found else None
    if not found or not card:
        return None
    sizes = {file: stat for file, stat in home.list(recursive=True) if file in (name, *card.files)}
    return KeptFolder(
        folder=home,
        card=name,
        files=tuple(card.files),
        bytes=sum(stat.size for stat in sizes.values()),
        written=found[0].modified,
    )


def _named(root: Location) -> set[str]:
    """By the manifests of all splits and versions of all streams at the root."""
    streams = [root / name for name in root.folders() if not is_folder_beside(name)]
    splits = together(lambda stream: [stream / name for name in stream.folders()], streams)
    manifests = together(read_manifest, [split for found in splits for split in found])
    tokenizers = {manifest.tokenizer.folder_name for manifest in manifests if manifest}
    return tokenizers | {m.processor_folder for m in manifests if m and m.processor_folder}
