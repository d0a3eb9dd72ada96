"""A unit's key is its content and everything that shapes its bytes, and nothing else. Paths,
templates, conditions and names of records are looked at through a whole conversion.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from mdsmix.conversion.job import Job, make_job, with_date
from mdsmix.errors import RecipeError
from mdsmix.recipe import Recipe, SourceSpec, StreamSpec, TokenizerSpec
from mdsmix.shards.manifest import Encoding
from mdsmix.sources import find_files
from mdsmix.tokenizer.card import Tokenizer
from tests.converting import Project, assert_refused, documents, make_encoder, mdsmix, run_ok
from tests.corpus import CHATML
from tests.styles import DATED, letters


def job_of(tokenizer: Tokenizer, kind: str = "pretraining", **changes: Any) -> Job:
    reads = {"text": "text"} if kind == "pretraining" else {"messages": "messages"}
    source: Any = SourceSpec(path=["/a.jsonl"], **reads)
    stream = StreamSpec(name="web", kind=kind, source=source, **changes)  # type: ignore[arg-type]
    recipe = Recipe(
        folder=Path("/"),
        tokenizer=TokenizerSpec(name="letters"),
        max_seq_len=8,
        streams={"web": stream},
        local="/mix",
    )
    return make_job(recipe, stream, tokenizer, None)


def test_a_key_follows_from_content_and_settings(tmp_path: Path) -> None:
    """Which settings are in it test_docs.py tells; where the tokenizer lies is not."""
    job = job_of(letters(tmp_path))
    assert job.key("one") == job_of(letters(tmp_path)).key("one") != job.key("two")
    assert replace(job, tokenizer=replace(job.tokenizer, hash="1")).key("one") != job.key("one")
    named = replace(job.tokenizer, name="/elsewhere/letters", path="/elsewhere/tokenizer.json")
    assert replace(job, tokenizer=named).key("one") == job.key("one")


def test_chats_are_cut_into_smaller_units_than_text(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(96 << 20)  # a hole: no byte of it is read
    for kind, units in (("pretraining", 1), ("finetuning", 6)):
        job = job_of(letters(tmp_path), kind)
        assert len(job.units_of(find_files(["a.jsonl"], tmp_path))) == units


def test_a_chat_template_and_what_it_may_print_shape_conversations_only(tmp_path: Path) -> None:
    for kind, is_shaped in (("pretraining", False), ("finetuning", True)):
        job = job_of(letters(tmp_path, chat_template=CHATML), kind)
        variables = {**job.tokenizer.template_variables, "eos_token": "another"}
        printed = replace(job, tokenizer=replace(job.tokenizer, template_variables=variables))
        for other in (job_of(letters(tmp_path, chat_template=CHATML + " "), kind), printed):
            assert (other.key("") != job.key("")) is is_shaped


def test_a_day_is_in_the_key_only_where_the_template_prints_it(tmp_path: Path) -> None:
    plain, dated = (letters(tmp_path, chat_template=text) for text in (CHATML, DATED))
    assert with_date(job_of(plain, "finetuning"), "2026-01-01").encoding.date_string is None
    kept = with_date(job_of(dated, "finetuning"), "2026-01-01")
    assert kept.encoding.date_string == "2026-01-01"
    stated = job_of(dated, "finetuning", date_string="2025-05-05")
    assert with_date(stated, "2026-01-01").encoding.date_string == "2025-05-05"
    assert kept.key("") != stated.key("")
    assert with_date(job_of(plain), "2026-01-01").encoding.date_string is None


def test_a_token_that_the_tokenizer_lacks_is_refused_where_it_is_wanted(tmp_path: Path) -> None:
    for token in ("bos", "eos"):
        without = letters(tmp_path, **{f"{token}_id": None})
        lacks = f"add_{token}: true, .* letters has no {token.upper()}"
        with pytest.raises(RecipeError, match=lacks):
            job_of(without, **{f"add_{token}": True})
        job_of(without, **{f"add_{token}": False})
        job_of(without, "finetuning")


def test_a_setting_at_its_default_is_in_no_key(tmp_path: Path) -> None:
    """What a later version adds to the settings rebuilds nobody's streams, until somebody
    uses it.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Later(Encoding):
        pictures: str | None = None
        tags: dict[str, str] = field(default_factory=dict)

    job = job_of(letters(tmp_path))
    settings = {f.name: getattr(job.encoding, f.name) for f in fields(job.encoding)}
    used: tuple[dict[str, Any], ...] = ({}, {"pictures": "yes"}, {"tags": {"a": "b"}})
    streams = [replace(job.stream, encoding=Later(**settings, **more)) for more in used]
    same, *others = (replace(job, stream=stream).key("one") for stream in streams)
    assert same == job.key("one")
    assert len({same, *others}) == 3
    stated = job.encoding.non_defaults
    assert {"layout", "add_bos", "add_eos", "min_tokens"} <= stated.keys(), "what a recipe says"


