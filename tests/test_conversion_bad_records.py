"""The quarantine has the bad records of the published stream and no others. Whether a stream is
published depends on their share of the whole stream, or of the first units if nearly all are bad.
The error gives advice.
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
ARRAY = ("begins with [, so it is one JSON array", "rename it to .json, or set source.format: json")
TABLE = """1,hello
"[{""role"": ""user"", ""content"": ""a""}, {""role"": ""who"", ""content"": ""a""}]",b
"""


@pytest.fixture
def two_files(project: Project) -> Project:
    """Two files with a bad record each, in small units."""
    project.set_window_size(100)
    for name in "ab":
        project.write_source([*GOOD[:10], {"name": name}, *GOOD[10:]], f"{name}.jsonl")
    return project


def list_lines(project: Project) -> list[tuple[str, int]]:
    return sorted((record["file"], record["line"]) for record in project.bad)


def test_a_fixed_record_leaves_the_quarantine(two_files: Project) -> None:
    two_files.run()
    assert list_lines(two_files) == [("a.jsonl", 11), ("b.jsonl", 11)]
    two_files.write_source([*GOOD[:10], {"text": "a"}, *GOOD[10:]])
    two_files.run()
    assert list_lines(two_files) == [("b.jsonl", 11)]
    assert two_files.manifest.records.bad == 1
    two_files.write_source(GOOD, "b.jsonl")
    two_files.run()
    assert not [name for name in read_files(two_files.out) if "quarantine" in name]


@pytest.mark.parametrize("window", [100, 1 << 20])
def test_equal_files_and_files_of_one_unit_have_their_own_bad_records(
    two_files: Project, window: int
) -> None:
    """The bad records have the current names of their files."""
    two_files.set_window_size(window)
    shutil.copy(two_files.folder / "a.jsonl", two_files.folder / "b.jsonl")
    assert (two_files.run().units == 1) == (window > 100)
    assert two_files.manifest.records.bad == 2
    for name in ("b.jsonl", "c.jsonl"):
        assert list_lines(two_files) == [("a.jsonl", 11), (name, 11)]
        (two_files.folder / name).rename(two_files.folder / "c.jsonl")
        two_files.run()


def test_a_bad_record_of_a_reused_unit_has_its_current_line_number(two_files: Project) -> None:
    """Its unit is reused after lines were inserted above it."""
    two_files.run()
    path = two_files.folder / "a.jsonl"
    first, *later_lines = path.read_bytes().splitlines(keepends=True)
    shorter = first.replace(b"document", b"d")
    filler = b"\n" * (len(first) - len(shorter))  # later lines keep their offsets
    path.write_bytes(b"".join([shorter, filler, *later_lines]))
    assert two_files.run().done == 1
    (record,) = (r for r in two_files.bad if r["file"] == "a.jsonl")
    assert record["line"] == 11 + len(filler)
    assert path.read_bytes()[record["offset"] :].startswith(b'{"name":"a"}')


def test_lost_bad_records_are_restored_and_damaged_ones_are_an_error(two_files: Project) -> None:
    two_files.run()
    before = read_files(two_files.out)
    first = min((two_files.train / "quarantine").iterdir())
    unit_file = two_files.train / ".mdsmix" / f"{first.name.partition('.')[0]}.unit"
    (two_files.train / "index.json").unlink()
    unit_file.write_bytes(unit_file.read_bytes()[:-9] + b"no frame.")
    answer = two_files.convert()
    assert (answer.code, f"{unit_file.name} with results" in answer.err) == (4, True)
    assert two_files.convert("--verify-target").code == 0
    for lost in (unit_file, two_files.train / "index.json"):
        lost.unlink()
    assert two_files.run().done == 1
    assert read_files(two_files.out) == before


def format_record(raw: bytes, detail: Any = None, has_images: bool = False) -> dict[str, Any]:
    """Return the entry of a bad record in the quarantine."""
    names = tuple(f"field {number}" for number in range(70))
    origin = Item(3, {"row": 4}, len(raw), raw, fields=names, file="a.parquet")
    bad: Any = SimpleNamespace(origin=origin, reason="missing_field", detail=detail)
    return dict(json.loads(format_bad_record(bad, has_images)))


def test_the_entry_of_a_bad_record() -> None:
    """It has the first columns of a wide table, the template's message, and base64 if the bytes
    aren't UTF-8.
    """
    assert format_record(b"\xff", detail={"template": "no"}) == {
        "file": "a.parquet",
        "row": 4,
        "length": 1,
        "reason": "missing_field",
        "detail": {"template": "no"},
        "fields": [f"field {number}" for number in range(64)],
        "raw_base64": "/w==",
    }


def test_images_in_a_bad_record_are_left_out_and_words_are_not() -> None:
    image = bytes(range(256)) * 8
    plain = base64.b64encode(image).decode()
    lines = base64.encodebytes(image).decode()
    words = "\n".join(["one", "word", "on", "every", "single", "line"] * 60)
    left_out = r"(data:image/png;base64,)?<\d+ characters of base64 left out>\n?"
    forms = [plain, lines, quote(plain, ""), f"data:image/png;base64,{plain}"]
    for form in [*forms, base64.urlsafe_b64encode(image).decode()]:
        raw = json.dumps({"image": form, "text": words}).encode()
        stored = json.loads(format_record(raw, has_images=True)["raw"])
        assert stored["text"] == words
        assert re.fullmatch(left_out, stored["image"])
        assert format_record(raw)["raw"] == raw.decode()


@pytest.fixture
def strict(project: Project) -> Project:
    """A file of ten records is a unit, and a tenth may be bad."""
    project.set_window_size(600)
    return project.configure(max_bad=None)


def write_files(project: Project, shares: Sequence[float], folder: object = ".") -> None:
    """Write a file for each share of bad records. Each is a work unit of 10 records, the bad ones
    first.
    """
    for file, share in enumerate(shares):
        names = ["body" if n < round(10 * share) else "text" for n in range(10)]
        texts = [f"text {n:03} of file {file:03}, some words" for n in range(10)]
        records = [{name: text} for name, text in zip(names, texts, strict=True)]
        project.write_source(records, f"{folder}/{file:02}.jsonl")


def find_error(answer: Answer) -> str:
    (error,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    return error


def test_a_source_whose_beginning_is_bad_is_refused_early(strict: Project) -> None:
    """The message is the same for any number of workers and runs, and a second run does nothing
    more. The bad records can be read.
    """
    write_files(strict, [1.0] * 40)
    answer = strict.convert("--workers", 4)
    assert answer.code == 5
    assert find_error(answer) == (
        "error: stream web: 30 of 30 records are bad (30 missing_field) in the first 3 of 40 work "
        "units, and max_bad "
        "is 10%, so the others were not converted; nothing new is published, finished units are "
        "kept. Under source, name the field as the records have it; where: exists(FIELD) leaves out "
        "records without it. "
        "The first missing_field, of 00.jsonl: no field text in "
        '{"body":"text 000 of file 000, some words"}. '
        f"The bad records are in {strict.train}/quarantine (mdsmix quarantine shows them): fix "
        "the source, or raise max_bad (1.0 allows any number)."
    )
    assert not (strict.train / "index.json").exists()
    before = strict.files
    # How many units four workers finish meanwhile depends on the machine; one worker stops at once.
    assert 3 <= sum(name.endswith(".unit") for name in before) < 40
    alone = strict.folder / "alone"
    assert strict.convert("--workers", 1, f"local={alone}").code == 5
    assert sum(name.endswith(".unit") for name in read_files(alone)) == 3
    assert list_lines(strict) == [
        (f"{n:02}.jsonl", line) for n in range(3) for line in range(1, 11)
    ]
    assert find_error(strict.convert("--workers", 1)) == find_error(answer)
    assert strict.files == before


VERDICTS: list[tuple[list[float], str, str | int]] = [
    ([1, 1, 1, *[0.0] * 9], "10%", "in the first 3 of 12 work units"),
    (
        [1, 1, 0.7, *[1.0] * 9],
        "10%",
        "117 of 120 records are bad (117 missing_field), more than max_bad 10%",
    ),
    ([0.0] * 3 + [1.0] * 3, "10%", "30 of 60 records"),
    ([0.1] * 4 + [0.2], "10%", "6 of 50 records are bad (6 missing_field), more than max_bad 10%"),
    ([0.1] * 5, "10%", 5),
    ([0.1], "9%", "1 of 10 records are bad (1 missing_field), more than max_bad 9%"),
    ([0.9, 0.9, 0.9, *[0.0] * 27], "10%", 27),
    ([1.0] * 5 + [0.0], "1.0", 50),
    ([1.0] * 5 + [0.0], "100%", 50),
]  # fmt: skip
"""Share of bad records of each file, max_bad, and either words of the error or the number of bad
records of the published stream.
"""


def test_otherwise_the_share_of_the_whole_stream_decides(strict: Project) -> None:
    """90 % of the first three units are not nearly all."""
    for number, (shares, max_bad, verdict) in enumerate(VERDICTS):
        shutil.rmtree(strict.out, ignore_errors=True)
        write_files(strict, shares, number)
        overrides = (f"streams.web.source.path={number}/*.jsonl", f"max_bad={max_bad}")
        if isinstance(verdict, int):
            assert strict.run(*overrides).manifest.records.bad == verdict, number
            continue
        with pytest.raises(TooManyBadRecords, match=re.escape(verdict)):
            strict.run(*overrides)
        assert strict.bad
        assert not (strict.train / "index.json").exists()


def test_a_share_of_exactly_max_bad_is_allowed(strict: Project) -> None:
    """As floats, 0.29 * 100 is less than 29, and so for seven more percentages."""
    recipe = open_recipe(strict.recipe)
    job = make_job(recipe, recipe.sourced[0], open_tokenizer(recipe.tokenizer), None)
    for percent in (0, 7, 14, 28, 29, 56, 57, 58, 100):
        for text in (f"{percent}%", repr(percent / 100)):
            share = open_recipe(strict.recipe, [f"max_bad={text}"]).max_bad_share
            limited_job = replace(job, max_bad=share)
            refuse_too_many_bad(limited_job, Records(read=100, quarantined={"not_json": percent}))
            with pytest.raises(TooManyBadRecords):
                refuse_too_many_bad(
                    limited_job, Records(read=100, quarantined={"not_json": percent + 1})
                )
    for max_bad, bad, is_refused in (
        ("10%", 1, False),
        ("50%", 2, True),
        ("9%", 1, True),
        ("0", 1, True),
    ):
        share = open_recipe(strict.recipe, [f"max_bad={max_bad}"]).max_bad_share
        limited_job = replace(job, max_bad=share)
        refusal = pytest.raises(TooManyBadRecords) if is_refused else nullcontext()
        with refusal:  # one bad record of two or three
            refuse_too_many_bad(limited_job, Records(read=bad + 1, quarantined={"not_json": bad}))
    for share in ("2", "x", "101%", "true"):
        with pytest.raises(RecipeError, match="max_bad"):
            open_recipe(strict.recipe, [f"max_bad={share}"])


ARRAYS: list[tuple[str, str | None, int, tuple[str, ...], list[str] | None]] = [
    (f"[{', '.join(LINES)}]", None, 5, ARRAY, ["json_array"]),
    (f"[{', '.join(LINES)}]", "100%", 5, ARRAY, ["json_array"]),
    # In an array with one object per line the last object has no comma after it. With max_bad: 100%
    # only that one is published.
    ("[\n" + ",\n".join(LINES) + "\n]\n", "100%", 0, ARRAY, None),
    (json.dumps([*map(json.loads, LINES)], indent=2), None, 5, ARRAY, None),
    ("\n".join([*LINES, "[]", "[1, 2]", '["text"]']), "100%", 0, (), ["not_an_object"] * 3),
    ("\n".join([*LINES, '["text"', "[1, 2"]), "100%", 0, (), ["not_json"] * 2),
]


def test_a_file_that_is_one_array_is_recognized(project: Project) -> None:
    for content, max_bad, code, words, reasons in ARRAYS:
        shutil.rmtree(project.out, ignore_errors=True)
        (project.folder / "docs.jsonl").write_text(content)
        project.configure(documents("docs.jsonl", layout="document"), max_bad=max_bad)
        answer = project.convert()
        assert answer.code == code, content
        assert all(phrase in answer.out + answer.err for phrase in words), content
        assert words or "JSON array" not in answer.out
        bad_reasons = [record["reason"] for record in project.bad]
        if reasons is None:
            assert "json_array" in bad_reasons, content
        else:
            assert bad_reasons == reasons, content


def test_an_error_shows_the_missing_field_with_the_fields_of_the_record(project: Project) -> None:
    """A refused run shows only its own bad records. The records may be rows that aren't JSON."""
    project.configure(chats("chat.jsonl"), max_bad=None)
    for name in ("conversations", "talk"):
        project.write_source([{"id": 1, name: []}] * 3, "chat.jsonl")
        record = f'{{"id":1,"{name}":[]}}'
        example = f"The first missing_field, of chat.jsonl: no field messages in {record}."
        for overrides in ((), ("max_bad=1.0",)):
            answer = project.convert(*overrides)
            assert (answer.code, example in answer.err) == (5, True)
            assert f"{project.train / 'quarantine'}" in answer.err
            assert len(project.bad) == 3
    (project.folder / "it.csv").write_text(TABLE)
    example = "The first missing_field, of it.csv: no field text in 1, hello."
    assert example in project.configure(documents("it.csv")).convert().err
    for source in ({"messages": "1"}, {"conversations": "1", "tags": {"role_tag": "role"}}):
        stream = {"kind": "finetuning", "source": {"path": "it.csv", **source}}
        answer = project.configure(stream).convert()
        assert answer.code == 5, answer.err
        assert "its source gives no sample" in answer.err


