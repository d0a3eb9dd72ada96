"""Full and read-only disks, clocks that jump, files that change while they are read: a sentence, or the right bytes."""

import os
import re
import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zstandard

from mdsmix.convert import unit
from mdsmix.convert.garbage import KEEP_SECONDS, find_garbage
from mdsmix.storage import locate
from tests.converting import Answer, Web, documents, files, mdsmix
from tests.e2e.test_killed import assert_readable
from tests.small_disk import SmallDisk, in_a_process

HASH = re.compile("[0-9a-f]{32,}")
TEXTS = [f"Document {n}: " + "the quick brown fox " * (n % 7) for n in range(24)]


@pytest.fixture
def web(web: Web) -> Web:
    """Units of 600 bytes: a plain file, and a compressed one that is one unit of many windows."""
    web.windows(600)
    plain = web.holds(TEXTS, "data/a.jsonl")
    (web.folder / "data/b.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()[900:]))
    return web.says(documents("data/*"))


@pytest.fixture
def whole(web: Web) -> dict[str, bytes]:
    """What an undisturbed run publishes."""
    return files(web.anew(name="whole").out)


def refused(answer: Answer, sentence: str) -> None:
    (line,) = answer.err.splitlines()
    assert (answer.code, answer.out) == (4, "")
    assert line.startswith("error: ")
    assert sentence in line


@pytest.mark.parametrize("mounted", [True, False])
def test_a_disk_that_is_full_at_any_moment(
    web: Web, whole: dict[str, bytes], tmp_path: Path, mounted: bool
) -> None:
    """One sentence, nothing half; with room again the same command finishes with the same bytes."""
    # One file of each kind, named after what it is and not by its hash; the tokenizer is the largest, and comes first.
    kinds = {HASH.sub("", name): len(content) for name, content in whole.items()}
    sizes = {size for name, size in kinds.items() if not name.startswith("tokenizer-")}
    limits = [*(size - 1 for size in sorted(sizes)[::3]), 1 << 20]
    first = sum(len(content) for name, content in whole.items() if name.startswith("tokenizer-"))

    def fill() -> None:
        refusals = 0
        for number in count(1):
            out = tmp_path / f"{number}"
            if not mounted:
                (ready,) = (tmp_path / "whole").glob("tokenizer-*")
                shutil.copytree(ready, out / ready.name)
            room = first - 48_000 + 40_000 * number if mounted else limits[number - 1]
            disk = SmallDisk(out, room, mounted=mounted)
            command = (f"local={out}", "--workers", number % 2 + 1)
            answer = web.convert(*command)
            assert not [name for name in files(out) if name.endswith((".tmp", "lease"))]
            if answer.code:
                refusals += 1
                refused(answer, disk.refusal)
                if (out / "web/train/index.json").exists():
                    assert_readable(locate(out / "web/train"))
            disk.grow()
            if answer.code:
                again = web.convert(*command)
                assert (again.code, again.err) == (0, ""), "no lease is waited for"
            assert files(out) == whole
            if not answer.code:
                break
        assert refusals > 2

    in_a_process(fill, tmp_path / "report")


def test_an_output_that_is_read_only(web: Web, whole: dict[str, bytes]) -> None:
    """What is up to date is read as ever; what is to be written is refused."""

    def publish_and_refuse() -> None:
        disk = SmallDisk(web.out, 64 << 20)
        assert web.convert().code == 0
        disk.refuse_writes()
        assert "web: up to date" in web.convert().out
        assert mdsmix("verify", web.out / "web").code == 0
        web.holds(TEXTS, "data/c.jsonl")
        refused(web.convert(), "is read-only" if disk.is_mounted else "permission denied")
        assert files(web.out) == whole

    in_a_process(publish_and_refuse, web.folder / "report")


def test_a_cache_that_is_full_costs_a_reading(web: Web, whole: dict[str, bytes]) -> None:
    """What mdsmix remembers of sources and backends is disposable; of the tokenizer it has a snapshot already."""
    known, cache = Path(os.environ["MDSMIX_CACHE"]) / "tokenizers", web.folder / "cache"

    def convert() -> None:
        is_mounted = SmallDisk(cache, 8 << 20).is_mounted
        shutil.copytree(known, cache / "tokenizers")
        if is_mounted:
            with pytest.raises(OSError, match="No space"):
                (cache / "filler").write_bytes(bytes(8 << 20))
        else:
            for name in ("seen", "backends"):
                (cache / name).touch()
        web.patch.setenv("MDSMIX_CACHE", str(cache))
        for _ in range(2):
            answer = web.convert()
            assert (answer.code, answer.err) == (0, "")
            assert files(web.out) == whole
        assert "up to date" in answer.out
        kept = [path for path in (cache / "seen").glob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in kept) == 0

    in_a_process(convert, web.folder / "report")


def test_a_clock_that_jumps_moves_nothing(web: Web, whole: dict[str, bytes]) -> None:
    jumps, now = count(1), time.time()
    web.patch.setattr(time, "time", lambda: now + (-1) ** next(jumps) * 1e9)
    assert 0 <= web.run().seconds < 1e6
    assert files(web.out) == whole
    web.patch.setattr(time, "time", lambda: now - 1e9)
    assert find_garbage(locate(web.train), KEEP_SECONDS) == []


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(packed(path, b'{"text": "a line that came late"}\n'))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    other = path.parent.parent / path.name
    edited(shutil.copy(path, other))
    other.replace(path)


def edited(path: Path) -> None:
    """In place; of the same size where the file is plain."""
    content = path.read_bytes()
    plain = content if path.suffix == ".jsonl" else zstandard.decompress(content)
    with path.open("r+b") as file:
        file.write(packed(path, plain.replace(b"quick", b"QUICK")))
        file.truncate()


def packed(path: Path, content: bytes) -> bytes:
    return content if ".zst" not in path.name else zstandard.compress(content)


@pytest.mark.parametrize(
    ("name", "change"),
    [("a.jsonl", appended), ("a.jsonl", edited), ("b.jsonl.zst", cut), ("b.jsonl.zst", replaced)],
)
def test_what_changes_while_it_is_read_is_never_kept(
    web: Web,
    whole: dict[str, bytes],
    name: str,
    change: Callable[[Path], None],
) -> None:
    """Not even for its first windows, which are finished before the last one is read: the old content may come back."""
    path, really = web.folder / "data" / name, unit.read
    before = path.read_bytes()

    def read_and_change(part: Any, *settings: Any) -> Any:
        for number, batch in enumerate(really(part, *settings)):
            yield batch
            if part.name.endswith(name) and not number:
                change(path)

    with web.patch.context() as patch:
        patch.setattr(unit, "read", read_and_change)
        refused(web.convert(), f"{name} was changed while it was being read")
    assert not (web.train / "index.json").exists()
    path.write_bytes(before)
    web.run()
    assert files(web.out) == whole
