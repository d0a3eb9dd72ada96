"""What commands ask of a store, by operation: one listing and a few reads a stream, not some
requests for each file.

The bounds hold for a stream of any size: where the streams of a test have five units, the same
bound with a thousand is looked at by `python -m benchmarks.requests`.
"""

from __future__ import annotations

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
from tests.faults import Proxy

pytestmark = pytest.mark.usefixtures("processes")  # what workers ask for counts
LINE = len(b'{"text":""}\n') + 8 * len("Document 00 of many. ")
"A document of `texts` as a line: windows of so many bytes hold one each."


def texts(*numbers: int) -> list[Any]:
    return [f"Document {n:02} of many. " * 8 for n in numbers]


@pytest.fixture
def work(bucket: str, project: Project) -> Any:
    """Writes a recipe of streams of these records, into that bucket. No lease beats on its clock:
    on a busy machine it would be asked for more.
    """
    project.set_window_size(LINE)
    project.patch.setattr(lease, "BEAT_SECONDS", 3600)

    def recipe(of: dict[str, list[Any]], kind: Any = documents, **settings: Any) -> Path:
        streams = {name: kind(project.write_source(of[name], f"{name}.jsonl")) for name in of}
        return project.configure(remote=f"s3://{bucket}/mix", streams=streams, **settings).recipe

    return recipe


def beyond(counts: dict[int, RequestCount]) -> Counter[str]:
    """What the larger work asks more."""
    return counts[7].by_operation - counts[2].by_operation


document = partial(documents, layout="document")
THREE = {f"s{n}": texts(n) for n in range(3)}
"Streams of one unit each."


@pytest.mark.parametrize(("publish", "reads"), [("replace", 2), ("versioned", 3)])
def test_a_check_lists_a_stream_and_reads_two_small_files_and_of_versions_which_is_current(
    publish: str, reads: int, work: Any, proxy: Proxy
) -> None:
    recipe = work(THREE, publish=publish)
    run_recipe(recipe)
    with count_requests(proxy) as found:
        assert not run_checks(resolve_mix([str(recipe)]))
    assert not found.at(".mds")
    # One of all streams: whether the tokenizer that the YAML will name is published beside them.
    assert found.by_operation == {"GET": reads * 3, "GET list": 3, "HEAD": 1}, found


def test_a_check_of_finetuning_streams_reads_no_shard_whose_samples_were_judged_so(
    work: Any, proxy: Proxy
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    recipe = work({"chat": [{"messages": messages}] * 3}, chats, max_seq_len=64)
    run_recipe(recipe)
    for overrides, reads in ([], {}), (["target_prompts=all"], {"GET": 2}):
        with count_requests(proxy) as found:
            run_checks(resolve_mix([str(recipe), *overrides]))
        assert found.at(".mds") == reads, overrides


def test_the_longest_sample_is_found_by_tables_and_never_by_reading_shards(
    work: Any, bucket: str, proxy: Proxy
) -> None:
    """The table of each shard; then, of the 16 largest samples, what their shard counts, where they
    lie, and they themselves.
    """
    run_recipe(work({"web": texts(*range(5))}))
    stream = f"s3://{bucket}/mix/web/train"
    index = read_index(locate(stream))
    assert index.samples > 16
    for choice, reads in ((["--longest"], 2 * len(index.shards) + 3 * 16), (["--sample", "7"], 3)):
        with count_requests(proxy) as found:
            run_ok("inspect", stream, *choice)
        shards = [request for request in found.requests if request.key.endswith(".mds")]
        assert 0 < len(shards) <= reads, choice
        assert all("range" in {name.lower() for name in request.headers} for request in shards)


def test_a_run_or_a_dry_run_of_what_is_up_to_date_costs_a_listing_and_two_reads_a_stream(
    work: Any, proxy: Proxy
) -> None:
    """Bad records of a stream cost one listing more."""
    recipe = work(THREE | {"s2": [*texts(2), {"text": 5}]})
    run_recipe(recipe)
    with count_requests(proxy) as found:
        assert [outcome.done for outcome in run_recipe(recipe)] == [0, 0, 0]
    # And one for all streams: whether their tokenizer lies beside them.
    assert found.by_operation == {"GET": 2 * 3 + 1, "GET list": 3 + 1}, found
    with count_requests(proxy) as found:
        said = list(describe_plans(load_recipe(recipe), Options()))
    units = [sentence.partition(" work units would")[0] for sentence in said]
    assert units == [f"s{n}: 0 of {1 + (n == 2)}" for n in range(3)]
    assert found.by_operation == {"GET": 2 * 3, "GET list": 3 + 1}, found


def test_at_a_new_target_a_unit_is_two_writes_one_read_and_no_look(work: Any, proxy: Proxy) -> None:
    """Its shard, its fingerprints and its record; all fingerprints are read when they are
    joined.
    """
    counts = {}
    for count in (1, 2, 7):  # the first one finds out what the store can
        recipe = work({f"web{count}": texts(*range(count))}, document)
        with count_requests(proxy) as counts[count]:
            run_recipe(recipe, workers=2)
    assert beyond(counts) == {"PUT": 2 * 5, "GET": 5}, (str(counts[2]), str(counts[7]))
    # The lease, the publication and the listings around them.
    assert counts[2].total <= 30, counts[2]
    assert counts[2].missed <= 6, counts[2]


@pytest.mark.parametrize(("publish", "copies"), [("replace", {}), ("versioned", {"PUT copy": 5})])
def test_one_new_unit_beside_known_ones_reads_each_record_and_its_fingerprints_once(
    work: Any, proxy: Proxy, publish: str, copies: dict[str, int]
) -> None:
    counts = {}
    for count in (2, 7):
        for known in (count, count + 1):
            recipe = work({f"web{count}": texts(*range(known))}, document, publish=publish)
            with count_requests(proxy) as counts[count]:
                (outcome,) = run_recipe(recipe)
        assert outcome.reused == count
    assert beyond(counts) == {"GET": 2 * 5, **copies}, (str(counts[2]), str(counts[7]))
    assert counts[2].total < 56, counts[2]
