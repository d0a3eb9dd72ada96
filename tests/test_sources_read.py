"""Every line of a file is owned by exactly one unit and window, and every record knows its line."""

import gc
import gzip
import json
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mdsmix.errors import Unreachable
from mdsmix.sources import format as formats
from mdsmix.sources import jsonl, read, record_batches
from mdsmix.sources.units import Span
from tests.formats import PACKED, bad, origins, read_file, records, units, write

FUZZ = settings(max_examples=60)
ODD = [b"", b" \t", b"\r", b'{"a":1},{"a":2}', b"[1", b'"\xff"', b'"\\ud800"', b"\0"]
LINE = st.one_of(
    st.integers().map(lambda n: str(n % 10**6).encode()),
    st.sampled_from(ODD),
    st.text(max_size=9).map(lambda text: json.dumps(text).encode() + b"\r"),
    st.binary(max_size=5),
)
PACK = {"": bytes, **PACKED}


BOTH = st.booleans()
SIZES = st.integers(1, 60), st.integers(1, 40)


@FUZZ
@given(BOTH, st.lists(LINE, max_size=30), BOTH, st.sampled_from([*PACK]), *SIZES)
@example(False, [b"[", b"[ {", b"[1"], False, "", 1, 1)
def test_units_of_any_window_read_what_one_pass_over_the_file_finds(
    tmp_path: Path,
    mark: bool,
    texts: list[bytes],
    ended: bool,
    packing: str,
    window: int,
    piece: int,
) -> None:
    mark = mark and min(window, piece) > 2  # the mark is looked for in the first piece
    data = b"\xef\xbb\xbf" * mark + b"\n".join(texts) + b"\n" * ended
    for old in tmp_path.iterdir():
        old.unlink()
    (tmp_path / f"x.jsonl{packing}").write_bytes(PACK[packing](data))
    with patch.object(jsonl, "PIECE_BYTES", piece), patch.object(record_batches, "BLOCK_BYTES", 25):
        planned = units(tmp_path, "x.jsonl*", window)
        batches = [list(read(unit)) for unit in planned]
    seen, lines_before = dict[int, object](), 0
    for unit, own in zip(planned, batches, strict=True):
        good = zip(origins(own), records(own), strict=True)
        for origin, outcome in (*good, *((origin, reason) for reason, origin in bad(own))):
            assert data[origin.ordinal : origin.ordinal + origin.length] == origin.raw
            line = origin.place["line"] + lines_before
            assert data.count(b"\n", 0, origin.ordinal) + 1 == line
            assert origin.ordinal not in seen
            seen[origin.ordinal] = outcome
        for batch in own:
            at = [origin.ordinal for origin in origins([batch])] + [
                o.ordinal for _, o in bad([batch])
            ]
            assert {(ordinal - unit.start) // window for ordinal in at} <= {batch.window}
        lines_before += sum(batch.count for batch in own)
    assert [seen[offset] for offset in sorted(seen)] == one_by_one(data)


def one_by_one(data: bytes) -> list[object]:
    """Each line decoded alone, by the standard library."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [decode_alone(line) for line in lines if line.strip(b" \t\r")]


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
def test_a_unit_is_its_files_in_order(tmp_path: Path, contents: list[bytes], window: int) -> None:
    for old in tmp_path.iterdir():
        old.unlink()
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.jsonl").write_bytes(content)
    together = read_file(tmp_path, "*.jsonl", window=window)
    alone = [b for i in range(len(contents)) for b in read_file(tmp_path, f"{i}.jsonl")]
    assert records(together) == records(alone)
    assert bad(together) == bad(alone)
    assert sum(b.count for b in together) == sum(b.count for b in alone)


def test_members_and_frames_are_read_on_and_zero_padding_is_none(tmp_path: Path) -> None:
    for packing in (".gz", ".zst"):
        members = (PACK[packing](b"%d\n" % n * 1000) for n in (1, 22, 333))
        found = read_file(tmp_path, f"x.JSONL{packing.upper()}", b"".join(members) + b"\0" * 512)
        assert records(found) == [1] * 1000 + [22] * 1000 + [333] * 1000


CHANGES: list[Callable[[Path], object]] = [
    lambda path: os.utime(path, ns=(0, 0)),
    lambda path: os.truncate(path, path.stat().st_size - 9),
    Path.unlink,
]


def test_no_window_is_handed_out_of_a_file_that_has_changed_since(tmp_path: Path) -> None:
    """A window is published under the key of the file that was planned, so the end of the file is too late to look."""
    path = tmp_path / "x.jsonl.gz"
    for change in CHANGES:
        path.write_bytes(gzip.compress(b"123456789\n" * 50))
        windows = read(*units(tmp_path, path.name, 100))
        assert next(windows).window == 0
        change(path)
        with pytest.raises(Unreachable, match="was changed while it was being read"):
            next(windows)


def test_a_window_above_128_mb_is_read_where_memory_allows(tmp_path: Path) -> None:
    """A frame whose window is 2^31 bytes, as `zstd --long=31` writes them; its header says so, whatever it holds."""
    settings = zstandard.ZstdCompressionParameters(window_log=31)
    frame = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    packed = PACK[".zst"](b"1\n") + frame.compress(b"2\n") + frame.flush()
    (tmp_path / "x.jsonl.zst").write_bytes(packed + b"\0" * 99)
    [unit] = units(tmp_path, "x.jsonl.zst")
    [batch] = read(unit, memory=2 << 31)
    assert batch.records == [1, 2]
    said = r"window of more than half of the run's memory.*--memory"
    with pytest.raises(Unreachable, match=said):
        list(read(unit, memory=(2 << 31) - 2))


def test_a_block_is_not_held_while_the_next_is_made(tmp_path: Path) -> None:
    held, window_of = list[bool](), Span.window_of

    def look(span: Span, position: int) -> int:
        held.append(any(type(each) is formats.Block for each in gc.get_objects()))
        return window_of(span, position)

    for format in ("jsonl", "parquet"):
        write(tmp_path, format, [{"a": n} for n in range(6)])
        small = patch.object(formats, "MOST_ITEMS", 1), patch.object(jsonl, "PIECE_BYTES", 8)
        one = patch.object(record_batches, "BLOCK_BYTES", 8)
        with small[0], small[1], one, patch.object(Span, "window_of", look):
            deque(read(units(tmp_path, f"*.{format}")[0]), maxlen=0)
    assert len(held) >= 12
    assert not any(held)
