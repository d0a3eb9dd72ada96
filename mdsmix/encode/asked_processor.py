"""What conversion asks of a processor of transformers: how many tokens an image becomes, and whether rows put together by a loader are those
that the processor makes of whole texts.

Conversion imports neither torch nor transformers, so a process of its own answers (`processor_server`), and answers are kept on this machine.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import xxhash

from mdsmix.encode.pretrained import cache_folder, keep_in_cache, snapshot_of, version
from mdsmix.encode.processor_server import ask
from mdsmix.errors import MdsmixError, Unreachable

Size = tuple[int, int]
"Height and width, after the turn that EXIF asks for."
MANY = ("two images", "several rows")
"What the names of rows begin with that have more than one image."


@dataclass(slots=True)
class SizeCounts:
    """How many tokens an image becomes, by its size: sizes that any run has seen are known on this machine."""

    digest: str
    "Of the processor."
    _known: dict[Size, int | str] = field(default_factory=dict)

    def of(self, sizes: Iterable[Size]) -> dict[Size, int | str]:
        """Tokens of each size, or why the processor refuses an image of it."""
        wanted = set(sizes)
        if not wanted <= self._known.keys():
            self._known |= self._kept()
        if missing := sorted(wanted - self._known.keys()):
            answers = _answer(snapshot_of(self.digest), {"sizes": missing})
            self._known |= zip(missing, answers, strict=True)
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
    what: str
    "The key of the batch, and how the values differ."

    def __str__(self) -> str:
        return (
            f"of {self.row} {self.family} makes {self.what} where it is given the whole text, and the loader would make other of the "
            "stored row"
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
