"""The corpora of the benchmarks, of any size: seeded text of the Python standard library, and a
tokenizer trained on it.

The library has about 50,000 different words, and a tokenizer has cached them all after the first
100 MB. Its word cache would never miss again, unlike on text of the web. So one word in a hundred
is a new one, made of syllables.
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
    """Train a byte-level BPE with GPT-2's regex and a realistic number of ids, unless it exists.
    Return its folder, which AutoTokenizer opens.
    """
    folder = work / "tokenizer"
    if not folder.exists():
        train_tokenizer(work / "tokenizer.part", VOCABULARY, documents_n=1_000_000)
        (work / "tokenizer.part").rename(folder)
    return folder


def source(work: Path, kind: str, size: int, files: int = 1) -> Path:
    """Return a folder with about `size` bytes of JSONL in `files` files. Write it if needed."""
    folder = work / "sources" / f"{kind}-{size}-{files}"
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write = _WRITERS.get(kind) or functools.partial(words.documents, work, kind)
        for number in range(files):
            write(unfinished / f"{number}.jsonl", size // files, number)
        unfinished.rename(folder)
    return folder


def head(work: Path, whole: Path, size: int = 1 << 15) -> Path:
    """Write the first `size` bytes of records of every file: so few that a tool only starts up."""
    folder = work / "sources" / f"{whole.name}-head"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in whole.glob("*.jsonl"):
        with path.open("rb") as lines:
            (folder / path.name).write_bytes(b"".join(lines.readlines(size)))
    return folder


def as_they_are(work: Path, folder: Path) -> Path:
    """Return the folder of JSONL unchanged."""
    return folder


def texts(work: Path, folder: Path) -> Path:
    """Write each document to a .txt file, for the converter that reads only these."""
    output = work / "sources" / f"{folder.name}-txt"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.open("rb")):
            (output / f"{path.stem}-{number:06}.txt").write_text(
                orjson.loads(line)["text"], newline=""
            )
    return output


def parquet(work: Path, folder: Path) -> Path:
    """Write the same documents, one .parquet for each file."""
    output = work / "sources" / f"{folder.name}-parquet"
    if not output.exists():
        output.mkdir(parents=True)
        for path in folder.glob("*.jsonl"):
            write_parquet(path, output / f"{path.stem}.parquet")
    return output


def write_parquet(path: Path, output: Path, rows: int = 10_000) -> None:
    """Write the records of a JSONL file to parquet, with `rows` records in a row group."""
    with path.open("rb") as lines:
        writer: pq.ParquetWriter | None = None
        while records := [orjson.loads(line) for line in islice(lines, rows)]:
            table = pa.Table.from_pylist(records)
            writer = writer or pq.ParquetWriter(output, table.schema)
            writer.write_table(table)
        if writer:
            writer.close()


def documents(path: Path, size: int, seed: int) -> None:
    """Write documents of the library's text. Each begins with ten new words: one in a hundred."""
    plain = path.with_suffix(".plain")
    words.big_documents(plain, size, seed)
    new = _new_words(np.random.default_rng(seed))
    with plain.open("rb") as lines, path.open("wb") as file:
        while block := lines.read(BLOCK):
            first, *documents = (block + lines.readline()).split(b'{"text":"')
            file.write(first)
            for document in documents:
                file.write(b'{"text":"' + b" ".join(islice(new, 10)) + b"\\n" + document)
    plain.unlink()


def pairs(path: Path, size: int, seed: int) -> None:
    """Write prompts of 1-12 lines and responses of 4-40."""
    prose = _Prose(seed)
    with path.open("wb", buffering=1 << 20) as file:
        while file.tell() < size:
            file.write(
                b'{"prompt":"%b","response":"%b"}\n' % (prose.text(1, 12), prose.text(4, 40))
            )


def chats(path: Path, size: int, seed: int) -> None:
    """Write chats of one to four exchanges; a third begin with a system message."""
    prose = _Prose(seed)
    with path.open("wb", buffering=1 << 20) as file:
        while file.tell() < size:
            file.write(b'{"messages":[' + b",".join(prose.messages()) + b"]}\n")


class _Prose:
    """Passages of the library's docstrings, cut at random lines, with new words in them."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._lines, self._starts = _prose_lines()
        self._new = _new_words(self._rng)
        self._numbers = self._drawn()

    def text(self, lowest: int, highest: int) -> bytes:
        """Return the inside of a JSON string, of `lowest` lines or more and fewer than `highest`;
        about one word in a hundred is new.
        """
        lines = lowest + next(self._numbers) % (highest - lowest)
        first = next(self._numbers) % (len(self._starts) - highest)
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
    """Return every docstring line as the inside of a JSON string, with its end of line, joined;
    and the offset of each.
    """
    docstring_lines = (line for record in docstrings() for line in record["text"].splitlines())
    lines = [orjson.dumps(line + "\n")[1:-1] for line in docstring_lines if line.strip()]
    return b"".join(lines), np.cumsum([0, *map(len, lines)]).tolist()


def _new_words(rng: np.random.Generator) -> Iterator[bytes]:
    """Yield words of two to four syllables; hardly any is repeated."""
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
