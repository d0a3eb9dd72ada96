"""Sources in a bucket are fetched once, with as few requests as possible, and only in the version
that was listed. Of columnar files, the footer is read once, and only the bytes of the needed
columns.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdsmix.conversion.source_cache import NOTE
from mdsmix.errors import Unreachable
from mdsmix.sources import (
    choose_splits,
    compute_content,
    find_files,
    plan_units,
    read_batches,
    read_beginnings,
)
from mdsmix.sources.formats import format_of
from mdsmix.storage import locate
from tests.converting import Project, documents, manifest_of, read_token_rows, run_recipe
from tests.counting import count_requests
from tests.faults import Proxy, Request, Rule
from tests.formats import FORMATS, write_records

RECORDS = [{"text": f'document {n} of a bucket,\nsome "words", né?'} for n in range(20)]
TEXTS = [f"text number {n} " * 16 for n in range(4000)]


@pytest.fixture
def raw(bucket: str) -> str:
    return f"s3://{bucket}/raw"


def put(raw: str, name: str, content: bytes) -> str:
    file = locate(f"{raw}/{name}")
    file.write(content)
    return file.url


def make_line(number: int) -> bytes:
    return b'{"text": "This is the text number %d of some words."}\n' % number


def read_records(units: Any) -> list[Any]:
    records = list[Any]()
    for unit in units:
        for batch in read_batches(unit):
            records += batch.records
    return records


def parse_range(request: Request) -> tuple[int, int]:
    """Return the first and the last byte that a request asks for."""
    first, last = request.headers["range"].removeprefix("bytes=").split("-")
    return int(first), int(last)


def test_a_first_run_fetches_each_small_object_once(
    project: Project, raw: str, proxy: Proxy
) -> None:
    for n in range(60):
        data, suffix = (gzip.compress(make_line(n)), ".gz") if n % 3 == 0 else (make_line(n), "")
        put(raw, f"{n:03}.jsonl{suffix}", data)
    project.configure(documents(f"{raw}/*.jsonl*"))
    with count_requests(proxy) as counted:
        assert project.run(workers=2).manifest.records.read == 60
    fetched = [(r.method, r.key) for r in counted.requests if "/raw/" in r.key and "*" not in r.key]
    assert len(fetched) == len(set(fetched)) == 60, str(counted)
    assert {method for method, _ in fetched} == {"GET"}
    with count_requests(proxy) as counted:
        assert project.run().state == "up to date"
    assert not [r for r in counted.requests if "/raw/0" in r.key], (
        "recognized by the listing's ETags"
    )


@pytest.mark.parametrize("target", ["remote", "local"])
def test_a_new_machine_reads_only_objects_that_are_new_or_changed(
    project: Project, raw: str, proxy: Proxy, target: str
) -> None:
    """With --verify-source it reads all. A changed object may have the same size."""
    project.set_window_size(60)
    names = [f"{n}.jsonl" for n in range(4)]
    for n, name in enumerate(names):
        put(raw, name, make_line(n))
    remote = {"remote": raw.replace("raw", "mix")} if target == "remote" else {}
    project.configure(documents(f"{raw}/*.jsonl", layout="document"), **remote)
    machines = iter(range(9))

    def run_elsewhere(**settings: Any) -> tuple[int, list[str]]:
        """Convert on a new machine. Return the number of converted units and the objects read."""
        project.patch.setenv("MDSMIX_CACHE", str(project.folder / f"machine {next(machines)}"))
        with count_requests(proxy) as counted:
            done = project.run(**settings).done
        gets = (r.key.partition("/raw/")[2] for r in counted.requests if r.operation == "GET")
        return done, sorted(set(filter(None, gets)))

    assert run_elsewhere() == (4, names)
    assert run_elsewhere() == (0, [])
    assert run_elsewhere(verify_source=True) == (0, names)
    put(raw, "1.jsonl", make_line(7))
    put(raw, "4.jsonl", make_line(8))
    assert run_elsewhere() == (2, ["1.jsonl", "4.jsonl"])
    assert run_elsewhere() == (0, [])
    notes = [*project.folder.rglob(NOTE)]
    assert len(notes) == (target == "local")
    for note in notes:
        note.write_bytes(note.read_bytes()[:-3])
        assert run_elsewhere() == (0, [*names, "4.jsonl"]), "a damaged note is ignored"


def test_a_large_object_is_read_with_one_range_request_per_window(
    project: Project, raw: str, proxy: Proxy
) -> None:
    data = b"".join(map(make_line, range(8000)))
    project.set_window_size(100_000)
    project.configure(documents(put(raw, "large.jsonl", data), layout="document"))
    with count_requests(proxy) as counted:
        outcome = project.run(workers=2)
    assert outcome.manifest.records.read == 8000
    requests = [r for r in counted.requests if r.key.endswith("large.jsonl") and r.method == "GET"]
    requests = [r for r in requests if parse_range(r) != (0, 0)]  # that one finds the object
    assert len(requests) == outcome.units == -(-len(data) // 100_000)
    assert max(last - first for first, last in map(parse_range, requests)) <= 100_000 + (64 << 10)
    assert all("if-match" in r.headers for r in requests)


def test_a_line_longer_than_expected_is_read_to_its_end(raw: str) -> None:
    lines = [b'"%s"' % (letter * 200_000) for letter in (b"a", b"b", b"c")]
    url = put(raw, "x.jsonl", b"\n".join(lines))
    assert read_records(plan_units(find_files([url], "/"), 100_000)) == [
        line.strip(b'"').decode() for line in lines
    ]


def test_an_object_that_was_replaced_after_the_listing_is_an_error(raw: str) -> None:
    for size in (10, 3 << 20):
        for name in ("a", "b"):
            put(raw, f"{size}/{name}.jsonl", b"1\n" * size)
        [unit] = plan_units(find_files([f"{raw}/{size}/*.jsonl"], "/"))
        put(raw, f"{size}/b.jsonl", b"2\n" * size)
        for read in (lambda unit: list(read_batches(unit)), compute_content):
            with pytest.raises(Unreachable, match=r"b\.jsonl.*replaced"):
                read(unit)


def test_small_objects_are_read_in_order_whichever_arrives_first(raw: str, proxy: Proxy) -> None:
    for n in range(40):
        put(raw, f"{n:02}.jsonl", b"%d\n" % n)
    units = plan_units(find_files([f"{raw}/*.jsonl"], "/"))
    proxy.rules = [Rule("503", "GET", r"0[0-9]\.jsonl", times=5)]
    assert (len(units), read_records(units)) == (1, [*range(40)])
    assert len(proxy.met("503")) == 5


def test_a_pattern_lists_only_objects_with_its_prefix(raw: str, proxy: Proxy) -> None:
    for name in ("crawl-2023/x", "crawl-2024-01/x", "crawl-2024-02/x", "crawl-2024-02/y", "z/x"):
        put(raw, f"{name}.jsonl", b"1\n")
    with count_requests(proxy) as counted:
        files = find_files([f"{raw}/crawl-2024-*/x.jsonl"], "/")
    assert [file.name for file in files] == [f"{raw}/crawl-2024-0{n}/x.jsonl" for n in (1, 2)]
    (listing,) = (r for r in counted.requests if r.operation == "GET list")
    assert "prefix=raw%2Fcrawl-2024-&" in f"{listing.path}&"
    assert [f.name for f in find_files([f"{raw}/z/*"], "/")] == [f"{raw}/z/x.jsonl"]


def test_the_beginning_of_a_file_knows_its_share_of_the_file(tmp_path: Path, raw: str) -> None:
    """An Arrow file does not store its number of rows. Of a compressed file only the reader knows
    how much it has read.
    """
    for name in ("arrow", "jsonl", "jsonl.bz2"):
        written = write_records(tmp_path, name, RECORDS * 50).read_bytes()
        file = find_files([put(raw, f"a.{name}", written)], tmp_path)
        [all_of_it] = read_beginnings(choose_splits(file, fields=["text"]), 1 << 20)
        assert len(all_of_it.records) == 1000
        assert 0.4 < all_of_it.weight / format_of(file[0]).weight(file[0]) <= 1, name


def write_wide_file(path: Path, group: int) -> bytes:
    """Write and return a parquet file of 4,000 rows: a column of 1 MB of text and one of 16 MB of
    noise.
    """
    noise = np.random.default_rng(1).bytes(4096 * 4000)
    columns = {"text": TEXTS, "noise": [noise[4096 * n : 4096 * (n + 1)] for n in range(4000)]}
    settings = {"compression": "none", "use_dictionary": False, "row_group_size": group}
    pq.write_table(pa.table(columns), path, **settings)
    return path.read_bytes()


def test_only_the_needed_columns_are_fetched(tmp_path: Path, raw: str, proxy: Proxy) -> None:
    """The footer is read once. All reads are of one version of the object."""
    content, other = (write_wide_file(tmp_path / "a.parquet", group) for group in (1000, 1001))
    url = put(raw, "a.parquet", content)
    with count_requests(proxy) as counted:
        units = plan_units(find_files([url], tmp_path), 300_000, ("text",))
        texts = [record["text"] for record in read_records(units)]
    assert (len(units), texts) == (4, TEXTS)
    spans = [parse_range(r) for r in counted.requests if "range" in r.headers]
    fetched = sum(last - first + 1 for first, last in spans)
    assert fetched < 6_000_000, "of 17 MB: 1 MB of footer, and at least 1 MB per row group"
    ends = [last for _, last in spans if last == len(content) - 1]
    assert len(ends) == 1, "the footer, when the units were planned"
    batches = read_batches(units[0])
    next(batches)
    put(raw, "a.parquet", other)
    for unit in units[:2]:
        with pytest.raises(Unreachable, match="the object was replaced while it was being read"):
            list(read_batches(unit))


def test_the_rows_are_the_same_from_every_format(raw: str, project: Project) -> None:
    """Formats that can be split give several units. A second run reads nothing."""
    project.set_window_size(900)
    streams = {}
    for format in FORMATS:
        path = write_records(project.folder / "in", format, RECORDS)
        inner = path.iterdir() if path.is_dir() else [path]
        urls = [put(raw, f"{format}/{file.name}", file.read_bytes()) for file in inner]
        source = f"{raw}/{format}" if path.is_dir() else urls[0]
        streams[format.replace(".", "-")] = documents(source, layout="document")
    run_recipe(project.configure(max_seq_len=64, streams=streams).recipe)
    first = read_token_rows(project.out / "jsonl/train")
    assert len(first) == 20
    for name in streams:
        assert read_token_rows(project.out / name / "train") == first, name
    assert len(re.findall(r"\b0 of \d+ work units", project.convert_ok("--dry-run").out)) == len(
        FORMATS
    )
    project.convert_ok("--limit", "3")
    for name in streams:
        assert manifest_of(project.out / name / "limit-3").records.read == 3