def test_the_field_most_like_a_missing_one_is_suggested(project: Project) -> None:
    """For lines and for tables, whose bad records are stored with their fields. No field is
    suggested for a path into another field.
    """
    rows = [{"prompts": "a", "response": "b", "meta": {"id": "1"}}] * 3
    project.write_source(rows)
    parquet.write_table(pa.Table.from_pylist(rows), project.folder / "a.parquet")
    for path in ("a.jsonl", "a.parquet"):
        error = project.configure(pairs(path)).convert().err
        assert "The recipe names prompt: did you mean prompts?" in error
    fields = {"path": "a.jsonl", "prompt": "meta.text", "response": "response"}
    error = project.configure({"kind": "finetuning", "source": fields}).convert().err
    assert "missing_field" in error
    assert "did you mean" not in error


def test_a_table_of_another_encoding_names_the_fix(project: Project) -> None:
    (project.folder / "a.csv").write_bytes("text\nKäse\n".encode("latin-1"))
    error = project.configure(documents("a.csv")).convert().err
    assert "convert files of another encoding, for example with iconv" in error
    assert "The first invalid_utf8 is in a.csv. The bad records" in error


def test_names_of_fields_that_nobody_would_see_are_in_quotes(project: Project) -> None:
    """Pandas writes its index under an empty name, and a header may have spaces."""
    (project.folder / "a.csv").write_text(",text, more\n0,one,x\n")
    output = project.configure(documents("a.csv", layout="document")).convert_ok().out
    assert "fields not read: '' (1 of 1 not empty), ' more' (1 of 1 not empty)" in output
    stream = {"kind": "pretraining", "source": {"path": "a.csv", "text": "more"}}
    error = project.configure(stream).convert("--reencode").err
    assert "The recipe names more: did you mean ' more'?" in error
