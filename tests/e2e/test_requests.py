"""The number of requests of a command to a store: one listing and a few reads per stream, not
several requests per file.

The bounds apply to streams of any size. The streams of these tests have five units;
`python -m benchmarks.requests` checks the same bounds with a thousand.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mdsmix.conversion.planning import Options, describe_plans
from mdsmix.mix.check import run_checks
from mdsmix.mix.streams.resolve import resolve_mix
from mdsmix.recipe import load_recipe
from mdsmix.shards import lease
from mdsmix.shards.index import read_index
from mdsmix.storage import locate
from tests.converting import Project, chats, documents, run_ok, run_recipe
from tests.counting import RequestCount, count_requests
from tests.faults import Proxy, Rule

pytestmark = pytest.mark.usefixtures("processes")  # requests of workers count too
LINE = len(b'{"text":""}\n') + 8 * len("Document 00 of many. ")
"Bytes of a record of `make_texts`: a window of this size has one."


def make_texts(*numbers: int) -> list[Any]:
    return [f"Document {n:02} of many. " * 8 for n in numbers]


@pytest.fixture
def work(bucket: str, project: Project) -> Any:
    """A function that writes a recipe of streams with these records, published into the bucket. The
    lease has no heartbeat: on a slow machine it would add requests.
    """
    project.set_window_size(LINE)
    project.patch.setattr(lease, "BEAT_SECONDS", 3600)

    def write_recipe(records: dict[str, list[Any]], kind: Any = documents, **settings: Any) -> Path:
        streams = dict[str, Any]()
        for name in records:
            streams[name] = kind(project.write_source(records[name], f"{name}.jsonl"))
        return project.configure(remote=f"s3://{bucket}/mix", streams=streams, **settings).recipe

    return write_recipe


def subtract_counts(counts: dict[int, RequestCount]) -> Counter[str]:
    """Return the requests that 7 units need in addition to those of 2 units."""
    return counts[7].by_operation - counts[2].by_operation


GATHER_SECONDS = 20
"""How long a store waits for requests at the same time: a client sends a request without an answer
again after 30 s, which would count as another one.
"""
document = partial(documents, layout="document")
THREE = {f"s{n}": make_texts(n) for n in range(3)}
"Streams of one unit each."


@pytest.mark.parametrize(
    ("command", "listings", "reads", "total"),
    [("convert", 3, 6, 10), ("check", 3, 6, 10), ("verify", 1, 2, 15), ("gc", 1, 2, 22)],
)
def test_requests_that_do_not_depend_on_each_other_are_sent_at_the_same_time(
    command: str, listings: int, reads: int, total: int, work: Any, proxy: Proxy
) -> None:
    """Three streams are published. The store answers only when so many listings, or so many reads
    of indexes and manifests, have arrived.
    """
    recipe = work(THREE)
    run_recipe(recipe)
    small_files = r"(index\.json|mdsmix\.manifest)$"
    for operation, key, count in (("GET list", "", listings), ("GET", small_files, reads)):
        wait_for_all = threading.Barrier(count, timeout=GATHER_SECONDS).wait
        proxy.rules.append(Rule("", operation, key, times=99, then=wait_for_all))
    with count_requests(proxy) as requests:
        run_ok(command, str(recipe))
    assert requests.total == total, requests


@pytest.mark.parametrize(("publish", "reads"), [("replace", 2), ("versioned", 3)])
def test_a_check_lists_a_stream_and_reads_two_small_files_and_one_more_for_versions(
    publish: str, reads: int, work: Any, proxy: Proxy
) -> None:
    recipe = work(THREE, publish=publish)
    run_recipe(recipe)
    with count_requests(proxy) as requests:
        assert not run_checks(resolve_mix([str(recipe)]))
    assert not requests.for_key(".mds")
    # One HEAD for all streams: whether the tokenizer for the YAML is published next to them.
    assert requests.by_operation == {"GET": reads * 3, "GET list": 3, "HEAD": 1}, requests


def test_a_check_reads_no_shard_if_the_manifest_answers_for_the_settings(
    work: Any, proxy: Proxy
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    recipe = work({"chat": [{"messages": messages}] * 3}, chats, max_seq_len=64)
    run_recipe(recipe)
    for overrides, reads in ([], {}), (["target_prompts=all"], {"GET": 2}):
        with count_requests(proxy) as requests:
            run_checks(resolve_mix([str(recipe), *overrides]))
        assert requests.for_key(".mds") == reads, overrides


def test_inspect_reads_the_table_of_a_shard_once_and_of_the_rest_only_the_samples(
    work: Any, bucket: str, proxy: Proxy
) -> None:
    """To find the longest sample it reads the table of each shard, then that of its shard again."""
    run_recipe(work({"web": make_texts(*range(5))}))
    stream = f"s3://{bucket}/mix/web/train"
    index = read_index(locate(stream))
    assert index.samples > 16
    shards = len(index.shards)
    everything = ["--random", "-n", "99"]
    for options, reads in (
        (["--longest"], shards + 2),
        (["--sample", "7"], 2),
        (everything, 2 * shards),
    ):
        with count_requests(proxy) as requests:
            run_ok("inspect", stream, *options)
        reading = [request for request in requests.requests if request.key.endswith(".mds")]
        assert 0 < len(reading) <= reads, options
        assert all("range" in {name.lower() for name in request.headers} for request in reading)


def test_a_run_or_dry_run_that_is_up_to_date_needs_a_listing_and_two_reads_per_stream(
    work: Any, proxy: Proxy
) -> None:
    """A stream with bad records needs one more listing."""
    recipe = work(THREE | {"s2": [*make_texts(2), {"text": 5}]})
    run_recipe(recipe)
    with count_requests(proxy) as requests:
        assert [outcome.done for outcome in run_recipe(recipe)] == [0, 0, 0]
    # And one GET for all streams: whether their tokenizer is next to them.
    assert requests.by_operation == {"GET": 2 * 3 + 1, "GET list": 3 + 1}, requests
    with count_requests(proxy) as requests:
        sentences = list(describe_plans(load_recipe(recipe), Options()))
    units = [sentence.partition(" work units would")[0] for sentence in sentences]
    assert units == [f"s{n}: 0 of {1 + (n == 2)}" for n in range(3)]
    assert requests.by_operation == {"GET": 2 * 3, "GET list": 3 + 1}, requests


def test_at_a_new_target_a_unit_needs_two_writes_and_one_read(work: Any, proxy: Proxy) -> None:
    """It writes its shard, and its record with fingerprints. The fingerprints are read to count
    duplicates.
    """
    counts = {}
    for count in (1, 2, 7):  # the first one tests what the store supports
        recipe = work({f"web{count}": make_texts(*range(count))}, document)
        with count_requests(proxy) as counts[count]:
            run_recipe(recipe, workers=2)
    assert subtract_counts(counts) == {"PUT": 2 * 5, "GET": 5}, (str(counts[2]), str(counts[7]))
    # The lease, the publication and the listings around them.
    assert counts[2].total <= 30, counts[2]
    assert counts[2].missed <= 6, counts[2]


def test_a_deleted_stream_is_converted_again_without_a_search_for_its_records(
    work: Any, bucket: str, proxy: Proxy
) -> None:
    recipe = work({"web": make_texts(*range(5))})
    run_recipe(recipe)
    stream = locate(f"s3://{bucket}/mix/web/train")
    stream.delete_all([name for name, _ in stream.list(recursive=True)])
    with count_requests(proxy) as requests:
        (outcome,) = run_recipe(recipe)
    assert (outcome.done, outcome.reused) == (5, 0)
    assert not requests.for_key("/.mdsmix"), requests


@pytest.mark.parametrize(("publish", "copies"), [("replace", {}), ("versioned", {"PUT copy": 5})])
def test_with_one_new_unit_each_record_and_its_fingerprints_are_read_once(
    work: Any, proxy: Proxy, publish: str, copies: dict[str, int]
) -> None:
    counts = {}
    for count in (2, 7):
        for units in (count, count + 1):
            recipe = work({f"web{count}": make_texts(*range(units))}, document, publish=publish)
            with count_requests(proxy) as counts[count]:
                (outcome,) = run_recipe(recipe)
        assert outcome.reused == count
    assert subtract_counts(counts) == {"GET": 2 * 5, **copies}, (str(counts[2]), str(counts[7]))
    assert counts[2].total < 56, counts[2]
