"""Duplicates: of equal records the first in the order of the published stream stays, whoever works,
in whatever order, and what changes elsewhere redoes only the units that lose other records than
before. Fingerprints are joined as a dict would join them, however many are sorted at once.
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

from mdsmix.conversion import duplicates as repeats
from mdsmix.conversion import finished_units, gc
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

POOL = [f"text {n}, the same wherever it stands" for n in range(12)]
KEEP, DROP = "streams.web.duplicates=keep", "streams.web.duplicates=drop"


@pytest.fixture
def project(project: Project) -> Project:
    project.set_window_size(400)
    return says(project)


def says(project: Project, **stream: Any) -> Project:
    return project.configure(documents("*.jsonl*", layout="document", **stream))


def write(project: Project, *contents: Sequence[int], **named: Sequence[int]) -> None:
    """Records of the pool; a number beyond it is one that stands nowhere else, -1 a bad one."""
    pool: dict[int, Any] = {-1: {"text": 5}} | dict(enumerate(POOL))
    for name, numbers in [*enumerate(contents), *named.items()]:
        project.write_source([pool.get(n, f"only number {n}") for n in numbers], f"{name}.jsonl")


def unique(rows: list[list[int]]) -> list[list[int]]:
    return [list(row) for row in dict.fromkeys(map(tuple, rows))]


def test_the_first_of_equal_records_stays(project: Project) -> None:
    """Files of any length, none among them, whose records stand in one another, in themselves, or
    nowhere else. A window of several small ones has a batch for each.
    """
    project.patch.setattr(record_batches, "BLOCK_BYTES", 1)
    rng, pool = random.Random(0), range(-1, 2 * len(POOL))
    write(project, *(rng.choices(pool, k=n) for n in (12, 0, 3, 3, 2, 40, 1, 3, 40)), [0, 99, 0])
    project.run()
    kept, all_in = project.rows, project.manifest.records
    assert all_in.duplicates == len(kept) - len(unique(kept))
    dropped = project.convert_into(DROP)
    assert dropped.rows == unique(kept)
    records = dropped.manifest.records
    assert records.filtered.get("duplicate", 0) == all_in.duplicates
    assert records.adds_up
    assert (records.read, records.quarantined) == (all_in.read, all_in.quarantined)
    assert records.duplicates == 0
    project.run(DROP)  # over what was kept: only what loses records is done
    assert project.rows == unique(kept)
    assert project.manifest == dropped.manifest


def test_an_edit_elsewhere_redoes_only_units_that_lose_other_records(project: Project) -> None:
    """`b` has a record of `a`, `d` has one of `c`: when it is edited away from `a`, `b` has it
    again.
    """
    write(project, a=[1, *range(20, 28)], b=[1, *range(30, 38)], c=[2, *range(40, 48)])
    write(project, d=[2, *range(50, 58)], e=range(60, 68))
    says(project, duplicates="drop").run()
    assert project.manifest.records.filtered == {"duplicate": 2}
    before = project.keys
    write(project, a=[3, *range(20, 28)])
    assert project.run().done == 2
    assert project.manifest.records.filtered == {"duplicate": 1}
    assert sum(old != new for old, new in zip(before, project.keys, strict=True)) == 2
    write(project, **{"0": [4, *range(70, 78)]})  # new, and nobody's double
    assert project.run().done == 1
    assert project.convert_into().manifest == project.manifest
    with project.patch.context() as patch:  # nothing is read or joined where nothing changed
        patch.setattr(finished_units, "read_blobs", None)
        assert project.run().done == 0
        assert "0 of " in project.convert("--dry-run").out


def test_fingerprints_are_of_what_the_record_says(project: Project) -> None:
    """Not of spaces, fields that are not read, or how characters are escaped;
    test_kinds_sampling.py tells it of conversations.
    """
    same = ['{"text": "a é"}', '{"id": 7, "text":"a \\u00e9"}', ' {"text":"a é","id":8 } ']
    (project.folder / "a.jsonl").write_text("\n".join([*same, '{"text":"a e"}']))
    asked = [("ab", "c"), ("a", "bc"), ("ab", "c")]
    project.write_source([{"prompt": p, "response": r} for p, r in asked], "pairs.json")
    streams = {"web": documents("a.jsonl", layout="document"), "faq": pairs("pairs.json")}
    outcomes = project.configure(streams=streams, max_seq_len=64).run_all()
    assert [each.manifest.records.duplicates for each in outcomes.values()] == [2, 1]


def test_a_first_look_drops_nothing_and_counts(project: Project) -> None:
    write(project, [1, 1, -1, 2, 30], [2, 31, 1, 32], range(40, 80))
    for setting in (DROP, KEEP):
        records = project.run(setting, limit=8).manifest.records
        assert (records.read, records.bad, records.duplicates) == (8, 1, 3)
        assert not records.filtered


def test_gc_keeps_fingerprints_in_use_and_a_repair_makes_the_same_shards(project: Project) -> None:
    write(project, range(20), range(10, 30))
    says(project, duplicates="drop").run()
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


def test_a_share_above_one_percent_is_said_with_the_way_out(project: Project) -> None:
    write(project, range(100), [5])
    assert "duplicate" not in project.convert_ok().out
    write(project, range(100), [5, 5])
    (row,) = json.loads(project.convert_ok("--json").out)["rows"]
    assert row["duplicates"] == 2
    said = project.convert_ok(f"local={project.folder / 'new'}").out
    assert "WARNING: 2 of 102 records (2.0%) are exact duplicates" in said
    said = project.convert_ok(DROP).out
    assert "filtered: 2 duplicate" in said
    assert "WARNING" not in said
    project.configure(streams={"old": {"local": str(project.folder), "duplicates": "drop"}})
    sentence = "streams.old: duplicates is for streams with a source"
    assert_refused(mdsmix("check", project.recipe), 2, sentence)


KEPT_RULES: list[dict[str, Any]] = [
    {"where": "of == 1"},
    {"min_tokens": 5, "add_eos": False},
    {"holdout": "10%"},
]


def test_the_share_of_repeats_is_of_the_records_kept(project: Project) -> None:
    """Among 900 other records, of which the rule keeps few or none: each split is judged by the
    rows that it holds.
    """
    short = [{"text": letter, "of": 0} for letter in "xyz" * 300]
    equal = [{"text": f"one of {n}, kept", "of": 1} for n in range(12) for _ in range(3)]
    project.write_source([*short, *equal])
    for number, rule in enumerate(KEPT_RULES):
        source = {"path": "*.jsonl", "text": "text"} | {k: rule[k] for k in ("where",) if k in rule}
        stream = {k: v for k, v in rule.items() if k != "where"}
        says(project, source=source, **stream)
        told = project.convert_ok(f"local={project.folder / str(number)}").out
        for split in ("train", "eval") if "holdout" in rule else ("train",):
            folder = project.folder / str(number) / "web" / split
            rows = read_token_rows(folder)
            repeats = len(rows) - len(unique(rows))
            assert repeats > 0.01 * len(rows)
            share = f"({repeats / len(rows):.1%}) are exact duplicates"
            again = "trained again" if split == "train" else "counted again in the evaluation"
            words = f"{repeats:,} of {len(rows):,} records {share} and are {again}"
            assert words in told, rule
            of_stream = f"{repeats:,} of {len(rows):,} records of"
            checked = mdsmix("check", folder).out
            exact = f"({repeats / len(rows):.1%}) are exact duplicates of earlier ones"
            assert (of_stream in checked, exact in checked) == (True, True), rule


def test_bad_and_filtered_records_are_shares_of_those_that_the_recipe_asks_for(
    project: Project,
) -> None:
    """3 of 10 records that the condition keeps are bad, and 2 are too short, in a source
    of 1,000.
    """
    texts: list[Any] = ["a text that is kept"] * 5 + ["x"] * 2 + [5] * 3
    asked = [{"text": text, "of": 1} for text in texts]
    project.write_source([*asked, *({"text": f"number {n}", "of": 0} for n in range(990))])
    source = {"path": "*.jsonl", "text": "text", "where": "of == 1"}
    told = says(project, source=source, min_tokens=3).convert_ok().out
    assert "WARNING: 20.0% of the records are filtered: 2 min_tokens, 990 where" in told
    assert "WARNING: 30.0% of the records are quarantined: 3 field_not_text" in told
    assert "3 of 10 records of web (30.0%) were bad" in mdsmix("check", project.recipe).out


def test_a_source_changed_behind_its_stamp_is_refused_and_read_when_asked(project: Project) -> None:
    """Its fingerprints lie in a segment, from a run that dropped nothing."""
    project.patch.setattr(finished_units, "FEWEST", 1)
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
"Halves that meet: fingerprints of one bucket, of one first half, and none at all (0, 0)."


def arrays(windows: list[Pairs]) -> Iterator[Fingerprints]:
    for window in windows:
        yield np.array(window, np.uint64).reshape(-1, 2)


def ordinals(bits: bytes) -> list[int]:
    found = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return np.flatnonzero(found).tolist()


@given(some_windows, st.integers(1, 30))
def test_repeats_are_those_of_a_set(windows: list[Pairs], at_once: int) -> None:
    seen, expected = set[tuple[int, int]](), list[list[int]]()
    for window in windows:
        expected.append([])
        for number, each in enumerate(window):
            expected[-1] += [number] * (each in seen)
            seen |= {each} - {(0, 0)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "ROWS_AT_ONCE", at_once)
        assert count_repeats(arrays(windows)) == sum(map(len, expected))
        assert [ordinals(bits) for bits in find_repeats(arrays(windows))] == expected


def test_memory_does_not_grow_with_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with a record that stands in it all over."""
    monkeypatch.setattr(repeats, "ROWS_AT_ONCE", 4096)

    def half_equal(windows: int) -> Iterator[Fingerprints]:
        rng = np.random.default_rng(0)
        for _ in range(windows):
            window = rng.integers(1, 2**63, (1000, 2), dtype=np.uint64)
            window[::2] = 5
            yield window

    def peak(windows: int) -> int:
        tracemalloc.start()
        count_repeats(half_equal(windows))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(1)  # what a first join imports is 1 to 4 MB
    large, small = (min(peak(windows) for _ in range(2)) for windows in (64, 16))
    assert large < 1.3 * small < 2 << 20


def test_files_go_and_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(repeats, "ROWS_AT_ONCE", 3)
    windows = [[(n, n)] for n in range(1, 9)]
    assert count_repeats(arrays(windows * 2)) == 8
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    full = r"fingerprints of the records cannot be compared in .*TMPDIR"
    with pytest.raises(Unreachable, match=full):
        count_repeats(arrays(windows))
