"""The processor of a model that sees, as conversion uses it: which token stands for an image, and how many it becomes.

Conversion imports neither torch nor transformers, so a processor is looked at in a process of its own, as a tokenizer is. What is
found is kept: a card, the processor as transformers saves it, and the number of tokens of each height and width that was asked for.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import xxhash

from mdsmix import typed
from mdsmix.encode.counting import ask
from mdsmix.encode.pretrained import cache_folder, keep_in_cache, snapshot, version
from mdsmix.errors import MdsmixError, Unreachable

CARD = "mdsmix.processor"
"In a folder of one that was published beside the streams, written last."
Size = tuple[int, int]
"Height and width, after the turn that EXIF asks for."


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """What there is to know of one."""

    name: str
    hash: str
    "xxh128 of what shapes its counts and its pixels: class and settings, without the tokenizer."
    class_name: str
    image_token: str
    "What it expands in a text."
    around: list[str]
    "Text that it prints before and after an image, which is tokenized with the text that stands there."
    path: str
    "The folder of the snapshot: the processor as transformers saves it."
    files: list[str]
    "In that folder: what AutoProcessor.from_pretrained opens to this processor."


def snapshot_of(digest: str) -> Path:
    """A folder of this machine from which the processor of that hash is opened; Unreachable where there is none."""
    for pattern in ("processors/*/card.json", f"fetched/*/*/{CARD}"):
        for card in cache_folder().glob(pattern):
            if _hash_in(card) == digest:
                return card.parent
    raise Unreachable(
        f"the processor {digest[:8]} is not in this machine's cache: run `mdsmix convert` with its name in the recipe."
    )


def _hash_in(card: Path) -> str | None:
    with suppress(OSError, ValueError):
        said = orjson.loads(card.read_bytes())
        return str(said.get("processor", said)["hash"])
    return None


@lru_cache(maxsize=8)
def open_processor(name: str, say: Callable[[str], None] | None = None) -> Processor:
    """The processor in a folder, or of a hub's name; looked at now if it never was, which `say` hears. Unreachable where it cannot be."""
    folder, said = snapshot("processor", name, {}, say)
    return typed.read(Processor, said | {"name": name, "path": str(folder)}, str(folder))


@dataclass(slots=True)
class SizeCounts:
    """How many tokens an image becomes, by its size. What is not known is asked of a process that a run shares, and kept: sizes that
    any run has seen are known on this machine."""

    digest: str
    "Of the processor."
    _known: dict[Size, int | str] = field(default_factory=dict)

    def of(self, sizes: Iterable[Size]) -> dict[Size, int | str]:
        """Tokens of each size, or why the processor refuses an image of it."""
        wanted = set(sizes)
        if not wanted <= self._known.keys():
            self._known |= self._kept()
        if missing := sorted(wanted - self._known.keys()):
            self._known |= zip(missing, self._asked(missing), strict=True)
            self._keep()
        return {size: self._known[size] for size in wanted}

    @property
    def _path(self) -> Path:
        return cache_folder() / "processors" / f"{self.digest}.counts"

    def _kept(self) -> dict[Size, int]:
        with suppress(OSError, ValueError):
            return {(h, w): n for h, w, n in orjson.loads(self._path.read_bytes())}
        return {}

    def _keep(self) -> None:
        known = self._kept() | {size: n for size, n in self._known.items() if isinstance(n, int)}
        with suppress(Unreachable):  # all that is lost is a question
            keep_in_cache(self._path, orjson.dumps([[*size, n] for size, n in known.items()]))

    def _asked(self, sizes: list[Size]) -> list[int | str]:
        return _answer(snapshot_of(self.digest), {"sizes": sizes})


MANY = ("two images", "several rows")
"What the names of rows begin with that have more than one image."


class StoredRow(NamedTuple):
    """A row of a stream of images, by which a processor is tried."""

    name: str
    "What it is, for the sentence of a refusal."
    ids: Sequence[int]
    "One token for each image."
    images: Sequence[bytes]


class Inequality(NamedTuple):
    """Where a batch is another than what transformers makes of the whole text."""

    family: str
    "Class of the processor."
    row: str
    key: str
    whole: str
    loaded: str

    def __str__(self) -> str:
        return (
            f"of {self.row} {self.family} makes {self.key} {self.whole} where it is given the whole text, and the loader would make "
            f"{self.loaded} of the stored row"
        )

    @property
    def way_out(self) -> str:
        if self.row.startswith(MANY):
            return "set images.max_images: 1, since rows with one image are equal, or name the processor of another model"
        return "name the processor of another model (docs/images.md lists those that are equal)"


def first_inequality(folder: Path, rows: Sequence[StoredRow]) -> Inequality | None:
    """The first in batches of these rows; None where they are equal, which this machine then remembers of each row. `folder`: of the
    processor's snapshot with its own tokenizer, which its hash does not tell."""
    marks = {_mark_of_equal(folder, row): row for row in rows}
    left = [row for mark, row in marks.items() if not mark.exists()]
    shown = [(name, ids, [b64encode(i).decode() for i in images]) for name, ids, images in left]
    for difference in _answer(folder, {"rows": shown}) if left else ():
        return Inequality(*difference)
    with suppress(Unreachable):  # all that is lost is a question
        for mark in marks:
            keep_in_cache(mark, b"")
    return None


def _mark_of_equal(folder: Path, row: StoredRow) -> Path:
    key = xxhash.xxh128(orjson.dumps([str(folder), version("transformers"), list(row.ids)]))
    for image in row.images:
        key.update(f"{len(image)} ")
        key.update(image)
    return cache_folder() / "processors" / "equal" / key.hexdigest()


def _answer(folder: Path, question: dict[str, Any]) -> list[Any]:
    answer = ask(folder, question)
    if not isinstance(answer, list):
        raise MdsmixError(
            f"the processor fails ({answer['error']}): name another, or leave processor out."
        )
    return answer
