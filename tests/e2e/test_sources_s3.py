"""Sources in a bucket are fetched once, by as few requests as can be, and only as they were when they were listed. Of
columnar ones the footer is read once, and only the bytes of the wanted columns."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdsmix.convert.known_sources import NOTE
from mdsmix.errors import Unreachable
from mdsmix.sources import chosen, content_of, find, plan, read, read_beginnings
from mdsmix.sources.formats import format_of
from mdsmix.storage import locate
from tests.converting import documents, run_recipe, token_rows, windows, write_recipe
from tests.counting import counted
from tests.faults import Proxy, Rule
from tests.formats import FORMATS, write

RECORDS = [{"text": f"document {n} of a bucket, some words"} for n in range(20)]


def put(bucket: str, name: str, content: bytes) -> str:
    place = locate(f"s3://{bucket}/{name}")
    place.write(content)
    return place.url


def text(number: int) -> bytes:
    return b'{"text": "This is the text number %d of some words."}\n' % number


def test_a_first_conversion_fetches_each_small_object_once(
    tmp_path: Path, tokenizer_folder: Path, bucket: str, proxy: Proxy
) -> None:
    for n in range(60):
        data, suffix = (gzip.compress(text(n)), ".gz") if n % 3 == 0 else (text(n), "")
        put(bucket, f"raw/{n:03}.jsonl{suffix}", data)
    streams = {"web": documents(f"s3://{bucket}/raw/*.jsonl*")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    with counted(proxy) as seen:
        (outcome,) = run_recipe(recipe, workers=2)
    assert outcome.manifest.records.read == 60
    fetched = [(r.method, r.key) for r in seen.requests if "/raw/" in r.key and "*" not in r.key]
    assert len(fetched) == len(set(fetched)) == 60, str(seen)
    assert {method for method, _ in fetched} == {"GET"}
    with counted(proxy) as seen:
        assert run_recipe(recipe)[0].state == "up to date"
    assert not [r for r in seen.requests if "/raw/0" in r.key], "known by the listing's ETags"


@pytest.mark.parametrize("target", ["remote", "local"])
def test_a_machine_that_never_saw_the_objects_reads_none_that_the_stream_was_made_of(
    tmp_path: Path,
    tokenizer_folder: Path,
    bucket: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
) -> None:
    """And each that is another: of the same size, or new; or all, where the user wants so."""
    windows(monkeypatch, 60)
    for n in range(4):
        put(bucket, f"raw/{n}.jsonl", text(n))
    streams = {"web": documents(f"s3://{bucket}/raw/*.jsonl", layout="document")}
    remote = {"remote": f"s3://{bucket}/mix"} if target == "remote" else {}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, **remote)
    machines = iter(range(9))

    def run_elsewhere(**settings: Any) -> tuple[int, list[str]]:
        """Units that were converted, and the objects that were read."""
        monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / f"machine {next(machines)}"))
        with counted(proxy) as seen:
            (outcome,) = run_recipe(recipe, **settings)
        read = (r.key.partition("/raw/")[2] for r in seen.requests if r.operation == "GET")
        return outcome.done, sorted(set(filter(None, read)))

    names = [f"{n}.jsonl" for n in range(4)]
    assert run_elsewhere() == (4, names)
    assert run_elsewhere() == (0, [])
    assert run_elsewhere(verify_source=True) == (0, names)
    put(bucket, "raw/1.jsonl", text(7))
    put(bucket, "raw/4.jsonl", text(8))
    assert run_elsewhere() == (2, ["1.jsonl", "4.jsonl"])
    assert run_elsewhere() == (0, [])
    (note,) = tmp_path.rglob(NOTE) if target == "local" else [None]
    if note:
        note.write_bytes(note.read_bytes()[:-3])
        assert run_elsewhere() == (0, sorted([*names, "4.jsonl"])), "a damaged note says nothing"


def test_a_large_plain_object_is_one_range_request_a_window(
    tmp_path: Path,
    tokenizer_folder: Path,
    bucket: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"".join(map(text, range(8000)))
    put(bucket, "large.jsonl", data)
    windows(monkeypatch, 100_000)
    streams = {"web": documents(f"s3://{bucket}/large.jsonl", layout="document")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    with counted(proxy) as seen:
        (outcome,) = run_recipe(recipe, workers=2)
    assert outcome.manifest.records.read == 8000
    assert outcome.units == -(-len(data) // 100_000)
    asked = [r for r in seen.requests if r.key.endswith("large.jsonl") and r.method == "GET"]
    asked = [r for r in asked if r.headers["range"] != "bytes=0-0"]  # which finds it
    assert len(asked) == outcome.units
    bounds = [r.headers["range"].removeprefix("bytes=").split("-") for r in asked]
    assert max(int(last) - int(first) for first, last in bounds) <= 100_000 + (64 << 10)
    assert all("if-match" in r.headers for r in asked)


def test_a_line_longer_than_was_thought_is_read_on(bucket: str, proxy: Proxy) -> None:
    lines = [b'"%s"' % (letter * 200_000) for letter in (b"a", b"b", b"c")]
    put(bucket, "x.jsonl", b"\n".join(lines))
    found = [
        record
        for unit in plan(find([f"s3://{bucket}/x.jsonl"], "/"), 100_000)
        for batch in read(unit)
        for record in batch.records
    ]
    assert found == [line.strip(b'"').decode() for line in lines]


def test_an_object_that_was_replaced_since_it_was_listed_is_refused(bucket: str) -> None:
    for size in (10, 3 << 20):
        for name in ("a", "b"):
            put(bucket, f"{size}/{name}.jsonl", b"1\n" * size)
        [unit] = plan(find([f"s3://{bucket}/{size}/*.jsonl"], "/"))
        put(bucket, f"{size}/b.jsonl", b"2\n" * size)
        for look in (lambda unit: list(read(unit)), content_of):
            with pytest.raises(Unreachable, match=r"b\.jsonl.*replaced"):
                look(unit)


def test_small_objects_come_in_their_order_whichever_is_there_first(
    bucket: str, proxy: Proxy
) -> None:
    for n in range(40):
        put(bucket, f"{n:02}.jsonl", b"%d\n" % n)
    [unit] = plan(find([f"s3://{bucket}/*.jsonl"], "/"))
    proxy.rules = [Rule("503", "GET", r"0[0-9]\.jsonl", times=5)]
    assert [record for batch in read(unit) for record in batch.records] == list(range(40))
    assert len(proxy.met("503")) == 5


def test_a_pattern_lists_only_what_begins_as_it_does(bucket: str, proxy: Proxy) -> None:
    for name in ("crawl-2023/x", "crawl-2024-01/x", "crawl-2024-02/x", "crawl-2024-02/y", "z/x"):
        put(bucket, f"data/{name}.jsonl", b"1\n")
    with counted(proxy) as seen:
        files = find([f"s3://{bucket}/data/crawl-2024-*/x.jsonl"], "/")
    expected = [f"s3://{bucket}/data/crawl-2024-0{n}/x.jsonl" for n in (1, 2)]
    assert [file.name for file in files] == expected
    (listing,) = (r for r in seen.requests if r.operation == "GET list")
    assert "prefix=data%2Fcrawl-2024-&" in f"{listing.path}&"
    assert [f.name for f in find([f"s3://{bucket}/data/z/*"], "/")] == [
        f"s3://{bucket}/data/z/x.jsonl"
    ]


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
