"""A stranger adds a format as one file and one line that registers it: every command works on it, by its own words."""

import zipfile
from pathlib import Path

import pytest

from mdsmix.convert.known_sources import unit_stamp
from mdsmix.sources import Unit, find, plan, read
from mdsmix.sources.formats import FORMATS
from mdsmix.storage import locate
from tests.converting import (
    documents,
    manifest_of,
    mdsmix,
    quarantined,
    run_recipe,
    samples,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.counting import counted
from tests.faults import Proxy
from tests.zip_format import Zip

WINDOW = 2000


@pytest.fixture
def zips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three small archives that are grouped, one of several splits, and a JSON Lines file among them."""
    monkeypatch.setitem(FORMATS, ".zip", Zip())
    windows(monkeypatch, WINDOW)
    for name, count in {"a": 5, "b": 120, "c": 5, "d": 5}.items():
        write_zip(tmp_path / f"{name}.zip", count)
    write_jsonl(tmp_path / "e.jsonl", [{"text": "a document that is a line"}] * 9)
    return tmp_path


def write_zip(path: Path, count: int, word: str = "some words") -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for n in range(count):
            text = f"{word} of the text number {n} of {path.stem}, and a few more of them"
            packed.writestr(f"{n}.txt", b"\xff" if n == 3 else text.encode())


def recipe_of(folder: Path, tokenizer: Path) -> Path:
    stream = documents([str(folder / "*.zip"), str(folder / "*.jsonl")], layout="document")
    return write_recipe(folder, tokenizer, max_seq_len=64, streams={"web": stream})


def test_every_command_works_on_it_and_bad_records_are_named_by_its_words(
    zips: Path, tokenizer_folder: Path
) -> None:
    recipe, published = recipe_of(zips, tokenizer_folder), zips / "out/web/train"
    for command in (("convert", recipe), ("check", recipe), ("inspect", published), ("verify", published)):  # fmt: skip
        answer = mdsmix(*command)
        assert answer.code == 0, answer.out + answer.err
    records = manifest_of(published).records
    assert (records.read, records.quarantined) == (144, {"invalid_utf8": 4})
    assert len(samples(published)) == 140
    assert "up to date" in mdsmix("convert", recipe).out
    bad = sorted(quarantined(published), key=lambda record: record["file"])
    said = {"member": "3.txt", "length": 1, "reason": "invalid_utf8", "raw_base64": "My50eHQg/w=="}
    assert bad == [{"file": f"{name}.zip", **said} for name in "abcd"]


def test_its_splits_are_units_and_a_changed_or_damaged_file_is_noticed(
    zips: Path, tokenizer_folder: Path
) -> None:
    recipe = recipe_of(zips, tokenizer_folder)
    (first,) = run_recipe(recipe)
    large = splits_of_b(zips)
    assert 3 <= large < first.units
    write_zip(zips / "b.zip", 120, word="other words")
    (second,) = run_recipe(recipe)
    assert second.done == large
    whole = (zips / "b.zip").read_bytes()
    (zips / "b.zip").write_bytes(whole[: len(whole) // 2])
    answer = mdsmix("convert", recipe)
    assert (answer.code, "b.zip is no whole zip" in answer.err) == (4, True)


def splits_of_b(folder: Path) -> int:
    return sum(unit.name == "b.zip" for unit in plan(find([str(folder / "*.zip")], folder), WINDOW))


def test_only_the_fields_that_the_shape_asks_for_are_read_and_remembered(zips: Path) -> None:
    def first(pattern: str, *fields: str) -> Unit:
        return plan(find([str(zips / pattern)], zips), WINDOW, fields)[0]

    for fields, expected in (((), {"name", "text"}), (("text",), {"text"})):
        unit = first("*.zip", *fields)
        assert unit.fields == fields
        assert {key for batch in read(unit) for record in batch.records for key in record} == expected  # fmt: skip
    assert first("e.jsonl", "text").fields == (), "a line is decoded as a whole"
    assert len({unit_stamp(first("b.zip", *f)) for f in ((), ("text",), ("name",))}) == 3
    assert unit_stamp(first("e.jsonl", "text")) == unit_stamp(first("e.jsonl", "name"))


def test_in_a_bucket_it_is_read_by_ranges(
    zips: Path, tokenizer_folder: Path, bucket: str, proxy: Proxy
) -> None:
    for name in "abcd":
        locate(f"s3://{bucket}/{name}.zip").write((zips / f"{name}.zip").read_bytes())
    stream = documents(f"s3://{bucket}/*.zip", layout="document")
    recipe = write_recipe(zips, tokenizer_folder, streams={"web": stream}, local=str(zips / "s3"))
    with counted(proxy) as seen:
        (outcome,) = run_recipe(recipe, workers=2)
    assert outcome.manifest.records.read == 135
    assert seen.at("b.zip") == {"GET": 1 + splits_of_b(zips)}, "its directory, and a split each"
    assert seen.at("a.zip") == seen.at("c.zip") == seen.at("d.zip") == {"GET": 1}
