"""The processor of a model that sees, as conversion uses it: which token stands for an image, and how many it becomes.

Conversion imports neither torch nor transformers, so a processor is looked at in a process of its own, as a tokenizer is. What is
found is kept: a card, the processor as transformers saves it, and the number of tokens of each height and width that was asked for.
"""

from __future__ import annotations

import json
import subprocess
import sys
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
from mdsmix.encode.tokenizer import cache_folder, files_of, is_lost, keep_in_cache, version
from mdsmix.errors import MdsmixError, Unreachable
from mdsmix.recipe import TokenizerSpec

FORMAT = 3
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
    counts_by: str
    "`function`: its own function tells the tokens of a size; `learned`: a blank image of that size is put through it."
    path: str
    "The folder of the snapshot: the processor as transformers saves it."
    files: list[str]
    "In that folder: what AutoProcessor.from_pretrained opens to this processor."


def snapshot_of(digest: str) -> Path:
    """A folder of this machine from which the processor of that hash is opened; Unreachable where there is none."""
    cards = cache_folder().glob("processors/*.json")
    found = [card.with_suffix("") for card in cards if _hash_in(card) == digest]
    published = cache_folder().glob(f"fetched/*/*/{CARD}")
    found += [card.parent for card in published if _hash_in(card) == digest]
    if folder := next((folder for folder in found if folder.is_dir()), None):
        return folder
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
    folder = cache_folder() / "processors" / _key(name)
    if not _card(folder).exists():
        if say:
            say(f"looking at the processor {name} with transformers, once: some seconds")
        answer = _ask(name)
        folder = cache_folder() / "processors" / _key(name)  # a hub name has a commit now
        for file, text in answer["files"].items():
            keep_in_cache(folder / file, text.encode())
        keep_in_cache(_card(folder), orjson.dumps(answer | {"files": sorted(answer["files"])}))
    said = json.loads(_card(folder).read_bytes()) | {"name": name, "path": str(folder)}
    return typed.read(Processor, said, str(_card(folder)))


def _card(folder: Path) -> Path:
    """Beside the snapshot and written last: one with a card is whole."""
    return folder.with_suffix(".json")


def _key(name: str) -> str:
    digest = xxhash.xxh128(orjson.dumps([FORMAT, name, version("transformers")]))
    for file, content in files_of(TokenizerSpec(name=name)):
        digest.update(orjson.dumps([file, len(content)]))
        digest.update(content)
    return digest.hexdigest()


def _ask(name: str) -> dict[str, Any]:
    if is_lost(name):
        raise Unreachable(
            f"the processor {name} could not be loaded: there is no such folder; correct the path (in a recipe it is relative to the "
            "recipe's folder), or give the name of a hub's repository."
        )
    done = subprocess.run(
        [sys.executable, "-m", "mdsmix.encode.processor_process"],
        input=json.dumps(name),
        capture_output=True,
        text=True,
    )
    return _read_answer(name, done.returncode, done.stdout, done.stderr)


def _read_answer(name: str, code: int, out: str, err: str) -> dict[str, Any]:
    lines = out.strip().splitlines()
    answer = json.loads(lines[-1]) if code == 0 and lines else {"error": err}
    if "error" in answer:
        reason = " ".join(str(answer["error"]).split())[-300:].rstrip(".")
        raise Unreachable(
            f"the processor {name} could not be loaded ({reason}): name a folder with a preprocessor_config.json and a tokenizer, or a "
            "hub name that this machine can reach, where torch and torchvision are installed."
        )
    return dict(answer)


@dataclass(slots=True)
class Counter:
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
        return _answer(self.digest, {"sizes": sizes})


MANY = ("two images", "several rows")
"What the names of rows begin with that have more than one image."


class StoredRow(NamedTuple):
    """A row of a stream of images, by which a processor is tried."""

    name: str
    "What it is, for the sentence of a refusal."
    ids: Sequence[int]
    "One token for each image."
    images: Sequence[bytes]


class Difference(NamedTuple):
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


def first_difference(digest: str, rows: Sequence[StoredRow]) -> Difference | None:
    """The first in batches of these rows; None where they are equal, which this machine then remembers of each row."""
    marks = {_mark_of_equal(digest, row): row for row in rows}
    left = [row for mark, row in marks.items() if not mark.exists()]
    shown = [(name, ids, [b64encode(i).decode() for i in images]) for name, ids, images in left]
    for difference in _answer(digest, {"rows": shown}) if left else ():
        return Difference(*difference)
    with suppress(Unreachable):  # all that is lost is a question
        for mark in marks:
            keep_in_cache(mark, b"")
    return None


def _mark_of_equal(digest: str, row: StoredRow) -> Path:
    key = xxhash.xxh128(orjson.dumps([FORMAT, version("transformers"), list(row.ids)]))
    for image in row.images:
        key.update(f"{len(image)} ")
        key.update(image)
    return cache_folder() / "processors" / f"{digest}.equal" / key.hexdigest()


def _answer(digest: str, question: dict[str, Any]) -> list[Any]:
    answer = ask(digest, snapshot_of(digest), question)
    if not isinstance(answer, list):
        raise MdsmixError(
            f"the processor fails ({answer['error']}): name another, or leave processor out."
        )
    return answer