RECORDS: list[Any] = [
    {"meta": {"id": "a", "lang": "en"}, "title": "One", "body": "first words"},
    {"meta": {"id": "b", "lang": "de"}, "title": "Zwei", "body": "zweite"},
    {"meta": {"id": "c", "lang": "en"}, "title": "Three"},
    {"meta": {"id": "d"}, "title": "Four", "body": "x"},
    {"meta": {"id": "e", "lang": "en"}, "title": "Five", "body": "fifth words", "lost": 1},
    {"meta": {"id": "f", "lang": 3}, "title": "Six", "body": "sixth words"},
    7,
]


def says(project: Project, **source: Any) -> Project:
    stream = documents(project.write_source(RECORDS), layout="document")
    stream["source"] |= source
    return project.configure(stream, max_seq_len=64)


def test_a_template_a_condition_and_a_name_make_rows_counts_and_a_quarantine(
    project: Project,
) -> None:
    says(project, text="{title}\n\n{body}", where="meta.lang >= 'en'", id="meta.id")
    warned = "WARNING: 33.3% of the records are filtered"
    assert warned in project.convert_ok().out, "a false one is asked for"
    records = project.manifest.records
    assert (records.adds_up, records.read) == (True, len(RECORDS))
    assert records.filtered == {"where": 1, "where_missing_field": 1, "where_not_comparable": 1}
    assert records.quarantined == {"missing_field": 1, "not_an_object": 1}
    assert records.unread == {"lost": 1}, "what a path, a template or a condition reads is read"
    assert [bad.get("detail") for bad in project.bad] == [{"id": "c", "missing": "body"}, None]
    shown = run_ok("quarantine", project.train).out
    assert "id: c" in shown
    assert "missing: body" in shown


def named(stream: Path, *numbers: int) -> list[Any]:
    """The ids that inspect shows of these samples; of those of the first shard where none
    is given.
    """
    each = [("--sample", number) for number in numbers] or [("-n", 1000)]
    answers = (json.loads(run_ok("inspect", stream, *of, "--json").out) for of in each)
    return [next(iter(row["ids"]), None) for answer in answers for row in answer["shown"]]


def test_inspect_says_which_record_a_sample_is_of(project: Project) -> None:
    """Rows of long documents have the name of theirs, over several units and shards; rows of
    several documents have none.
    """
    project.set_window_size(600)
    project.patch.setattr("mdsmix.shards.shard_files.SHARD_ROWS", 3)
    records = [{"id": f"n{n}", "text": "some words " * n} for n in range(40)]
    records[7]["id"] = ["none"]
    stream = documents(project.write_source(records), layout="document")
    stream["source"]["id"] = "id"
    outcome = project.configure(stream, publish="versioned").run()
    assert outcome.units > 3
    ids, expected = make_encoder(project.tokenizer), list[Any]()
    for record in records:
        length = len(ids(record["text"])) + 1
        rows = sum(min(16, length - start) > 1 for start in range(0, length, 16))
        expected += [record["id"] if isinstance(record["id"], str) else None] * rows
    folder = project.out / "web"
    assert len(expected) == outcome.manifest.totals.samples > 60
    assert named(folder, *range(3, len(expected), 17)) == expected[3::17]
    assert ", id n39 " in run_ok("inspect", folder, "--sample", len(expected) - 1).out
    again = project.run()
    assert (again.done, again.manifest) == (0, outcome.manifest)
    joined = project.configure(stream | {"layout": "concat"}).convert_into()
    assert not list(joined.train.glob("*.ids.side"))
    assert {*named(joined.train)} == {None}


def test_a_lost_or_damaged_file_of_names_is_made_anew(project: Project) -> None:
    first = says(project, text="title", id="meta.id").run()
    (side,) = project.train.glob("*.ids.side")
    content = side.read_bytes()
    assert named(project.train) == list("abcdef")
    side.write_bytes(b"x" * len(content))
    assert_refused(mdsmix("inspect", project.train), 3, side.name)
    run_ok("repair", project.train, "--recipe", project.recipe)
    assert side.read_bytes() == content
    side.unlink()
    assert project.run().manifest == first.manifest
    assert side.read_bytes() == content
