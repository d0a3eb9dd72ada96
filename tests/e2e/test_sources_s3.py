"""Sources in a bucket are fetched once, by as few requests as can be, and only as they were when they were listed."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert.known_sources import NOTE
from mdsmix.errors import Unreachable
from mdsmix.sources import content_of, find, plan, read
from mdsmix.storage import locate
from tests.converting import documents, run_recipe, windows, write_recipe
from tests.counting import counted
from tests.faults import Proxy, Rule


def put(bucket: str, name: str, content: bytes) -> None:
    locate(f"s3://{bucket}/{name}").write(content)


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
