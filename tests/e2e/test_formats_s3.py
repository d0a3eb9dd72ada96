"""Columnar files in a bucket: their footers are read once, and of their bytes only those of the wanted columns."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdsmix.errors import Unreachable
from mdsmix.sources import chosen, find, plan, read, read_beginnings
from mdsmix.sources.formats import format_of
from mdsmix.storage import locate
from tests.converting import documents, run_recipe, token_rows, windows, write_recipe
from tests.counting import counted
from tests.faults import Proxy
from tests.formats import FORMATS, write

RECORDS = [{"text": f"document {n} of a bucket, some words"} for n in range(20)]


def put(bucket: str, name: str, content: bytes) -> str:
    place = locate(f"s3://{bucket}/{name}")
    place.write(content)
    return place.url


def wide(tmp_path: Path, group: int = 1000) -> bytes:
    """4,000 rows: a column of 1 MB, and one of 16 MB of noise beside it."""
    noise = np.random.default_rng(1).bytes(4096 * 4000)
    columns = {
        "text": [f"text number {n} " * 16 for n in range(4000)],
        "noise": [noise[4096 * n : 4096 * (n + 1)] for n in range(4000)],
    }
    settings = {"compression": "none", "use_dictionary": False, "row_group_size": group}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", **settings)
    return (tmp_path / "a.parquet").read_bytes()


def test_the_beginning_of_a_file_in_a_bucket_says_which_part_of_it_it_is(
    tmp_path: Path, bucket: str
) -> None:
    """An arrow file and a stream tell no rows without being read, and of a packed file only its reader tells how far it came."""
    for name in ("arrow", "jsonl", "jsonl.bz2"):
        written = write(tmp_path, name, RECORDS * 50).read_bytes()
        file = find([put(bucket, f"a.{name}", written)], tmp_path)
        [all_of_it] = read_beginnings(chosen(file, fields=["text"]), 1 << 20)
        assert len(all_of_it.records) == 1000
        assert 0.4 < all_of_it.weight / format_of(file[0]).weight(file[0]) <= 1, name


def test_only_the_wanted_columns_are_fetched_the_footer_once_and_of_one_object(
    tmp_path: Path, bucket: str, proxy: Proxy
) -> None:
    content, other = wide(tmp_path), wide(tmp_path, group=1001)
    url = put(bucket, "a.parquet", content)
    with counted(proxy) as seen:
        units = plan(find([url], tmp_path), 300_000, ("text",))
        found = [r["text"] for unit in units for batch in read(unit) for r in batch.records]
    assert len(units) == 4
    assert found == [f"text number {n} " * 16 for n in range(4000)]
    asked = [r.headers["range"] for r in seen.requests if "range" in r.headers]
    ranges = [each.removeprefix("bytes=").split("-") for each in asked]
    fetched = sum(int(last) - int(first) + 1 for first, last in ranges)
    assert fetched < 6_000_000, "1 MB of footer, and 1 MB at least a row group, of 17 MB"
    ends = [each for each in asked if each.endswith(f"-{len(content) - 1}")]
    assert len(ends) == 1, "its footer, while it was planned"
    batches = read(units[0])
    next(batches)
    put(bucket, "a.parquet", other)
    for unit in units[:2]:
        with pytest.raises(Unreachable, match="the object was replaced while it was being read"):
            list(read(unit))


def test_every_format_is_read_from_a_bucket(
    tmp_path: Path, bucket: str, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 900)
    streams = {}
    for format in FORMATS:
        path = write(tmp_path / "in", format, RECORDS)
        inner = sorted(path.iterdir()) if path.is_dir() else [path]
        urls = [put(bucket, f"{format}/{file.name}", file.read_bytes()) for file in inner]
        source = f"s3://{bucket}/{format}" if path.is_dir() else urls[0]
        streams[format.replace(".", "-")] = documents(source, layout="document")
    run_recipe(write_recipe(tmp_path, tokenizer_folder, max_seq_len=64, streams=streams))
    first = token_rows(tmp_path / "out/jsonl/train")
    assert len(first) == 20
    for name in streams:
        assert token_rows(tmp_path / "out" / name / "train") == first, name
