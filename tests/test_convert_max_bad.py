"""The share of bad records of the whole stream decides; a run stops early only where that share can be told already; and where most are bad
the sentence says what to do about it."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mdsmix.convert.bad_records import refuse_too_many_bad
from mdsmix.convert.job import make_job
from mdsmix.encode.pretrained import open_tokenizer
from mdsmix.errors import RecipeError, TooManyBadRecords
from mdsmix.kinds import open_recipe
from mdsmix.shards.counts import Records
from tests.converting import Answer, Web, chats, documents, files

LINES = [json.dumps({"text": f"document {n}"}) for n in range(20)]
ARRAY = ("begins with [, so it is one JSON array", "name it .json, or say source.format: json")
TABLE = '1,hello\n"[{""role"": ""user"", ""content"": ""a""}, {""role"": ""who"", ""content"": ""a""}]",b\n'


@pytest.fixture
def strict(web: Web) -> Web:
    """A file of ten records is a unit, and a tenth may be bad."""
    web.windows(600)
    return web.says(max_bad=None)


def records(bad: int, count: int = 10, seed: int = 0) -> list[dict[str, str]]:
    """The first ones have no text."""
    names = ["body"] * bad + ["text"] * (count - bad)
    return [{name: f"text {n:03} of file {seed:03}, some words"} for n, name in enumerate(names)]


def holds(web: Web, shares: Sequence[float], folder: object = ".") -> None:
    """A file for each share of bad records, a work unit each, of 10 records."""
    for number, share in enumerate(shares):
        web.holds(records(round(10 * share), 10, number), f"{folder}/{number:02}.jsonl")


def done_units(web: Web) -> int:
    return len([n for n in files(web.out) if re.fullmatch(r".*/\.mdsmix/.*\.unit", n)])


def said(answer: Answer) -> str:
    (error,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    return error


def test_a_source_that_is_bad_from_the_beginning_is_not_gone_through(strict: Web) -> None:
    """The same sentence whoever works and however often, and nothing more is done for it; what it names can be read."""
    holds(strict, [1.0] * 40)
    answer = strict.convert("--workers", 4)
    assert answer.code == 5
    assert said(answer) == (
        "error: stream web: 30 of 30 records are bad (30 missing_field) in the first 3 of 40 work units, and max_bad "
        "is 10%, so the others were not waited for; nothing new is published, finished units are kept. "
        "The first missing_field, of 00.jsonl: missing: text in "
        '{"body":"text 000 of file 000, some words"}. '
        f"They lie in {strict.train}/quarantine (mdsmix quarantine shows them): mend the source, or raise max_bad (1.0 allows any number)."
    )
    assert not (strict.train / "index.json").exists()
    done = done_units(strict)
    assert 3 <= done < 3 + 4 * 4
    places = [(f"{n:02}.jsonl", line) for n in range(3) for line in range(1, 11)]
    assert sorted((b["file"], b["line"]) for b in strict.bad) == places
    assert said(strict.convert("--workers", 1)) == said(answer)
    assert done_units(strict) == done


VERDICTS: list[tuple[list[float], str, str | int]] = [
    ([1, 1, 1, *[0.0] * 9], "10%", "in the first 3 of 12 work units"),
    ([1, 1, 0.7, *[1.0] * 9], "10%", "117 of 120 records are bad (117 missing_field), more than max_bad 10%"),
    ([0.0] * 3 + [1.0] * 3, "10%", "30 of 60 records"),
    ([0.1] * 4 + [0.2], "10%", "6 of 50 records are bad (6 missing_field), more than max_bad 10%"),
    ([0.1] * 5, "10%", 5),
    ([0.9, 0.9, 0.9, *[0.0] * 27], "10%", 27),
    ([1.0] * 5 + [0.0], "1.0", 50),
    ([1.0] * 5 + [0.0], "100%", 50),
]  # fmt: skip
"Share of bad records of each file, max_bad -> a part of the refusal, or the number of bad records of the published stream."


def test_else_the_stream_is_gone_through_for_as_long_as_it_may_be_published(strict: Web) -> None:
    """90 % of the first three units is not nearly all, and the beginning of a file is not the file."""
    for number, (shares, most, verdict) in enumerate(VERDICTS):
        source, web = (
            f"streams.web.source.path={number}/*.jsonl",
            Web(strict.folder, strict.tokenizer, strict.patch, f"of {number}"),
        )
        holds(strict, shares, number)
        override = (source, f"local={web.out}", f"max_bad={most}")
        if isinstance(verdict, int):
            assert strict.run(*override).manifest.records.bad == verdict, number
            continue
        with pytest.raises(TooManyBadRecords, match=re.escape(verdict)):
            strict.run(*override)
        assert web.bad
        assert not (web.train / "index.json").exists()


def test_a_share_of_exactly_max_bad_is_not_more_and_is_between_none_and_all(strict: Web) -> None:
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
    for share in ("2", "x", "101%", "true"):
        with pytest.raises(RecipeError, match="max_bad"):
            open_recipe(strict.recipe, [f"max_bad={share}"])


ARRAYS: list[tuple[str, str | None, int, tuple[str, ...], list[str] | None]] = [
    (f"[{', '.join(LINES)}]", None, 5, ARRAY, ["json_array"]),
    (f"[{', '.join(LINES)}]", "100%", 5, ARRAY, ["json_array"]),
    # The last object of an array that has one a line ends in no comma: with max_bad: 100% it alone is published.
    ("[\n" + ",\n".join(LINES) + "\n]\n", "100%", 0, ARRAY, None),
    (json.dumps([*map(json.loads, LINES)], indent=2), None, 5, ARRAY, None),
    ("\n".join([*LINES, "[]", "[1, 2]", '["text"]']), "100%", 0, (), ["not_an_object"] * 3),
    ("\n".join([*LINES, '["text"', "[1, 2"]), "100%", 0, (), ["not_json"] * 2),
]


def test_a_file_that_is_one_array_is_named_as_that_and_no_other_is(web: Web) -> None:
    for content, most, code, said, reasons in ARRAYS:
        shutil.rmtree(web.out, ignore_errors=True)
        (web.folder / "docs.jsonl").write_text(content)
        web.says(documents("docs.jsonl", layout="document"), max_bad=most)
        answer = web.convert()
        assert answer.code == code, content
        assert all(words in answer.out + answer.err for words in said), content
        assert said or "JSON array" not in answer.out
        found = [record["reason"] for record in web.bad]
        assert "json_array" in found if reasons is None else found == reasons, content


def test_fields_that_are_not_there_are_shown_beside_those_that_are(web: Web) -> None:
    """And a run that is refused shows its own bad records alone."""
    web.says(chats("chat.jsonl"), max_bad=None)
    for name in ("conversations", "talk"):
        web.holds([{"id": 1, name: []}] * 3, "chat.jsonl")
        for override in ((), ("max_bad=1.0",)):
            answer = web.convert(*override)
            assert answer.code == 5
            first = f"""The first missing_field, of chat.jsonl: missing: messages in {{"id":1,"{name}":[]}}."""
            assert first in answer.err
            assert f"{web.train / 'quarantine'}" in answer.err
            assert len(web.bad) == 3


def test_rows_that_are_no_json_are_no_reason_to_fail(web: Web) -> None:
    (web.folder / "it.csv").write_text(TABLE)
    said = "The first missing_field, of it.csv: missing: text in 1, hello."
    assert said in web.says(documents("it.csv")).convert().err
    for source in ({"messages": "1"}, {"conversations": "1", "tags": {"role_tag": "role"}}):
        answer = web.says({"kind": "finetuning", "source": {"path": "it.csv", **source}}).convert()
        assert answer.code == 5, answer.err
        assert "not one sample came of its source" in answer.err
