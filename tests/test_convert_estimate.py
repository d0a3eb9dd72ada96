"""About how many tokens a source holds is estimated for files of every format, and little of it is read."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from mdsmix import sources
from mdsmix.convert import budget_share as estimate
from mdsmix.convert.budget_share import SourceEstimate, estimate_source
from mdsmix.convert.job import make_job
from mdsmix.encode.pretrained import open_tokenizer
from mdsmix.kinds import open_recipe
from mdsmix.sources import beginnings
from mdsmix.storage import Stat, locate
from tests.converting import documents, run_recipe, write_jsonl, write_recipe
from tests.formats import write

WORDS = [
    "the",
    "a",
    "of",
    "library",
    "loader",
    "token",
    "shard",
    "window",
    "sample",
    "record",
    "stream",
    "budget",
    "and",
    "or",
    "in",
    "is",
    "to",
]


def texts(count: int, seed: int = 0, longest: int = 400) -> list[dict[str, Any]]:
    """Of 5 words to 400, most of them short."""
    rng = random.Random(seed)
    lengths = [5 + int(longest * rng.random() ** 3) for _ in range(count)]
    return [{"text": " ".join(rng.choices(WORDS, k=n)), "id": n} for n in lengths]


def estimated(folder: Path, tokenizer: Path, **stream: Any) -> tuple[SourceEstimate | None, Path]:
    stream = documents("data/mds" if (folder / "data/mds").exists() else "data/*", **stream)
    recipe = write_recipe(folder, tokenizer, streams={"web": stream})
    opened = open_recipe(recipe)
    spec = opened.streams["web"]
    assert spec.source
    job = make_job(opened, spec, open_tokenizer(opened.tokenizer), None)
    return estimate_source(job, sources.find(spec.source.path, folder)), recipe


def test_it_is_near_to_what_is_there(tmp_path: Path, tokenizer_folder: Path) -> None:
    for n in range(5):
        write_jsonl(tmp_path / f"data/{n}.jsonl", texts(300, n))
    found, recipe = estimated(tmp_path, tokenizer_folder)
    (outcome,) = run_recipe(recipe)
    totals = outcome.manifest.totals
    assert found is not None
    assert found.tokens == pytest.approx(totals.tokens + totals.lost_tokens, rel=0.05)
    assert found.records == pytest.approx(1_500, rel=0.1)
    assert 0 <= found.error < 0.05
    assert 0.8 < found.spread < 1.3
    assert found.places == 5


@pytest.mark.parametrize(
    "suffix", ["jsonl.bz2", "json", "parquet", "arrow", "feather", "tar.gz", "mds"]
)
def test_files_of_any_format(
    tmp_path: Path, tokenizer_folder: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed and columnar ones too, whose bytes on the disk say nothing, and of which a third is decoded."""
    records = texts(300 if suffix == "mds" else 900)
    write(tmp_path / "data", suffix, records)
    monkeypatch.setattr(beginnings, "BYTES", 150_000)
    found, recipe = estimated(tmp_path, tokenizer_folder)
    (outcome,) = run_recipe(recipe)
    totals = outcome.manifest.totals
    assert found is not None
    assert found.tokens == pytest.approx(totals.tokens + totals.lost_tokens, rel=0.12)


def test_of_a_packed_file_the_stored_bytes_are_counted_that_a_block_takes(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """It is larger than a block of 8 MB, and packs eightfold where it is planned as fourfold."""
    lines = write_jsonl(tmp_path / "a.jsonl", texts(100)).read_bytes() * 400
    (tmp_path / "data").mkdir()
    packed = zstandard.ZstdCompressor(level=1).compress
    frames = b"".join(packed(lines[n : n + 100_000]) for n in range(0, len(lines), 100_000))
    (tmp_path / "data/a.jsonl.zst").write_bytes(frames)
    found, _ = estimated(tmp_path, tokenizer_folder)
    assert found is not None
    assert found.records == pytest.approx(40_000, rel=0.15)
    assert not 0.8 < len(lines) / (4 * len(frames)) < 1.2


def test_one_file_more_changes_what_is_seen_of_one_at_most() -> None:
    place = locate("/nowhere")
    files = [
        sources.SourceFile(
            location=place / f"{n}.jsonl", stat=Stat(size=9, stamp=""), name=f"a/{n}.jsonl"
        )
        for n in range(200)
    ]
    all_but_one = {unit.name for unit in sources.chosen(files[1:])}
    moved = [replace(file, name=f"b/c/{file.name[2:]}") for file in files]
    assert len(all_but_one) == beginnings.MOST
    assert len(all_but_one - {unit.name for unit in sources.chosen(files)}) <= 1
    assert [u.name[2:] for u in sources.chosen(files)] == [
        u.name[4:] for u in sources.chosen(moved)
    ]


def test_what_was_seen_is_remembered_until_it_changes(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "data/a.jsonl", texts(50))
    first, _ = estimated(tmp_path, tokenizer_folder)
    with monkeypatch.context() as patched:
        patched.setattr(estimate, "look", None)
        assert estimated(tmp_path, tokenizer_folder)[0] == first
        assert estimated(tmp_path, tokenizer_folder, holdout="10%", sample="3%")[0] == first
    write_jsonl(tmp_path / "data/a.jsonl", texts(80, 1))
    assert estimated(tmp_path, tokenizer_folder)[0] != first


def test_bad_and_filtered_records_count_for_the_bytes_they_take(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    records = texts(200)
    write_jsonl(
        tmp_path / "data/a.jsonl",
        [r if n % 2 else {"body": r["text"]} for n, r in enumerate(records)],
    )
    found, recipe = estimated(tmp_path, tokenizer_folder)
    (outcome,) = run_recipe(recipe)
    totals = outcome.manifest.totals
    assert found is not None
    assert found.tokens == pytest.approx(totals.tokens + totals.lost_tokens, rel=0.02)
    write_jsonl(tmp_path / "data/a.jsonl", [{"body": "nothing"}])
    assert estimated(tmp_path, tokenizer_folder)[0] is None


def test_a_field_that_nothing_reads_may_be_nested_as_deep_as_can_be_read(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    deep = f"{'[' * 1_000}{']' * 1_000}"
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text(f'{{"text": "a few words", "more": {deep}}}\n' * 9)
    found, _ = estimated(tmp_path, tokenizer_folder, layout="document", min_tokens=1)
    assert found is not None
    assert found.records == pytest.approx(9, rel=0.01)
    assert found.spread == 0
