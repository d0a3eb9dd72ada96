"""A bad piece of a file does not affect its neighbours, in every format. A file that is incomplete,
or has changed, is refused with one sentence.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.sources import csv_rows, find_files, format, jsonl, read_batches
from mdsmix.sources.csv_cells import find_rows
from tests.formats import (
    ENCODERS,
    PACKERS,
    all_origins,
    all_records,
    bad_items,
    encode_arrow,
    make_tar,
    plan_pattern,
    read_file,
)

N = [{"n": 1}, {"n": 2}]
T = [{"text": "a"}, {"text": "b"}]
XY = [{"x": "1", "y": "a"}, {"x": "2", "y": "b"}]
Place = dict[str, int]
CHANGES: list[Callable[[Path], object]] = [
    lambda path: os.utime(path, ns=(0, 0)),
    lambda path: os.truncate(path, path.stat().st_size - 9),
    Path.unlink,
]
FAULTS: list[tuple[str, dict[str, str], bytes, bytes, list[Any], Place, dict[bytes, str]]] = [
    (
        "a.jsonl",
        {},
        b"1\n\n",
        b"\n2",
        [1, 2],
        {"line": 3, "offset": 3},
        {
            b"{": "not_json",
            b"NaN": "not_json",
            b"\xef\xbb\xbf1": "not_json",
            b'{"a":1},{"a":2}': "not_json",
            b'"\xed\xa0\x80"': "invalid_utf8",
            b'{"a":"\xff"}': "invalid_utf8",
            b'"\\ud800"': "lone_surrogate",
            b'"\\udc00 \\ud83d\\u0041"': "lone_surrogate",
            b"[" * 5000 + b"]" * 5000: "too_deep",
        },
    ),
    (
        "a.json",
        {},
        b'[{"n": 1}, ',
        b', {"n": 2}]',
        N,
        {"index": 1, "offset": 11},
        {
            b'{"a": NaN}': "not_json",
            b'{"a" 1}': "not_json",
            b'{"n": 1} x': "not_json",
            b'{"a": "\\ud800"}': "lone_surrogate",
            b'{"a": "\xff"}': "invalid_utf8",
        },
    ),
    (
        "a.csv",
        {},
        b"x,y\n1,a\n",
        b'"2",b\n',
        XY,
        {"row": 1, "line": 3, "offset": 8},
        {
            b"1,2,3\n": "too_many_fields",
            b"1\n": "too_few_fields",
            b"1,\xff\n": "invalid_utf8",
            b"1,a\0b\n": "nul_byte",
            b'1,"a"b\n': "not_csv",
            b'"1,a\n': "not_csv",
        },
    ),
    (
        "a.txt",
        {"split_by": "line"},
        b"a\n",
        b"\nb\n",
        T,
        {"line": 2, "offset": 2},
        {b"\xff": "invalid_utf8"},
    ),
    (
        "a.txt",
        {"split_by": "paragraph"},
        b"a\n\n",
        b"\n\n\nb\n",
        T,
        {"line": 3, "offset": 3},
        {b"\xff": "invalid_utf8"},
    ),
]
"""File, settings, bytes before and after a fault, the records that are read, the fault's place, and
faults with their reasons.
"""


def test_a_bad_piece_is_set_aside_with_its_place_and_its_neighbours_are_read(
    tmp_path: Path,
) -> None:
    for name, settings, before, after, good, expected_place, faults in FAULTS:
        for raw, reason in faults.items():
            batches = read_file(tmp_path, name, before + raw + after, **settings)
            assert all_records(batches) == good, raw[:20]
            [(why, origin)] = bad_items(batches)
            assert (why, origin.raw, origin.place) == (reason, raw, expected_place)
            counts_end = settings.get("split_by") == "paragraph"
            assert (origin.file, origin.length) == (name, len(raw) + counts_end)
            if "line" in expected_place:
                lines = (before + raw).count(b"\n") + (after[:1] == b"\n")
                assert all_origins(batches)[-1].place["line"] > lines


WORDS = (b"word " * 40, b"word\n" * 40)
LONG: list[tuple[str, dict[str, str], bytes, bytes, bytes, list[Any], str]] = [
    ("a.jsonl", {}, b"1\n", b'"%s"' % (b"x" * 200), b"\n2\n", [1, 2], "line_too_long"),
    ("a.jsonl", {}, b"1\n2\n", b'"%s"' % (b"x" * 200), b"", [1, 2], "line_too_long"),
    (
        "a.json",
        {},
        b'[{"n": 1}, ',
        b'{"a": "%s"}' % (b"x" * 200),
        b', {"n": 2}]',
        N,
        "record_too_long",
    ),
    *(
        ("a.csv", {}, b"x,y\n1,a\n", b'1,"%s"\n' % words, b"2,b\n", XY, "record_too_long")
        for words in (*WORDS, b'","'.join([b"word " * 10] * 2))
    ),
    # A quote that stays open: of a cell that is too long, and of a row with two shorter cells.
    *(
        ("a.csv", {}, b"x,y\n1,a\n2,b\n", b'1,"%s' % words, b"", XY, "record_too_long")
        for words in (b'say ""no""\n' * 20, b'word\n"",\n' * 20, b'","'.join([b"word\n" * 9] * 3))
    ),
    *(
        ("a.txt", {"split_by": split_by}, b"", words, b"", [], "record_too_long")
        for split_by in ("file", "paragraph")
        for words in WORDS
    ),
]


def test_a_record_that_is_too_long_is_skipped_and_its_place_and_length_are_kept(
    tmp_path: Path,
) -> None:
    with (
        patch.multiple(csv_rows, LONGEST_FIELD=50, LONGEST_ROW=100),
        patch.object(jsonl, "PIECE_BYTES", 30),
        patch.object(format, "LONGEST", 100),
    ):
        for name, settings, before, long, after, good, reason in LONG:
            batches = read_file(tmp_path, name, before + long + after, **settings)
            assert all_records(batches) == good, (name, settings)
            [(why, origin)] = bad_items(batches)
            assert (why, origin.raw, origin.place["offset"]) == (reason, b"", len(before))
            assert abs(origin.length - len(long)) <= (name == "a.txt")


def test_a_quote_that_stays_open_takes_little_memory(tmp_path: Path) -> None:
    """Python's csv reader takes four bytes for each character of a cell, and a list of lines about
    fifty for each line.
    """
    content = b'text\n"' + b"words of a line\n" * 3_000_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        batches = read_file(tmp_path, "a.csv", content)
        [(reason, origin)] = bad_items(batches)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    place_and_length = (origin.place["offset"], origin.length)
    assert (reason, *place_and_length) == ("record_too_long", 5, len(content) - 5)
    assert peak < 150 << 20


@pytest.mark.parametrize(("before", "repeated"), [(b"", b","), (b'"', b'""')])
def test_a_row_of_millions_of_cells_is_left_to_the_csv_reader(
    before: bytes, repeated: bytes
) -> None:
    """The positions of all its cells or quotes would take several arrays of 40 MB."""
    tracemalloc.start()
    try:
        is_left = find_rows(before + repeated * 5_000_000 + b"\n", ",", is_at_end=False) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert is_left
    assert peak < 60 << 20


def test_bad_rows_and_damaged_row_groups_are_set_aside(tmp_path: Path) -> None:
    cells = pa.array([b"ok", b"\xff\xfe", b"fine"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, cells.buffers())
    times = pa.array([0, 2**61], pa.timestamp("us"))
    for name, column, why in (("a", texts, "invalid_utf8"), ("b", times, "unreadable_value")):
        pq.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
        [(reason, origin)] = bad_items(read_file(tmp_path, f"{name}.parquet", fields=("text",)))
        assert (reason, origin.place["row"]) == (why, 1)
    path, table = tmp_path / "c.parquet", pa.table({"text": [f"text {n} " * 9 for n in range(90)]})
    pq.write_table(table, path, row_group_size=30, use_dictionary=False)
    page = pq.read_metadata(path).row_group(1).column(0)
    stored, middle = (
        bytearray(path.read_bytes()),
        page.data_page_offset + page.total_compressed_size // 2,
    )
    stored[middle : middle + 40] = b"\xff" * 40
    batches = read_file(tmp_path, "c.parquet", bytes(stored), fields=("text",))
    assert len(all_records(batches)) == 60
    lost = [(why, origin.place["row"]) for why, origin in bad_items(batches)]
    assert lost == [("damaged_rows", row) for row in range(30, 60)]


def test_bad_members_of_an_archive_are_set_aside_and_its_other_records_are_read(
    tmp_path: Path,
) -> None:
    hostile = [("../up.txt", b"x"), ("/etc/passwd.txt", b"x"), ("name", b"x"), ("._a.txt", b"x")]
    wrong = [("c.txt", b"1"), ("c.txt", b"2"), ("d.txt", b"\xff"), ("e.txt", b"x" * 2000)]
    members = [("a/1.txt", b"one"), *hostile, *wrong, ("f.txt", b"last")]
    with patch.object(format, "LONGEST", 1000):
        batches = read_file(tmp_path, "a.tar", make_tar(members), fields=("txt",))
    assert [record["txt"] for record in all_records(batches)] == ["one", "last"]
    assert [(why, origin.place["member"]) for why, origin in bad_items(batches)] == [
        ("unsafe_name", "../up.txt"),
        ("unsafe_name", "/etc/passwd.txt"),
        ("no_suffix", "name"),
        ("duplicate_member", "c"),
        ("invalid_utf8", "d"),
        ("record_too_long", "e"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def damaged_files() -> Iterator[tuple[str, bytes, str]]:
    """Yield the names of files, their content, and the message about each."""
    for content in (
        b'[{"a": 1}, {"a"',
        b'[{"a": "x',
        b'[{"a": 1}',
        b"[",
        b'[{"a": 1}]]',
        b'[{}, "\\',
    ):
        yield "a.json", content, "is not a complete JSON array"
    whole = make_tar([("a.txt", b"x" * 600), ("b.txt", b"y" * 600), ("c.txt", b"z")])
    second = 3 * 512
    assert whole[second:].startswith(b"b.txt")
    overwritten = whole[:second] + b"#" * 512 + whole[second + 512 :]
    cuts = (whole[: second + 700], whole[: second + 100], whole[:second], overwritten)
    for content in (*cuts, b"text " * 300):
        yield "a.tar", content, "is not a complete tar archive"
    yield "a.tar", whole + whole, "other bytes follow its end mark"
    padded = bytearray(gzip.compress(whole + bytes(1 << 22)))
    padded[-6] ^= 1  # in the checksum, which is after all of the archive
    for content in (bytes(padded), gzip.compress(whole)[:-8]):
        yield "a.tar.gz", content, r"a\.tar\.gz is damaged after \d+ uncompressed"
    stream = encode_arrow([{"text": "one"}], pa.ipc.new_stream)
    yield "a.arrow", stream + stream, "other bytes follow the end mark of its stream"
    small, large = (
        encode_arrow([{"text": f"text {n} " * size} for n in range(size)], pa.ipc.new_file)
        for size in (1, 90)
    )
    for content in (small + small, small + large, large + small, large + small + large):
        yield "a.feather", content, "it is several files one after the other"
    for new in (pa.ipc.new_stream, pa.ipc.new_file):
        whole = encode_arrow([{"text": f"text {n}"} for n in range(20)], new)
        for cut in (3, 9, 200):  # cut by 9, a stream ends after a message
            yield "a.arrow", whole[:-cut], "is not a complete arrow file"
    file, offsets = io.BytesIO(), pa.array([0, 1 << 30, 5], pa.int32()).buffers()[1]
    leading = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"x" * 64)])
    hostile = pa.table({"text": leading})
    with pa.ipc.new_file(file, hostile.schema) as writer:
        writer.write_table(hostile)
    yield "a.arrow", file.getvalue(), "is not a complete arrow file"
    whole = ENCODERS["parquet"]([{"text": "one"}, {"text": "two"}])
    footless = whole[:4] + b"\0" * 400 + b"\xff\xff\0\0PAR1"
    for content in (whole[:-9], b'{"text": "a"}\n' * 9, footless):
        yield "a.parquet", content, "is not a complete parquet file"
    yield "a.parquet", whole + whole, "is several parquet files one after the other"
    indexed = io.BytesIO()
    pq.write_table(pa.table({"text": ["three"]}), indexed, write_page_index=True)
    yield "a.parquet", whole + indexed.getvalue(), "is several parquet files one after the other"
    large = ENCODERS["parquet"]([{"text": f"text {n} " * 400} for n in range(40)])
    for content in (whole + large, large + whole, whole + large + indexed.getvalue()):
        yield "a.parquet", content, "is several parquet files one after the other"
    twice, file = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]), io.BytesIO()
    pq.write_table(twice, file)
    yield "a.parquet", file.getvalue(), "has two columns named text"
    for packing in (".gz", ".zst"):
        first, *later = (PACKERS[packing](b"%d\n" % n * 1000) for n in (1, 22, 333))
        whole = b"".join([first, *later])
        broken = whole[:30] + b"\xff\xff" + whole[32:]
        for content in (
            whole[:-1],
            whole[:-10],
            whole[: len(first) + 3],
            whole + b"garbage",
            broken,
        ):
            yield f"a.jsonl{packing}", content, r"a\.jsonl\.\w+ is damaged after \d+ uncompressed"
        not_packed = (
            r"a\.jsonl\.\w+ does not begin like a packed file, although its name ends in \."
        )
        yield f"a.jsonl{packing}", b"not packed\n", not_packed


def test_an_incomplete_file_is_refused_with_one_sentence(tmp_path: Path) -> None:
    for name, content, message in damaged_files():
        with pytest.raises(Unreachable, match=message):
            print(name, content[:40], read_file(tmp_path, name, content, fields=("text",)))


def test_a_file_of_0_bytes_is_refused_if_its_format_always_has_bytes(tmp_path: Path) -> None:
    """The oracles are pyarrow, tarfile and the decompressors, which refuse the same files."""
    import tarfile

    readers: dict[str, Callable[[Path], object]] = {
        "a.parquet": pq.read_table,
        "a.arrow": lambda path: pa.ipc.open_stream(path.read_bytes()),
        "a.feather": lambda path: pa.ipc.open_file(path.read_bytes()),
        "a.tar": tarfile.open,
        "a.tgz": tarfile.open,
        "index.json": lambda path: json.loads(path.read_bytes()),
    }
    for name, read in readers.items():
        (tmp_path / name).touch()
        with pytest.raises((ValueError, OSError, tarfile.TarError, pa.ArrowException)):
            read(tmp_path / name)
        with pytest.raises(
            Unreachable, match=rf"1 file of 0 bytes \(\S*/{name}\): .*copy it again"
        ):
            find_files([name], tmp_path)
    for packing in PACKERS:
        (tmp_path / f"b.jsonl{packing}").touch()
    with pytest.raises(Unreachable, match=rf"{len(PACKERS)} files of 0 bytes .*copy them again"):
        find_files(["b.*"], tmp_path)
    # Without a header, a footer and compression, a file without records has no bytes.
    for name in ("c.jsonl", "c.json", "c.csv", "c.tsv", "c.ndjson", "_SUCCESS.parquet"):
        assert read_file(tmp_path, name, b"") == []


UNREADABLE: list[tuple[str, bytes, dict[str, Any], type[MdsmixError], str]] = [
    ("a.csv", b"a,a\n1,2\n", {}, Unreachable, "^line 1 of .*two columns are named 'a'"),
    ("a.csv", b"sep=;\n\na;a\n1;2\n", {}, Unreachable, "^line 3 of .*two columns are named 'a'"),
    ("a.csv", b'"a\n', {}, Unreachable, r"its columns \(not_csv\)"),
    ("a.csv", b'a,b\n\n"1\n",2\na,b\n3,4\n', {}, Unreachable, "^line 5 of .* names the fields, as"),
    (
        "a.tsv",
        2 * b"\xef\xbb\xbfa\tb\r\n1\t2\r\n",
        {},
        Unreachable,
        "^line 3 of .* names the fields",
    ),
    *(
        ("a.csv", b"a,b\r\n1,2\r\n" + header, {}, Unreachable, "^line 3 of .* names the fields")
        for header in (
            *(b"a,b\n", b"a,b", b"\xef\xbb\xbfa,b\r\n"),
            *(b'"a","b"\n', b'\xef\xbb\xbf"a","b"\r\n', b"a,b\n1\n"),
        )
    ),
    (
        "a.csv",
        b"\xef\xbb\xbf\na,b\n1,2\n",
        {"header": ("a", "b")},
        Unreachable,
        "^line 2 of .*would be read as a record: remove source.header",
    ),
    (
        "a.csv",
        b"Answer,question ,id\n1,2,3\n",
        {"header": ("question", "answer", "number")},
        Unreachable,
        r"remove source\.header from the recipe, and name the fields .* \(Answer, question , id\)",
    ),
    (
        "a.csv",
        b"id,Question,answer\n1,2,3\n",
        {"header": ("number", "asked", "said")},
        Unreachable,
        r"and name the fields as this line does \(id, Question, answer\)",
    ),
    ("a.jsonl", b"1\n", {"header": ("n",)}, RecipeError, r"header does not apply to a\.jsonl"),
    (
        "a.jsonl",
        b"1\n",
        {"format": "cvs"},
        RecipeError,
        r"source\.format is 'cvs', which is no format of mdsmix; did you mean csv",
    ),
    ("a.txt", b"a\n", {}, RecipeError, "a.txt is plain text.*source.split_by"),
]
FOLDERS: list[tuple[str, Any, type[MdsmixError], str]] = [
    ("dataset_dict.json", {"splits": ["train", "test"]}, RecipeError, "set/train"),
    (
        "state.json",
        {"_data_files": [{"filename": "gone.arrow"}]},
        Unreachable,
        "lists 1 file that is missing: .*gone.arrow",
    ),
    ("state.json", {}, Unreachable, "lists no _data_files"),
    (
        "state.json",
        {
            "_data_files": [{"filename": "dataset.arrow"}],
            "_indices_data_files": [{"filename": "indices.arrow"}],
        },
        RecipeError,
        "names a file of indices, so the data files also have rows that are not in the data set",
    ),
    ("state.json", {"_data_files": [{"filename": "../a.arrow"}]}, Unreachable, "leads out of"),
]


def test_a_setting_or_folder_that_does_not_fit_is_refused_with_one_sentence(tmp_path: Path) -> None:
    for name, content, settings, error, message in UNREADABLE:
        with pytest.raises(error, match=message):
            read_file(tmp_path, name, content, **settings)
    for number, (name, tree, error, message) in enumerate(FOLDERS):
        folder = tmp_path / str(number) / "set"
        folder.mkdir(parents=True)
        (folder / name).write_text(json.dumps(tree))
        with pytest.raises(error, match=message):
            find_files(["set"], folder.parent)


def test_a_table_of_one_column_may_contain_its_name(tmp_path: Path) -> None:
    batches = read_file(tmp_path, "a.csv", b"word\none\nword\n")
    assert all_records(batches) == [{"word": "one"}, {"word": "word"}]


def test_a_cut_arrow_file_is_not_read_into_memory(tmp_path: Path) -> None:
    """The bytes at its end, which are those of a record, are no length of a footer."""
    table = pa.table({"text": ["\x7f" * 1000] * 16_000})
    with pa.ipc.new_file(tmp_path / "whole", table.schema) as writer:
        writer.write_table(table)
    content = (tmp_path / "whole").read_bytes()[: 12 << 20]
    tracemalloc.start()
    try:
        with pytest.raises(Unreachable, match=r"a\.feather is not a complete arrow file"):
            read_file(tmp_path, "a.feather", content)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_texts_with_the_marks_of_files_are_no_joined_files(tmp_path: Path) -> None:
    """A parquet file without compression and with indexes, and an Arrow file without records."""
    texts = [f"ends in PAR1PAR1 {number}" for number in range(400)]
    table = pa.table({"text": texts})
    pq.write_table(
        table,
        tmp_path / "a.parquet",
        compression="none",
        use_dictionary=False,
        write_page_index=True,
        data_page_size=8,
        write_batch_size=1,
    )
    content = (tmp_path / "a.parquet").read_bytes()
    assert b"PAR1PAR1" in content[:400]
    assert [record["text"] for record in all_records(read_file(tmp_path, "a.parquet"))] == texts
    schema = table.schema.with_metadata({"note": "ends in ARROW1ARROW1"})
    with pa.ipc.new_file(tmp_path / "a.feather", schema):
        pass
    assert all_records(read_file(tmp_path, "a.feather")) == []


def test_records_of_words_are_no_header(tmp_path: Path) -> None:
    """Usual names of fields alone, in less than half of the cells, or next to a text."""
    for content, header in (
        (b"answer\nword\n", ("word",)),
        (b"answer,hen,egg\n", ("a", "b", "c")),
        (b"question,answer 42!\n", ("word", "use")),
    ):
        batches = read_file(tmp_path, "a.csv", content, header=header)
        assert sum(batch.count for batch in batches) == content.count(b"\n")


def test_values_that_are_not_strings_keep_their_types(tmp_path: Path) -> None:
    """The shape refuses them. Python has no nanoseconds, so they are cut."""
    columns = {
        "moment": pa.array([1_500], pa.timestamp("ns", "Europe/Berlin")),
        "zoned": pa.array([1], pa.timestamp("us", "Europe/Berlin")),
        "plain": pa.array([1_500], pa.timestamp("ns")),
        "exact": pa.array([Decimal("1.50")]),
        "bytes": pa.array([b"\xff"]),
        "inside": [[{"t": 1}]],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    batches = read_file(tmp_path, "a.parquet")
    [record] = all_records(batches)
    times = [record[name].isoformat() for name in ("moment", "zoned", "plain")]
    microsecond = "1970-01-01T00:00:00.000001"
    assert times == [f"{microsecond}+00:00", f"{microsecond}+00:00", microsecond]
    assert (record["exact"], record["bytes"]) == (Decimal("1.50"), b"\xff")
    assert b'{"Decimal":"1.50"}' in all_origins(batches)[0].raw


def test_no_window_is_read_from_a_file_that_has_changed(tmp_path: Path) -> None:
    """A window is published under the key of the file that was planned, so a check at the end of
    the file would be too late.
    """
    path = tmp_path / "x.jsonl.gz"
    for change in CHANGES:
        path.write_bytes(gzip.compress(b"123456789\n" * 50))
        windows = read_batches(*plan_pattern(tmp_path, path.name, 100))
        assert next(windows).window == 0
        change(path)
        with pytest.raises(Unreachable, match="was changed while it was being read"):
            next(windows)


def test_a_zstd_window_above_128_mb_is_read_if_memory_suffices(tmp_path: Path) -> None:
    """A frame has a window of 2^31 bytes, as `zstd --long=31` writes them, whatever its content."""
    settings = zstandard.ZstdCompressionParameters(window_log=31)
    frame = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    packed = PACKERS[".zst"](b"1\n") + frame.compress(b"2\n") + frame.flush()
    (tmp_path / "x.jsonl.zst").write_bytes(packed + b"\0" * 99)
    [unit] = plan_pattern(tmp_path, "x.jsonl.zst")
    [batch] = read_batches(unit, memory=2 << 31)
    assert batch.records == [1, 2]
    message = r"window larger than half of the run's memory.*--memory"
    with pytest.raises(Unreachable, match=message):
        list(read_batches(unit, memory=(2 << 31) - 2))
