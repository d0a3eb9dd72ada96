"""Same input and recipe, same bytes; a second run does nothing; nothing lost, nothing twice."""

import gzip
import os
import shutil
from itertools import chain
from pathlib import Path

import pytest

from mdsmix.engines import local_engine, memory
from tests.converting import (
    Told,
    Web,
    chats,
    documents,
    encoder,
    files,
    manifest_of,
    pairs,
    run_recipe,
    times,
    token_rows,
    write_jsonl,
)

EOS = 0
TEXTS = [f"Document {n}: " + "the quick brown fox " * (n % 7) for n in range(40)]


@pytest.fixture
def web(web: Web) -> Web:
    """Three files of documents, 4 KB in all."""
    for n in range(3):
        web.holds(TEXTS[n::3], f"data/{n}.jsonl")
    return web.says(documents("data/*.jsonl"))


@pytest.fixture
def mixed(web: Web, corpus_folder: Path) -> Web:
    """Streams of several kinds, some hundred records of each."""
    web.windows(4_000)
    for name, count in {"docs": 60, "faq": 150, "chat": 100}.items():
        lines = (corpus_folder / f"{name}.jsonl").read_bytes().splitlines(keepends=True)[:count]
        (web.folder / f"{name}.jsonl").write_bytes(b"".join(lines))
    packed = web.folder / "web.jsonl.gz"
    mixed = web.holds([*TEXTS * 5, "", {"texts": "x"}, {"text": None}, 7])
    packed.write_bytes(gzip.compress(mixed.read_bytes()))
    streams = {
        "web": documents(packed.name),
        "docs": documents("docs.jsonl", layout="document", min_tokens=8, max_tokens=60),
        "faq": pairs("faq.jsonl"),
        "chat": chats("chat.jsonl"),
    }
    return web.says(streams=streams, max_seq_len=32)


def test_the_number_of_workers_shapes_no_byte(mixed: Web) -> None:
    """Nor what a process has done before: the tokenizer proved, texts compared. And read = written + filtered + quarantined."""
    found = []
    for workers in (1, 3):
        shutil.rmtree(mixed.out, ignore_errors=True)
        outcomes = run_recipe(mixed.recipe, workers=workers)
        found.append(files(mixed.out))
    assert found[0] == found[1]
    for outcome in outcomes:
        records, totals = outcome.manifest.records, outcome.manifest.totals
        assert outcome.units > 1
        assert records.read == records.written + records.dropped + records.bad > 0
        assert totals.samples == sum(part.samples for part in outcome.manifest.parts)
        assert outcome.new_tokens + totals.lost_tokens >= totals.tokens - 32 * outcome.units
    bad = {"field_not_text": 1, "missing_field": 1, "not_an_object": 1}
    assert mixed.manifest.records.quarantined == bad


def test_a_second_run_converts_nothing_and_touches_no_file(web: Web) -> None:
    """Sources that were touched cost a hash and nothing else."""
    web.windows(300)
    web.holds([{"text": 1}, "good"], "data/bad.jsonl")
    told = Told()
    first = web.run(watcher=told)
    assert first.reused == 0
    assert first.done == first.units > 5
    size = sum(path.stat().st_size for path in (web.folder / "data").iterdir())
    assert (told.began, told.sizes, told.bad) == ([("web", size)], size, 1)
    before, told = times(web.train), Told()
    second = web.run(watcher=told)
    assert (second.done, second.new_tokens, second.state) == (0, 0, "up to date")
    assert (second.manifest, told) == (first.manifest, Told())
    for path in (web.folder / "data").iterdir():
        os.utime(path)
    assert (web.run(watcher=told).done, told.tokens) == (0, 0)
    assert web.run().state == "up to date"
    assert times(web.train) == before


def test_the_units_leftovers_are_joined_in_order_into_the_last_part(web: Web) -> None:
    web.windows(20)  # each text is longer
    texts = [TEXTS[n:12:3] for n in range(3)]
    for n, some in enumerate(texts):
        web.holds(some, f"data/{n}.jsonl")
    web.run(workers=2)
    encode, rows, rest = encoder(web.tokenizer), [], []
    for text in chain.from_iterable(texts):
        ids = [*encode(text), EOS]
        cut = len(ids) // 16 * 16
        rows += [ids[i : i + 16] for i in range(0, cut, 16)]
        rest += ids[cut:]
    rows += [rest[i : i + 16] for i in range(0, len(rest) // 16 * 16, 16)]
    assert web.rows == rows
    assert web.manifest.totals.lost_tokens == len(rest) % 16


def test_a_first_look_reads_the_first_records_and_leaves_the_stream_alone(web: Web) -> None:
    """How much of the second file is read follows from how much the first one held."""
    web.run()
    before, whole = times(web.out), web.rows
    look = web.run(limit=15)
    assert look.target == str(web.out / "web" / "limit-15")
    assert look.manifest.records.read == 15
    assert before.items() <= times(web.out).items()
    assert token_rows(look.target) == whole[: look.manifest.totals.samples]
    web.windows(200)
    lines = (web.folder / "data/0.jsonl").read_bytes().splitlines(keepends=True)
    for kept in (lines, lines[:3]):
        (web.folder / "data/0.jsonl").write_bytes(b"".join(kept))
        assert web.run(limit=15).manifest.records.read == 15


@pytest.mark.usefixtures("processes")
def test_streams_are_done_by_the_same_workers(web: Web) -> None:
    """A worker costs 0.2 s until its tokenizer is warm: each of 200 small streams forked one."""
    starts, start = list[object](), local_engine.start_worker
    web.patch.setattr(
        local_engine, "start_worker", lambda *given: starts.append(given) or start(*given)
    )
    web.says(streams={name: documents(f"data/{name}.jsonl") for name in "012"})
    for done in (1, 0):
        assert [each.done for each in run_recipe(web.recipe, workers=2)] == [done] * 3
        assert len(starts) == 1


def test_a_cap_that_one_worker_does_not_keep_is_told(web: Web) -> None:
    told = Told()
    web.run(memory=1 << 40, watcher=told)
    assert told.said == []
    web.patch.setattr(memory, "held", lambda pid: 1 << 40)
    web.run("max_seq_len=8", memory=1 << 30, watcher=told)
    (said,) = told.said
    assert "MB of memory were held, more than --memory allows (1,074 MB)" in said


def test_a_stream_that_fails_ends_no_other(web: Web) -> None:
    """All have their turn, each failure is a sentence, and the exit code is the gravest one's."""
    (web.folder / "damaged.jsonl.gz").write_bytes(b"\x1f\x8b\x08 no gzip")
    of = {
        "bad": write_jsonl(web.folder / "bad.jsonl", [{"body": 1}]),
        "damaged": "damaged.jsonl.gz",
        "good": web.holds(["a document"], "good.jsonl"),
    }
    web.says(streams={name: documents(path, layout="document") for name, path in of.items()})
    answer = web.convert()
    first, second = answer.err.strip().splitlines()[-2:]
    assert (answer.code, first.partition(" sample")[0]) == (4, "error: stream bad: not one")
    assert second.startswith("error: ")
    assert "damaged.jsonl.gz" in second
    assert "good: 1 of 1 work units converted" in answer.out
    assert manifest_of(web.out / "good/train").totals.samples == 1
    alone = web.convert("--only", "bad", *["--only", "good"] * 2)
    assert (alone.code, alone.out.count("good: up to date")) == (5, 1)
