"""The quarantine holds the bad records of the published stream, and no others. Their share of the
whole stream decides; a run stops early only where that share can be told already; and where most
are bad the sentence says what to do about it.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from pyarrow import parquet

from mdsmix.conversion.bad_records import format_bad_record, refuse_too_many_bad
from mdsmix.conversion.job import make_job
from mdsmix.errors import RecipeError, TooManyBadRecords
from mdsmix.kinds import open_recipe
from mdsmix.shards.counts import Records
from mdsmix.sources.format import Item
from mdsmix.tokenizer.card import open_tokenizer
from tests.converting import Answer, Project, chats, documents, pairs, read_files

GOOD = [f"a document, number {n}" for n in range(20)]
LINES = [json.dumps({"text": f"document {n}"}) for n in range(20)]
ARRAY = ("begins with [, so it is one JSON array", "name it .json, or set source.format: json")
TABLE = '1,hello\n"[{""role"": ""user"", ""content"": ""a""}, {""role"": ""who"", ""content"": ""a""}]",b\n'


@pytest.fixture
def two(project: Project) -> Project:
    """Two files with a bad record each, in small units."""
    project.set_window_size(100)
    for name in "ab":
        project.write_source([*GOOD[:10], {"name": name}, *GOOD[10:]], f"{name}.jsonl")
    return project


def where(project: Project) -> list[tuple[str, int]]:
    return sorted((record["file"], record["line"]) for record in project.bad)


def test_a_record_that_was_mended_is_no_longer_there(two: Project) -> None:
    two.run()
    assert where(two) == [("a.jsonl", 11), ("b.jsonl", 11)]
    two.write_source([*GOOD[:10], {"text": "a"}, *GOOD[10:]])
    two.run()
    assert where(two) == [("b.jsonl", 11)]
    assert two.manifest.records.bad == 1
    two.write_source(GOOD, "b.jsonl")
    two.run()
    assert not [name for name in read_files(two.out) if "quarantine" in name]


@pytest.mark.parametrize("window", [100, 1 << 20])
def test_equal_files_or_files_of_one_unit_have_bad_records_each(two: Project, window: int) -> None:
    """They are named as their files are named now."""
    two.set_window_size(window)
    shutil.copy(two.folder / "a.jsonl", two.folder / "b.jsonl")
    assert (two.run().units == 1) == (window > 100)
    assert two.manifest.records.bad == 2
    for name in ("b.jsonl", "c.jsonl"):
        assert where(two) == [("a.jsonl", 11), (name, 11)]
        (two.folder / name).rename(two.folder / "c.jsonl")
        two.run()


def test_lines_above_shift_the_number_of_a_record_that_is_not_done_again(two: Project) -> None:
    """Its unit is reused; what it is told by is the line that an editor shows now."""
    two.run()
    path = two.folder / "a.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    shorter = first.replace(b"document", b"d")
    filler = b"\n" * (len(first) - len(shorter))  # the bytes behind stay where they are
    path.write_bytes(b"".join([shorter, filler, *rest]))
    assert two.run().done == 1
    (record,) = (r for r in two.bad if r["file"] == "a.jsonl")
    assert record["line"] == 11 + len(filler)
    assert path.read_bytes()[record["offset"] :].startswith(b'{"name":"a"}')


def test_lost_bad_records_are_found_again_and_damaged_ones_are_named(two: Project) -> None:
    two.run()
    whole, first = read_files(two.out), min((two.train / "quarantine").iterdir())
    kept = two.train / ".mdsmix" / f"{first.name.partition('.')[0]}.unit"
    (two.train / "index.json").unlink()
    kept.write_bytes(kept.read_bytes()[:-9] + b"no frame.")
    answer = two.convert()
    assert (answer.code, f"{kept.name} is damaged" in answer.err) == (4, True)
    assert two.convert("--verify-target").code == 0
    for lost in (kept, two.train / "index.json"):
        lost.unlink()
    assert two.run().done == 1
    assert read_files(two.out) == whole


def say(raw: bytes, detail: Any = None, has_images: bool = False) -> dict[str, Any]:
    """What is said of a bad record."""
    names = tuple(f"field {number}" for number in range(70))
    origin = Item(3, {"row": 4}, len(raw), raw, fields=names, file="a.parquet")
    told: Any = SimpleNamespace(origin=origin, reason="missing_field", detail=detail)
    return dict(json.loads(format_bad_record(told, has_images)))


def test_what_is_said_of_a_bad_record() -> None:
    """Of a table with very many columns the first ones; what the template said; bytes that are no
    text as base64.
    """
    assert say(b"\xff", detail={"template": "no"}) == {
        "file": "a.parquet",
        "row": 4,
        "length": 1,
        "reason": "missing_field",
        "detail": {"template": "no"},
        "fields": [f"field {number}" for number in range(64)],
        "raw_base64": "/w==",
    }


def test_of_images_in_a_bad_record_the_bytes_are_left_out_and_of_words_none() -> None:
    image = bytes(range(256)) * 8
    plain, lines = (way(image).decode() for way in (base64.b64encode, base64.encodebytes))
    words = "\n".join(["words", "that", "stand", "below", "each", "other"] * 60)
    left_out = r"(data:image/png;base64,)?<\d+ characters of base64 left out>\n?"
    ways = [plain, lines, quote(plain, ""), f"data:image/png;base64,{plain}"]
    for way in [*ways, base64.urlsafe_b64encode(image).decode()]:
        raw = json.dumps({"image": way, "text": words}).encode()
        kept = json.loads(say(raw, has_images=True)["raw"])
        assert kept["text"] == words
        assert re.fullmatch(left_out, kept["image"])
        assert say(raw)["raw"] == raw.decode()


@pytest.fixture
def strict(project: Project) -> Project:
    """A file of ten records is a unit, and a tenth may be bad."""
    project.set_window_size(600)
    return project.configure(max_bad=None)


def holds(project: Project, shares: Sequence[float], folder: object = ".") -> None:
    """A file for each share of bad records, which come first: a work unit each, of 10 records."""
    for file, share in enumerate(shares):
        names = ["body" if n < round(10 * share) else "text" for n in range(10)]
        texts = [f"text {n:03} of file {file:03}, some words" for n in range(10)]
        records = [{name: text} for name, text in zip(names, texts, strict=True)]
        project.write_source(records, f"{folder}/{file:02}.jsonl")


def said(answer: Answer) -> str:
    (error,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    return error


def test_a_source_that_is_bad_from_the_beginning_is_not_gone_through(strict: Project) -> None:
    """The same sentence whoever works and however often, and nothing more is done for it; what it
    names can be read.
    """
    holds(strict, [1.0] * 40)
    answer = strict.convert("--workers", 4)
    assert answer.code == 5
    assert said(answer) == (
        "error: stream web: 30 of 30 records are bad (30 missing_field) in the first 3 of 40 work units, and max_bad "
        "is 10%, so the others were not converted; nothing new is published, finished units are kept. "
        'The first missing_field, of 00.jsonl: missing: text in {"body":"text 000 of file 000, some words"}. '
        f"The bad records are in {strict.train}/quarantine (mdsmix quarantine shows them): fix the source, or raise max_bad (1.0 allows any number)."
    )
    assert not (strict.train / "index.json").exists()
    before = strict.files
    assert 3 <= sum(name.endswith(".unit") for name in before) < 3 + 4 * 4
    assert where(strict) == [(f"{n:02}.jsonl", line) for n in range(3) for line in range(1, 11)]
    assert said(strict.convert("--workers", 1)) == said(answer)
    assert strict.files == before


VERDICTS: list[tuple[list[float], str, str | int]] = [
    ([1, 1, 1, *[0.0] * 9], "10%", "in the first 3 of 12 work units"),
    ([1, 1, 0.7, *[1.0] * 9], "10%", "117 of 120 records are bad (117 missing_field), more than max_bad 10%"),
    ([0.0] * 3 + [1.0] * 3, "10%", "30 of 60 records"),
    ([0.1] * 4 + [0.2], "10%", "6 of 50 records are bad (6 missing_field), more than max_bad 10%"),
    ([0.1] * 5, "10%", 5),
    ([0.1], "9%", "1 of 10 records are bad (1 missing_field), more than max_bad 9%"),
    ([0.9, 0.9, 0.9, *[0.0] * 27], "10%", 27),
    ([1.0] * 5 + [0.0], "1.0", 50),
    ([1.0] * 5 + [0.0], "100%", 50),
]  # fmt: skip
"""Share of bad records of each file, max_bad -> a part of the refusal, or the number of bad records
of the published stream.
"""


def test_else_the_stream_is_gone_through_for_as_long_as_it_may_be_published(
    strict: Project,
) -> None:
    """90 % of the first three units is not nearly all, and the beginning of a file is not
    the file.
    """
    for number, (shares, most, verdict) in enumerate(VERDICTS):
        shutil.rmtree(strict.out, ignore_errors=True)
        holds(strict, shares, number)
        overrides = (f"streams.web.source.path={number}/*.jsonl", f"max_bad={most}")
        if isinstance(verdict, int):
            assert strict.run(*overrides).manifest.records.bad == verdict, number
            continue
        with pytest.raises(TooManyBadRecords, match=re.escape(verdict)):
            strict.run(*overrides)
        assert strict.bad
        assert not (strict.train / "index.json").exists()


def test_a_share_of_exactly_max_bad_is_not_more_and_is_between_none_and_all(
    strict: Project,
) -> None:
    """As floats 0.29 * 100 is less than 29, and seven more are."""
    recipe = open_recipe(strict.recipe)
    job = make_job(recipe, recipe.sourced[0], open_tokenizer(recipe.tokenizer), None)
    for percent in (0, 7, 14, 28, 29, 56, 57, 58, 100):
        for text in (f"{percent}%", repr(percent / 100)):
            most = open_recipe(strict.recipe, [f"max_bad={text}"]).max_bad_share
            of = replace(job, max_bad=most)
            refuse_too_many_bad(of, Records(read=100, quarantined={"not_json": percent}))
            with pytest.raises(TooManyBadRecords):
                refuse_too_many_bad(of, Records(read=100, quarantined={"not_json": percent + 1}))
    for most, bad, is_refused in (
        ("10%", 1, False),
        ("50%", 2, True),
        ("9%", 1, True),
        ("0", 1, True),
    ):
        of = replace(job, max_bad=open_recipe(strict.recipe, [f"max_bad={most}"]).max_bad_share)
        refusal = pytest.raises(TooManyBadRecords) if is_refused else nullcontext()
        with refusal:  # one bad record of two or three
            refuse_too_many_bad(of, Records(read=bad + 1, quarantined={"not_json": bad}))
    for share in ("2", "x", "101%", "true"):
        with pytest.raises(RecipeError, match="max_bad"):
            open_recipe(strict.recipe, [f"max_bad={share}"])


ARRAYS: list[tuple[str, str | None, int, tuple[str, ...], list[str] | None]] = [
    (f"[{', '.join(LINES)}]", None, 5, ARRAY, ["json_array"]),
    (f"[{', '.join(LINES)}]", "100%", 5, ARRAY, ["json_array"]),
    # The last object of an array that has one a line ends in no comma: with max_bad: 100% it alone
    # is published.
    ("[\n" + ",\n".join(LINES) + "\n]\n", "100%", 0, ARRAY, None),
    (json.dumps([*map(json.loads, LINES)], indent=2), None, 5, ARRAY, None),
    ("\n".join([*LINES, "[]", "[1, 2]", '["text"]']), "100%", 0, (), ["not_an_object"] * 3),
    ("\n".join([*LINES, '["text"', "[1, 2"]), "100%", 0, (), ["not_json"] * 2),
]


def test_a_file_that_is_one_array_is_named_as_that_and_no_other_is(project: Project) -> None:
    for content, most, code, said, reasons in ARRAYS:
        shutil.rmtree(project.out, ignore_errors=True)
        (project.folder / "docs.jsonl").write_text(content)
        answer = project.configure(
            documents("docs.jsonl", layout="document"), max_bad=most
        ).convert()
        assert answer.code == code, content
        assert all(words in answer.out + answer.err for words in said), content
        assert said or "JSON array" not in answer.out
        found = [record["reason"] for record in project.bad]
        assert "json_array" in found if reasons is None else found == reasons, content


def test_fields_that_are_not_there_are_shown_beside_those_that_are(project: Project) -> None:
    """And a run that is refused shows its own bad records alone. Rows that are no JSON are no
    reason to fail.
    """
    project.configure(chats("chat.jsonl"), max_bad=None)
    for name in ("conversations", "talk"):
        project.write_source([{"id": 1, name: []}] * 3, "chat.jsonl")
        for override in ((), ("max_bad=1.0",)):
            answer = project.convert(*override)
            first = f"""The first missing_field, of chat.jsonl: missing: messages in {{"id":1,"{name}":[]}}."""
            assert (answer.code, first in answer.err) == (5, True)
            assert f"{project.train / 'quarantine'}" in answer.err
            assert len(project.bad) == 3
    (project.folder / "it.csv").write_text(TABLE)
    first = "The first missing_field, of it.csv: missing: text in 1, hello."
    assert first in project.configure(documents("it.csv")).convert().err
    for source in ({"messages": "1"}, {"conversations": "1", "tags": {"role_tag": "role"}}):
        answer = project.configure(
            {"kind": "finetuning", "source": {"path": "it.csv", **source}}
        ).convert()
        assert answer.code == 5, answer.err
        assert "its source gives no sample" in answer.err


def test_of_a_field_that_is_missing_the_nearest_one_is_named(project: Project) -> None:
    """Of lines and of tables, whose records are kept by their fields; a path into a field is none
    of it.
    """
    rows = [{"prompts": "a", "response": "b", "meta": {"id": "1"}}] * 3
    project.write_source(rows)
    parquet.write_table(pa.Table.from_pylist(rows), project.folder / "a.parquet")
    for path in ("a.jsonl", "a.parquet"):
        said = project.configure(pairs(path)).convert().err
        assert "The recipe names prompt: did you mean prompts?" in said
    fields = {"path": "a.jsonl", "prompt": "meta.text", "response": "response"}
    said = project.configure({"kind": "finetuning", "source": fields}).convert().err
    assert "missing_field" in said
    assert "did you mean" not in said
