"""The corpora of the bench: text of the Python standard library, seeded, of any size, and a
tokenizer trained on it.

That library has about 50,000 different words, and a tokenizer remembers them all after the first
100 MB: its word cache would never miss again, as it does on text of the web. So one word in a
hundred is made of syllables and new.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import words
from tests.corpus import docstrings, train_tokenizer

VOCABULARY = 32_768
BLOCK = 8 << 20
_ONSETS = [*"bcdfghklmnprstvwz", "st", "tr", "pl", "br", "ch", "sh"]
_RIMES = [
    *"aeiou",
    "ai",
    "ou",
    "er",
    "an",
    "on",
    "in",
    "el",
    "ar",
    "or",
    "ing",
    "at",
    "ed",
    "is",
    "um",
]
SYLLABLES = [onset + rime for onset in _ONSETS for rime in _RIMES]


def tokenizer(work: Path) -> Path:
    """A byte-level BPE with GPT-2's regex, of a realistic number of ids, as a folder for
    AutoTokenizer.
    """
    folder = work / "tokenizer"
    if not folder.exists():
        train_tokenizer(work / "tokenizer.part", VOCABULARY, documents_n=1_000_000)
        (work / "tokenizer.part").rename(folder)
    return folder


def source(work: Path, kind: str, size: int, files: int = 1) -> Path:
    """A folder with about `size` bytes of JSONL in so many files."""
    folder = work / "sources" / f"{kind}-{size}-{files}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write = _WRITERS.get(kind) or functools.partial(words.documents, work, kind)
        for number in range(files):
            write(part / f"{number}.jsonl", size // files, number)
        part.rename(folder)
    return folder


def head(work: Path, whole: Path, size: int = 1 << 15) -> Path:
    """The first records of every file, up to so many bytes: on this, a tool only starts."""
    folder = work / "sources" / f"{whole.name}-head"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in whole.glob("*.jsonl"):
        with path.open("rb") as lines:
            (folder / path.name).write_bytes(b"".join(lines.readlines(size)))
    return folder


def as_they_are(work: Path, folder: Path) -> Path:
    """The files of JSONL themselves."""
    return folder


def texts(work: Path, folder: Path) -> Path:
    """The same documents, one .txt each, for the converter that reads only these."""
    out = work / "sources" / f"{folder.name}-txt"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.open("rb")):
            (out / f"{path.stem}-{number:06}.txt").write_text(
                orjson.loads(line)["text"], newline=""
            )
    return out


def parquet(work: Path, folder: Path) -> Path:
    """The same documents, one .parquet for each file."""
    out = work / "sources" / f"{folder.name}-parquet"
    if not out.exists():
        out.mkdir(parents=True)
        for path in folder.glob("*.jsonl"):
            write_parquet(path, out / f"{path.stem}.parquet")
    return out


def write_parquet(path: Path, out: Path, rows: int = 10_000) -> None:
    """The records of a JSONL file, with row groups of so many."""
    with path.open("rb") as lines:
        writer: pq.ParquetWriter | None = None
        while records := [orjson.loads(line) for line in islice(lines, rows)]:
            table = pa.Table.from_pylist(records)
            writer = writer or pq.ParquetWriter(out, table.schema)
            writer.write_table(table)
        if writer:
            writer.close()


def documents(path: Path, size: int, seed: int) -> None:
    """Documents of the library's text, each opened by ten new words: one in a hundred."""
    plain = path.with_suffix(".plain")
    words.big_documents(plain, size, seed)
    new = _new_words(np.random.default_rng(seed))
    with plain.open("rb") as lines, path.open("wb") as out:
        while block := lines.read(BLOCK):
            first, *rest = (block + lines.readline()).split(b'{"text":"')
            out.write(first)
            for document in rest:
                out.write(b'{"text":"' + b" ".join(islice(new, 10)) + b"\\n" + document)
    plain.unlink()


def pairs(path: Path, size: int, seed: int) -> None:
    """Prompts of 1-12 lines and responses of 4-40."""
    prose = _Prose(seed)
    with path.open("wb", buffering=1 << 20) as out:
        while out.tell() < size:
            out.write(b'{"prompt":"%b","response":"%b"}\n' % (prose.text(1, 12), prose.text(4, 40)))


def chats(path: Path, size: int, seed: int) -> None:
    """One to four exchanges, a third of them after a system message."""
    prose = _Prose(seed)
    with path.open("wb", buffering=1 << 20) as out:
        while out.tell() < size:
            out.write(b'{"messages":[' + b",".join(prose.messages()) + b"]}\n")


class _Prose:
    """Passages of the library's docstrings, cut at random lines, with new words in them."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._lines, self._starts = _prose_lines()
        self._new = _new_words(self._rng)
        self._numbers = self._drawn()

    def text(self, least: int, most: int) -> bytes:
        """The inside of a JSON string of least to most lines; about one word in a hundred
        is new.
        """
        lines = least + next(self._numbers) % (most - least)
        first = next(self._numbers) % (len(self._starts) - most)
        passage = self._lines[self._starts[first] : self._starts[first + lines]]
        count = (len(passage) + next(self._numbers) % 600) // 600
        return b"%b %b" % (b" ".join(islice(self._new, count)) or b"So", passage)

    def messages(self) -> Iterator[bytes]:
        if next(self._numbers) % 3 == 0:
            yield _message(b"system", self.text(1, 4))
        for _ in range(1 + next(self._numbers) % 4):
            yield _message(b"user", self.text(1, 6))
            yield _message(b"assistant", self.text(3, 24))

    def _drawn(self) -> Iterator[int]:
        while True:
            yield from self._rng.integers(0, 1 << 40, 100_000).tolist()


def _message(role: bytes, content: bytes) -> bytes:
    return b'{"role":"%b","content":"%b"}' % (role, content)


@functools.cache
def _prose_lines() -> tuple[bytes, list[int]]:
    """Every docstring line as the inside of a JSON string, its end of line included, and where each
    starts.
    """
    found = (line for record in docstrings() for line in record["text"].splitlines())
    lines = [orjson.dumps(line + "\n")[1:-1] for line in found if line.strip()]
    return b"".join(lines), np.cumsum([0, *map(len, lines)]).tolist()


def _new_words(rng: np.random.Generator) -> Iterator[bytes]:
    """Words of two to four syllables, of which hardly one comes twice."""
    syllables = [syllable.encode() for syllable in SYLLABLES]
    while True:
        counts = rng.integers(2, 5, 20_000).tolist()
        drawn = iter(rng.integers(0, len(syllables), sum(counts)).tolist())
        for count in counts:
            yield b"".join([syllables[number] for number in islice(drawn, count)])


_WRITERS: dict[str, Callable[[Path, int, int], None]] = {
    "documents": documents,
    "pairs": pairs,
    "chats": chats,
}
