"""Every line of a file is owned by exactly one unit and window, and every record knows its line."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.sources import (
    Origin,
    RecordBatch,
    Unit,
    find,
    format,
    jsonl,
    plan,
    read,
    record_batches,
)
from mdsmix.sources.jsonl import decode_lines
from mdsmix.sources.units import BLOCK_BYTES

FUZZ = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LINE = st.one_of(
    st.integers().map(lambda n: str(n % 10**6).encode()),
    st.sampled_from(
        [b"", b" \t", b"\r", b'{"a":1},{"a":2}', b"[1", b'"\xff"', b'"\\ud800"', b"\0"]
    ),
    st.text(max_size=9).map(lambda text: json.dumps(text).encode() + b"\r"),
    st.binary(max_size=5),
)
CONTENT = st.tuples(
    st.booleans(),
    st.lists(LINE, max_size=30),
    st.booleans(),
    st.sampled_from(["", ".gz", ".zst", ".bz2", ".xz"]),
)
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def units_of(folder: Path, window_bytes: int = BLOCK_BYTES) -> list[Unit]:
    return plan(find(["*.jsonl*"], folder), window_bytes)


def read_all(units: list[Unit]) -> list[RecordBatch]:
    return [batch for unit in units for batch in read(unit)]


def origins(batch: RecordBatch) -> list[Origin]:
    return [batch.origin(i) for i in range(len(batch.records))]


@FUZZ
@given(CONTENT, st.integers(1, 60), st.integers(1, 40))
@example((False, [b"[", b"[ {", b"[1"], False, ""), 1, 1)
def test_units_of_any_window_read_what_one_pass_over_the_file_finds(
    tmp_path: Path, content: tuple[bool, list[bytes], bool, str], window: int, piece: int
) -> None:
    mark, texts, ended, packing = content
    mark = mark and min(window, piece) > 2  # the mark is looked for in the first piece
    data = b"\xef\xbb\xbf" * mark + b"\n".join(texts) + b"\n" * ended
    (tmp_path / f"x.jsonl{packing}").write_bytes(PACK[packing](data))
    try:
        with (
            patch.object(jsonl, "PIECE_BYTES", piece),
            patch.object(record_batches, "BLOCK_BYTES", 25),
        ):
            units = units_of(tmp_path, window)
            read_batches = [(unit, batch) for unit in units for batch in read(unit)]
    finally:
        (tmp_path / f"x.jsonl{packing}").unlink()
    seen = {}
    lines_before = dict.fromkeys({unit.start for unit in units}, 0)
    for unit in units:
        owned = sum(batch.count for other, batch in read_batches if other is unit)
        for later in [start for start in lines_before if start > unit.start]:
            lines_before[later] += owned
    for unit, batch in read_batches:
        good = zip(origins(batch), batch.records, strict=True)
        bad = ((wrong.origin, wrong.reason) for wrong in batch.bad)
        for origin, outcome in itertools.chain(good, bad):
            assert data[origin.ordinal : origin.ordinal + origin.length] == origin.raw
            line = origin.place["line"] + lines_before[unit.start]
            assert data.count(b"\n", 0, origin.ordinal) + 1 == line
            assert (origin.ordinal - unit.start) // window == batch.window
            assert origin.ordinal not in seen
            seen[origin.ordinal] = outcome
    assert list(seen) == sorted(seen) or any(any(batch.bad) for _, batch in read_batches)
    assert [seen[offset] for offset in sorted(seen)] == one_by_one(data)


def one_by_one(data: bytes) -> list[object]:
    """Each line decoded alone, by the standard library."""
    found: list[object] = []
    for text in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if text.strip(b" \t\r"):
            found.append(decode_alone(text))
    return found


def decode_alone(text: bytes) -> object:
    try:
        value = json.loads(text.decode(), parse_constant=float.fromhex)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        return "invalid_utf8"
    except UnicodeEncodeError:
        return "lone_surrogate"
    except ValueError:
        opens = text.split()[:2]  # a line that opens an array, of objects or of what follows
        is_array = opens == [b"["] or b"".join(opens).startswith(b"[{")
        return "json_array" if is_array else "not_json"
    return value


@FUZZ
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=8), st.integers(61, 200))
def test_a_unit_of_many_files_is_those_files_one_after_another(
    tmp_path: Path, contents: list[bytes], window: int
) -> None:
    for old in tmp_path.iterdir():
        old.unlink()
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.jsonl").write_bytes(content)
    together = read_all(units_of(tmp_path, window))
    alone = [
        batch
        for i in range(len(contents))
        for batch in read_all(plan(find([f"{i}.jsonl"], tmp_path)))
    ]
    assert [r for b in together for r in b.records] == [r for b in alone for r in b.records]
    assert [w.origin.raw for b in together for w in b.bad] == [
        w.origin.raw for b in alone for w in b.bad
    ]
    assert sum(b.count for b in together) == sum(b.count for b in alone)


REASONS = {
    b"{": "not_json",
    b"NaN": "not_json",
    b"\xef\xbb\xbf1": "not_json",
    b'{"a":1},{"a":2}': "not_json",
    b'"\xed\xa0\x80"': "invalid_utf8",
    b'{"a":"\xff"}': "invalid_utf8",
    b'"\\ud800"': "lone_surrogate",
    b'"\\udc00 \\ud83d\\u0041"': "lone_surrogate",
    b"[" * 5000 + b"]" * 5000: "too_deep",
}


@pytest.mark.parametrize("bad", REASONS, ids=lambda bad: repr(bad[:20]))
def test_a_bad_line_is_named_and_costs_its_neighbours_nothing(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n\n" + bad + b"\n2")
    [batch] = read_all(units_of(tmp_path))
    assert batch.records == [1, 2]
    origin = Origin("x.jsonl", 3, {"line": 3, "offset": 3}, len(bad), bad)
    assert [(b.reason, b.origin) for b in batch.bad] == [(REASONS[bad], origin)]
    assert batch.origin(1).place["line"] == 4


@FUZZ
@given(st.lists(LINE, max_size=12))
def test_lines_that_are_read_together_are_each_what_they_are_alone(block: list[bytes]) -> None:
    (records, faults), alone = decode_lines(block), [decode_lines([line]) for line in block]
    assert records == [record for each, _ in alone for record in each]
    assert faults == {n: each[0] for n, (_, each) in enumerate(alone) if each}


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 99])
def test_a_limit_counts_records_good_and_bad_but_not_blank_lines(
    tmp_path: Path, limit: int
) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n\n2\n{\n\n4\n")
    [unit] = units_of(tmp_path)
    found = list(read(unit, limit))
    records = [record for batch in found for record in batch.records]
    assert records == [r for r in (1, 2, None, 4)[:limit] if r]
    assert sum(len(list(batch.bad)) for batch in found) == (limit > 2)


def test_a_batch_is_8_mb_or_one_record(tmp_path: Path) -> None:
    megabytes = [b'"%s"' % (b"x" * (n << 20)) for n in (1, 1, 3, 20, 1, 9, 2)]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join([*megabytes, *[b'"short"'] * 1_000_000]))
    sizes = [(len(batch.records), batch.size) for batch in read_all(units_of(tmp_path, 1 << 30))]
    assert all(size <= 8 << 20 or records == 1 for records, size in sizes)
    assert sum(records for records, _ in sizes) == 1_000_007
    assert len(sizes) <= 10


def test_a_line_above_the_cap_is_set_aside_by_place_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format, "LONGEST", 1000)
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 300)
    (tmp_path / "x.jsonl").write_bytes(b'1\n"%s"\n2\n"%s"' % (b"x" * 5000, b"y" * 2000))
    found = read_all(units_of(tmp_path))
    assert [record for batch in found for record in batch.records] == [1, 2]
    expected = [(2, 2, 5002), (4, 5007, 2002)]
    bad = [wrong for batch in found for wrong in batch.bad]
    assert [(*b.origin.place.values(), b.origin.length) for b in bad] == expected
    assert {(b.reason, b.origin.raw) for b in bad} == {("line_too_long", b"")}


def members(packing: str) -> list[bytes]:
    return [PACK[packing](b"%d\n" % n * 1000) for n in (1, 22, 333)]


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_members_and_frames_are_read_on_and_zero_padding_is_none(
    tmp_path: Path, packing: str
) -> None:
    (tmp_path / f"x.JSONL{packing.upper()}").write_bytes(b"".join(members(packing)) + b"\0" * 512)
    [unit] = plan(find(["*"], tmp_path))
    [batch] = read(unit)
    assert batch.records == [1] * 1000 + [22] * 1000 + [333] * 1000


def damaged(packing: str) -> Iterator[bytes]:
    whole = b"".join(members(packing))
    yield whole[:-1]
    yield whole[:-10]
    yield whole[: len(members(packing)[0]) + 3]
    yield whole + b"garbage"
    yield whole[:30] + b"\xff\xff" + whole[32:]
    yield b"not compressed at all\n"


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("case", range(6))
def test_a_damaged_file_is_refused_by_name_and_place(
    tmp_path: Path, packing: str, case: int
) -> None:
    (tmp_path / f"x.jsonl{packing}").write_bytes(list(damaged(packing))[case])
    with pytest.raises(Unreachable, match=rf"x\.jsonl{packing} is damaged after \d+ uncompressed"):
        read_all(units_of(tmp_path))


def test_a_file_that_expands_a_thousandfold_streams_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format, "LONGEST", 16 << 20)
    bomb = zstandard.ZstdCompressor().compressobj()
    packed = b"".join(bomb.compress(b"0" * (1 << 20)) for _ in range(100)) + bomb.flush()
    assert len(packed) < 100_000
    (tmp_path / "x.jsonl.zst").write_bytes(packed)
    [unit] = units_of(tmp_path)
    [batch] = read(unit)
    assert [(bad.reason, bad.origin.length) for bad in batch.bad] == [("line_too_long", 100 << 20)]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"1\n2\n")
    [unit] = units_of(tmp_path)
    (tmp_path / "x.jsonl").write_bytes(b"1\n2\n3\n")
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        list(read(unit))


@pytest.mark.parametrize("change", ["touched", "cut", "gone"])
def test_no_window_is_handed_out_of_a_file_that_has_changed_since(
    tmp_path: Path, change: str
) -> None:
    """A window is published under the key of the file that was planned, so the end of the file is too late to look."""
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"123456789\n" * 50))
    windows = read(*units_of(tmp_path, window_bytes=100))
    assert next(windows).window == 0
    if change == "touched":
        os.utime(path, ns=(0, 0))
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        path.unlink()
    with pytest.raises(Unreachable, match="was changed while it was being read"):
        next(windows)


def seconds_to_place(folder: Path, between: bytes, records: int) -> float:
    """Processor time to say of every record where it stands, with such a line between each two."""
    (folder / "x.jsonl").write_bytes((b"1\n" + between + b"\n") * records)
    [batch] = read_all(units_of(folder))
    before = time.process_time()
    found = origins(batch)
    assert [origin.ordinal for origin in found] == [n * (len(between) + 3) for n in range(records)]
    return time.process_time() - before


@pytest.mark.parametrize("between", [b"", b"{"], ids=["blank lines", "bad lines"])
def test_the_place_of_a_record_takes_as_long_in_a_block_of_many_bad_lines(
    tmp_path: Path, between: bytes
) -> None:
    """Eight times the records take eight times as long; walking the lines before each would take 64 times."""
    ratios = (
        seconds_to_place(tmp_path, between, 8_000) / seconds_to_place(tmp_path, between, 1_000)
        for _ in range(5)
    )
    assert any(ratio < 24 for ratio in ratios)


def test_the_place_of_a_record_takes_as_long_in_a_batch_of_many_files(tmp_path: Path) -> None:
    for n in range(300):
        (tmp_path / f"{n:03}.jsonl").write_bytes(b"\n" if n % 3 else b"\n1\n2\n")
    [batch] = read_all(units_of(tmp_path))
    placed = [(origin.file, origin.place["line"]) for origin in origins(batch)]
    assert placed == [(f"{n:03}.jsonl", line) for n in range(0, 300, 3) for line in (2, 3)]


@pytest.mark.parametrize("line", [b"", b" \t\r", b"{"])
def test_a_block_of_only_such_lines_takes_as_long_as_it_is(tmp_path: Path, line: bytes) -> None:
    def seconds(lines: int) -> float:
        began = time.process_time()
        _, faults = decode_lines([line] * lines)
        assert faults == dict.fromkeys(range(lines), "not_json" if line == b"{" else format.BLANK)
        return time.process_time() - began

    assert any(seconds(80_000) / seconds(10_000) < 24 for _ in range(5))


def long_frame(text: bytes, log: int) -> bytes:
    """A frame whose window is 2^log bytes, as `zstd --long=31` writes them; its header says so, whatever it holds."""
    settings = zstandard.ZstdCompressionParameters(window_log=log)
    frame = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    return frame.compress(text) + frame.flush()


@pytest.mark.parametrize("log", [28, 31])
def test_a_window_above_128_mb_is_read_where_memory_allows(tmp_path: Path, log: int) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(
        PACK[".zst"](b"1\n") + long_frame(b"2\n", log) + b"\0" * 99
    )
    [unit] = units_of(tmp_path)
    [batch] = read(unit, memory=2 << log)
    assert batch.records == [1, 2]
    with pytest.raises(Unreachable) as refusal:
        list(read(unit, memory=(2 << log) - 2))
    assert "with a window of more than half of the run's memory" in str(refusal.value)
    assert "--memory" in str(refusal.value)
    assert "damaged" not in str(refusal.value)
