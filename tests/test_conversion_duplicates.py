"""Duplicates: of equal records the first one in the order of the published stream is kept, whatever
the workers and their order. An edit redoes only units that lose other records than before. Repeated
fingerprints are found as by a set, however many are sorted at once.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.conversion import duplicates, finished_units, gc
from mdsmix.conversion.duplicates import Fingerprints, count_repeats, find_repeats
from mdsmix.errors import Unreachable
from mdsmix.sources import record_batches
from mdsmix.storage import locate
from tests.converting import (
    Project,
    assert_refused,
    documents,
    mdsmix,
    pairs,
    read_token_rows,
    run_ok,
)

POOL = [f"text {n}, the same wherever it is" for n in range(12)]
KEEP, DROP = "streams.web.duplicates=keep", "streams.web.duplicates=drop"


@pytest.fixture
def project(project: Project) -> Project:
    project.set_window_size(400)
    return configure(project)


def configure(project: Project, **stream: Any) -> Project:
    return project.configure(documents("*.jsonl*", layout="document", **stream))


def write(project: Project, *contents: Sequence[int], **named: Sequence[int]) -> None:
    """Write files of records: a number of POOL is its text, a larger number a text that is nowhere
    else, and -1 a bad record.
    """
    pool: dict[int, Any] = {-1: {"text": 5}} | dict(enumerate(POOL))
    for name, numbers in [*enumerate(contents), *named.items()]:
        project.write_source([pool.get(n, f"only number {n}") for n in numbers], f"{name}.jsonl")


def drop_repeats(rows: list[list[int]]) -> list[list[int]]:
    return [list(row) for row in dict.fromkeys(map(tuple, rows))]


def test_the_first_of_equal_records_is_kept(project: Project) -> None:
    """Some files are empty. Records are repeated within a file, across files, or not at all. A
    window of several small files has a batch for each.
    """
    project.patch.setattr(record_batches, "BLOCK_BYTES", 1)
    rng, pool = random.Random(0), range(-1, 2 * len(POOL))
    write(project, *(rng.choices(pool, k=n) for n in (12, 0, 3, 3, 2, 40, 1, 3, 40)), [0, 99, 0])
    project.run()
    all_rows = project.rows
    all_records = project.manifest.records
    assert all_records.duplicates == len(all_rows) - len(drop_repeats(all_rows))
    dropped = project.convert_into(DROP)
    assert dropped.rows == drop_repeats(all_rows)
    records = dropped.manifest.records
    assert records.filtered.get("duplicate", 0) == all_records.duplicates
    assert records.adds_up
    assert (records.read, records.quarantined) == (all_records.read, all_records.quarantined)
    assert records.duplicates == 0
    project.run(DROP)  # only units that lose records are converted
    assert project.rows == drop_repeats(all_rows)
    assert project.manifest == dropped.manifest


def test_an_edit_redoes_only_units_that_lose_other_records(project: Project) -> None:
    """`b` repeats a record of `a`, and `d` one of `c`. If `a` loses it, `b` keeps its copy."""
    write(project, a=[1, *range(20, 28)], b=[1, *range(30, 38)], c=[2, *range(40, 48)])
    write(project, d=[2, *range(50, 58)], e=range(60, 68))
    configure(project, duplicates="drop").run()
    assert project.manifest.records.filtered == {"duplicate": 2}
    before = project.keys
    write(project, a=[3, *range(20, 28)])
    assert project.run().done == 2
    assert project.manifest.records.filtered == {"duplicate": 1}
    assert sum(old != new for old, new in zip(before, project.keys, strict=True)) == 2
    write(project, **{"0": [4, *range(70, 78)]})  # new, and equal to no other
    assert project.run().done == 1
    assert project.convert_into().manifest == project.manifest
    with project.patch.context() as patch:  # without a change nothing is read or compared
        patch.setattr(finished_units, "read_blobs", None)
        assert project.run().done == 0
        assert "0 of " in project.convert("--dry-run").out


def test_a_fingerprint_depends_only_on_the_content_of_a_record(project: Project) -> None:
    """Spaces, unread fields and escaped characters don't matter. test_kinds_sampling.py tests this
    for conversations.
    """
    same = ['{"text": "a é"}', '{"id": 7, "text":"a \\u00e9"}', ' {"text":"a é","id":8 } ']
    (project.folder / "a.jsonl").write_text("\n".join([*same, '{"text":"a e"}']))
    texts = [("ab", "c"), ("a", "bc"), ("ab", "c")]
    project.write_source([{"prompt": p, "response": r} for p, r in texts], "pairs.json")
    streams = {"web": documents("a.jsonl", layout="document"), "faq": pairs("pairs.json")}
    outcomes = project.configure(streams=streams, max_seq_len=64).run_all()
    assert [outcome.manifest.records.duplicates for outcome in outcomes.values()] == [2, 1]


def test_with_a_limit_duplicates_are_counted_and_not_dropped(project: Project) -> None:
    write(project, [1, 1, -1, 2, 30], [2, 31, 1, 32], range(40, 80))
    for setting in (DROP, KEEP):
        records = project.run(setting, limit=8).manifest.records
        assert (records.read, records.bad, records.duplicates) == (8, 1, 3)
        assert not records.filtered


def test_gc_keeps_fingerprints_in_use_and_a_repair_makes_the_same_shards(project: Project) -> None:
    write(project, range(20), range(10, 30))
    configure(project, duplicates="drop").run()
    before = project.files
    for shard in project.shards[-2:]:
        shard.write_bytes(b"damaged")
    run_ok("repair", project.train, "--recipe", project.recipe)
    assert project.files == before
    (project.folder / "1.jsonl").unlink()
    project.run(reencode=True)
    gone = {item.kind for item in gc.delete_garbage(locate(project.train), 0, print)}
    assert "fingerprints" in gone
    assert sum(name.endswith(".hashes") for name in project.files) == len(project.keys)


def test_a_share_above_one_percent_is_a_warning_with_the_fix(project: Project) -> None:
    write(project, range(100), [5])
    assert "duplicate" not in project.convert_ok().out
    write(project, range(100), [5, 5])
    (row,) = json.loads(project.convert_ok("--json").out)["rows"]
    assert row["duplicates"] == 2
    output = project.convert_ok(f"local={project.folder / 'new'}").out
    assert "WARNING: 2 of 102 records (2.0%) are exact duplicates" in output
    output = project.convert_ok(DROP).out
    assert "filtered: 2 duplicate" in output
    assert "WARNING" not in output
    project.configure(streams={"old": {"local": str(project.folder), "duplicates": "drop"}})
    sentence = "streams.old: duplicates is only for streams with a source"
    assert_refused(mdsmix("check", project.recipe), 2, sentence)


KEPT_RULES: list[dict[str, Any]] = [
    {"where": "of == 1"},
    {"min_tokens": 5, "add_eos": False},
    {"holdout": "10%"},
]


def test_the_share_of_repeats_is_that_of_the_written_records(project: Project) -> None:
    """The rules drop most of the 900 other records. Each split is judged by its own rows."""
    short = [{"text": letter, "of": 0} for letter in "xyz" * 300]
    equal = [{"text": f"one of {n}, kept", "of": 1} for n in range(12) for _ in range(3)]
    project.write_source([*short, *equal])
    for number, rule in enumerate(KEPT_RULES):
        source = {"path": "*.jsonl", "text": "text"} | {k: rule[k] for k in ("where",) if k in rule}
        stream = {k: v for k, v in rule.items() if k != "where"}
        configure(project, source=source, **stream)
        output = project.convert_ok(f"local={project.folder / str(number)}").out
        for split in ("train", "eval") if "holdout" in rule else ("train",):
            folder = project.folder / str(number) / "web" / split
            rows = read_token_rows(folder)
            repeats = len(rows) - len(drop_repeats(rows))
            assert repeats > 0.01 * len(rows)
            share = f"({repeats / len(rows):.1%}) are exact duplicates"
            again = "trained again" if split == "train" else "counted again in the evaluation"
            words = f"{repeats:,} of {len(rows):,} records {share} and are {again}"
            assert words in output, rule
            of_stream = f"{repeats:,} of {len(rows):,} records of"
            checked = mdsmix("check", folder).out
            exact = f"({repeats / len(rows):.1%}) are exact duplicates of earlier records"
            assert (of_stream in checked, exact in checked) == (True, True), rule


def test_shares_of_bad_and_filtered_records_ignore_records_that_where_drops(
    project: Project,
) -> None:
    """In a source of 1,000 records `where` keeps 10; of these 3 are bad, and 2 are too short."""
    texts: list[Any] = ["a text that is kept"] * 5 + ["x"] * 2 + [5] * 3
    matching = [{"text": text, "of": 1} for text in texts]
    project.write_source([*matching, *({"text": f"number {n}", "of": 0} for n in range(990))])
    source = {"path": "*.jsonl", "text": "text", "where": "of == 1"}
    output = configure(project, source=source, min_tokens=3).convert_ok().out
    assert "WARNING: 20.0% of the records are filtered: 2 min_tokens, 990 where" in output
    assert "WARNING: 30.0% of the records are quarantined: 3 field_not_text" in output
    assert "3 of 10 records of web (30.0%) were bad" in mdsmix("check", project.recipe).out


def test_a_source_changed_under_the_same_stamp_is_an_error_until_it_is_read_again(
    project: Project,
) -> None:
    """Its fingerprints are in a segment of a run that dropped nothing."""
    project.patch.setattr(finished_units, "FEWEST_TO_JOIN", 1)
    write(project, range(10, 30), range(10, 20))
    project.run()
    path = project.folder / "1.jsonl"
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"number 19", b"number 77"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert_refused(project.convert(DROP), 4, "run the same command with --verify-source")
    project.convert_ok(DROP, "--verify-source")
    assert project.manifest.records.filtered == {"duplicate": 9}


Pairs = list[tuple[int, int]]
half = st.sampled_from([0, 1, 7 << 60, 7 << 60 | 1, 2**64 - 1])
some_windows = st.lists(st.lists(st.tuples(half, half), max_size=20), max_size=6)
"Fingerprints of one bucket, of one first half, and records without a fingerprint (0, 0)."


def make_arrays(windows: list[Pairs]) -> Iterator[Fingerprints]:
    for window in windows:
        yield np.array(window, np.uint64).reshape(-1, 2)


def list_set_bits(bits: bytes) -> list[int]:
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return np.flatnonzero(flags).tolist()


@given(some_windows, st.integers(1, 30))
def test_repeats_are_found_as_by_a_set(windows: list[Pairs], rows_at_once: int) -> None:
    earlier = set[tuple[int, int]]()
    expected = list[list[int]]()
    for window in windows:
        repeats = list[int]()
        for number, fingerprint in enumerate(window):
            if fingerprint in earlier:
                repeats.append(number)
            if fingerprint != (0, 0):
                earlier.add(fingerprint)
        expected.append(repeats)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "ROWS_AT_ONCE", rows_at_once)
        assert count_repeats(make_arrays(windows)) == sum(map(len, expected))
        assert [list_set_bits(bits) for bits in find_repeats(make_arrays(windows))] == expected


def test_memory_does_not_grow_with_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the records are equal."""
    monkeypatch.setattr(duplicates, "ROWS_AT_ONCE", 4096)

    def half_equal(windows: int) -> Iterator[Fingerprints]:
        rng = np.random.default_rng(0)
        for _ in range(windows):
            window = rng.integers(1, 2**63, (1000, 2), dtype=np.uint64)
            window[::2] = 5
            yield window

    def peak(windows: int) -> int:
        tracemalloc.start()
        count_repeats(half_equal(windows))
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak_bytes

    peak(1)  # the first call imports 1 to 4 MB
    large, small = (min(peak(windows) for _ in range(2)) for windows in (64, 16))
    assert large < 1.3 * small < 2 << 20


def test_temporary_files_are_deleted_and_a_full_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(duplicates, "ROWS_AT_ONCE", 3)
    windows = [[(n, n)] for n in range(1, 9)]
    assert count_repeats(make_arrays(windows * 2)) == 8
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    message = r"fingerprints of the records cannot be compared in .*TMPDIR"
    with pytest.raises(Unreachable, match=message):
        count_repeats(make_arrays(windows))
