"""Only changes are converted again: the units of changed files, and the streams that a changed
setting affects. A dry run prints what a run would do and why, and does nothing. A published stream
is replaced only by a new version of itself, unless the user allows more.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix import sources
from mdsmix.conversion.planning import Options, describe_plans
from mdsmix.errors import RecipeError, TooManyBadRecords
from mdsmix.kinds import open_recipe
from tests.converting import (
    Project,
    assert_refused,
    chats,
    documents,
    list_in_parts,
    pairs,
    read_files,
    read_times,
    run_ok,
)
from tests.published import CONCAT, TOKEN_ROW, publish

ALL = {"web", "docs", "faq", "chat"}
CHANGES: list[tuple[list[str], set[str], str]] = [
    (["max_seq_len=40"], ALL, "max_seq_len was 48 and is 40"),
    (["special_tokens_in_text=reject"], ALL, "special_tokens_in_text was escape and is reject"),
    (["compression=zstd:1"], ALL, "compression was not set and is zstd:1"),
    (["target_responses=all"], {"faq", "chat"}, "target_responses was last and is all"),
    (["streams.web.add_eos=false"], {"web"}, "add_eos was true and is false"),
    (["streams.docs.min_tokens=9"], {"docs"}, "min_tokens was 0 and is 9"),
    (["streams.faq.source.response=prompt"], {"faq"}, "source.response was response and is prompt"),
    (["mix.web.repeat=2", "mix.chat.proportion=0.1", "target_prompts=none"], set(), ""),
    (["mix.web.choose=7", "train_loader.dataset.shuffle_seed=3"], set(), ""),
    (["train_loader.num_workers=4", "train_loader.dataset.packing_ratio=auto"], set(), ""),
    (["max_bad=50%", "tokenizer.backend=auto"], set(), ""),
]
EDITED = "are new, edited or incomplete"


@pytest.fixture
def project(project: Project) -> Project:
    """Two files of 50 documents each, with different sizes. The source is the first one."""
    for name, end in (("a", ""), ("b", "!")):
        project.write_source(
            (f"{name} {n} a text of some words{end}" for n in range(50)), f"{name}.jsonl"
        )
    return project.configure(documents("a.jsonl"))


@pytest.fixture
def mixed(project: Project, corpus_folder: Path) -> Project:
    """A stream of each kind and layout, with twenty records each."""
    for name in ("docs", "faq", "chat"):
        lines = (corpus_folder / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        (project.folder / f"{name}.jsonl").write_bytes(b"".join(lines[:20]))
    streams = {
        "web": documents("docs.jsonl"),
        "docs": documents("docs.jsonl", layout="document"),
        "faq": pairs("faq.jsonl"),
        "chat": chats("chat.jsonl"),
    }
    return project.configure(streams=streams, max_seq_len=48)


def convert_changed(project: Project, *changes: str) -> set[str]:
    """Convert with these overrides, and return the streams of which units were converted."""
    return {name for name, outcome in project.run_all(*changes).items() if outcome.done}


def dry_run(project: Project, *changes: str) -> dict[str, str]:
    """Return the streams of which units would be converted -> the reasons that a dry run prints."""
    output = project.convert_ok(*changes, "--dry-run").out
    pattern = r"^(\w+): (\d+) of \d+ work units would"
    _, *parts = re.split(pattern, output, flags=re.MULTILINE)
    sections = zip(parts[0::3], parts[1::3], parts[2::3], strict=True)
    return {name: reasons for name, units, reasons in sections if int(units)}


def test_a_setting_rebuilds_only_the_streams_that_it_affects(mixed: Project) -> None:
    """A dry run names them with the reason and does nothing. Units from before a change are reused
    when it is undone.
    """
    assert convert_changed(mixed) == ALL
    files = read_files(mixed.out)
    times = read_times(mixed.out)
    for changes, affected, reason in CHANGES:
        reasons = dry_run(mixed, *changes)
        assert reasons.keys() == affected, changes
        assert all(reason in text for text in reasons.values())
        assert read_times(mixed.out) == times
    assert convert_changed(mixed, *CHANGES[4][0], *CHANGES[5][0]) == {"web", "docs"}
    assert convert_changed(mixed) == set(), "the units from before are reused"
    assert files.items() <= read_files(mixed.out).items()


def test_a_tokenizer_rebuilds_all_streams_and_a_template_conversations(mixed: Project) -> None:
    mixed.run_all()
    other = shutil.copytree(mixed.tokenizer, mixed.folder / "other")
    same, path = f"tokenizer.name={other}", other / "tokenizer_config.json"
    assert dry_run(mixed, same) == {}, "the same files"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"chat_template": "{{ '\n' }}" + config["chat_template"]}))
    reasons = dry_run(mixed, same)
    assert reasons.keys() == {"chat"}
    assert "the chat template was " in reasons["chat"]
    assert convert_changed(mixed, same) == {"chat"}
    path.write_text(json.dumps(config | {"eos_token": "<|im_end|>"}))
    reasons = dry_run(mixed, same)
    assert reasons.keys() == ALL
    assert re.search(r"the tokenizer was [0-9a-f]{8} and is [0-9a-f]{8}", reasons["web"])


@pytest.fixture
def strict(project: Project) -> Project:
    return project.configure(max_bad=None)


def describe(project: Project, *overrides: str, **options: Any) -> str:
    return "\n".join(describe_plans(open_recipe(project.recipe, overrides), Options(**options)))


def test_a_dry_run_prints_reasons_and_writes_nothing(strict: Project) -> None:
    assert "1 of 1 work units would be converted" in describe(strict)
    assert "nothing is published there yet" in describe(strict)
    assert not strict.out.exists()
    strict.run()
    assert "0 of 1 work units" in describe(strict)
    for n in range(7):
        strict.write_source(["another text of other words"], f"b-{n}.jsonl")
    names = ", ".join(["a.jsonl", *(f"b-{n}.jsonl" for n in range(4))])
    assert describe(strict).endswith(f"units of {names} and 4 more {EDITED}")
    for name in ("b", *(f"b-{n}" for n in range(7))):
        (strict.folder / f"{name}.jsonl").unlink()
    assert "b.jsonl is no longer among its sources" in describe(strict, reencode=True)
    strict.patch.setattr(sources, "compute_content", None)
    assert "the first 7 records would be converted" in describe(strict, limit=7), (
        "no source is read"
    )


def test_a_published_stream_is_refused_if_max_bad_is_lower_now(strict: Project) -> None:
    (strict.folder / "b.jsonl").write_text("no record\n")
    strict.run()
    with pytest.raises(TooManyBadRecords):
        strict.run("max_bad=0.001")


def test_a_dry_run_reports_lost_and_unpublished_files_and_backends(strict: Project) -> None:
    strict.run()
    reason = f"all units are converted already; they would be published at {strict.train}"
    assert f"{reason}-" in describe(strict, "publish=versioned")
    (strict.train / "index.json").rename(strict.folder / "index")
    assert "0 of 1 work units" in describe(strict)
    assert describe(strict).endswith(reason)
    (strict.folder / "index").rename(strict.train / "index.json")
    assert "and is the reference" in describe(strict, "tokenizer.backend=reference")
    strict.run("tokenizer.backend=reference")
    assert strict.manifest.backend.startswith("tokenizers ")
    assert len(describe(strict).splitlines()) == 1
    strict.shards[0].unlink()
    assert describe(strict).endswith(f"units of a.jsonl, b.jsonl {EDITED}")


def assert_needs_reencode(project: Project, match: str, *overrides: str) -> None:
    """Assert that a run is refused with this message and changes nothing, and that it succeeds with
    `--reencode`.
    """
    before = project.files
    with pytest.raises(RecipeError, match=match):
        project.run(*overrides)
    assert project.files == before
    project.run(*overrides, reencode=True)
    assert project.files["index.json"] != before["index.json"]
    assert project.run(*overrides).state == "up to date"


def test_replacing_another_stream_is_refused(project: Project) -> None:
    """A stream of another tool; a stream with other columns, with the work to be done again; and a
    stream of other sources.
    """
    publish(project.train.parent, CONCAT, [TOKEN_ROW])
    assert_needs_reencode(
        project, "stream web: .*/web/train has a stream without an mdsmix manifest"
    )
    columns = (
        r"for the text loader with the columns tokens, but the recipe asks for the "
        r"columns input_ids, labels for the finetuning loader. All 50 records "
        rf"\({project.manifest.totals.tokens} tokens\) would .* "
        r"pass --reencode"
    )
    finetuning = "train_loader.name=finetuning"
    assert_needs_reencode(project, columns, finetuning)
    missing = (
        r"a\.jsonl is no longer among its sources: about 50 of the 50 records published, 100\.0% "
        "of their bytes; bring the missing"
    )
    assert_needs_reencode(project, missing, finetuning, "streams.web.source.path=b.jsonl")


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_stream_that_goes_or_comes_changes_the_loader_and_the_message_says_so(
    project: Project, is_deleted: bool
) -> None:
    """The first sentence names that stream. The key that it offers keeps what is published."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    project.write_source([{"messages": turns}] * 9, "chats/talk.jsonl")
    web = documents("*.jsonl")
    both = {"web": web, "talk": chats("chats/talk.jsonl")}
    project.configure(streams=both).run_all()
    if is_deleted:
        shutil.rmtree(project.out / "talk")
    gone = "talk is" if not is_deleted else "no stream of prompts and responses, such as chats, is"
    goes = (
        rf"stream web: {gone} (not )?in the recipe any more, so the recipe has only pretraining "
        "streams now, and its loader changes from finetuning to text. The stream would get the "
        "columns tokens for the text loader, and it is published with input_ids, labels for "
    )
    project.configure(streams={"web": web})
    before = project.files
    with pytest.raises(RecipeError, match=goes):
        project.run()
    assert project.run("train_loader.name=finetuning").state == "up to date"
    assert project.files == before
    assert_needs_reencode(project, goes)
    # The other way round.
    comes = (
        "stream web: the recipe has talk now, so it has not only pretraining streams, and its "
        "loader changes from text to finetuning. "
    )
    project.configure(streams=both)
    with pytest.raises(RecipeError, match=comes):
        project.run_all()
    before = project.files
    assert project.run_all("train_loader.name=mdsmix")["web"].state == "up to date"
    assert project.files == before
    assert_needs_reencode(project, comes)


def test_the_quarantine_cannot_be_a_source(project: Project) -> None:
    """It would grow with every run."""
    project.write_source(["a text", {"body": 1}])
    everything = "streams.web.source.path=./**/*.jsonl*"
    project.run(everything)
    for settings in ({}, {"limit": 3}, {"reencode": True}):
        match = r"includes files in .*/web/train/quarantine, .*Narrow the pattern"
        with pytest.raises(RecipeError, match=match):
            project.run(everything, **settings)


def remove_published_source(project: Project, remaining: int, removed: int) -> None:
    """Publish two files with so many records of equal length, and remove the second file."""
    for name, count in (("a", remaining), ("b", removed)):
        project.write_source(
            (f"{name} {n:04} a text of some words" for n in range(count)), f"g/{name}.jsonl"
        )
    project.configure(documents("g/*.jsonl")).run(reencode=True)
    (project.folder / "g/b.jsonl").rename(project.folder / "b.jsonl")


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_an_emptied_source_file_is_missing(project: Project, form: str) -> None:
    for name, count in (("a", 20), ("b", 10)):
        project.write_source((f"{name} {n:04} some words" for n in range(count)), f"{name}.jsonl")
        if form == "json":
            lines = (project.folder / f"{name}.jsonl").read_text().splitlines()
            (project.folder / f"{name}.json").write_text(f"[{','.join(lines)}]")
    project.configure(documents(f"*.{form}")).run()
    before = project.files
    (project.folder / f"b.{form}").write_text("")
    assert_refused(
        project.convert(),
        2,
        f"b.{form} is no longer among its sources (b.{form} has 0 bytes now): about 10 of the 30 "
        "records published",
        "--reencode",
    )
    assert {name: before[name] for name in before} == project.files
    assert project.run(reencode=True).manifest.records.read == 20


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_a_source_file_that_became_smaller_is_a_warning(
    project: Project, is_in_parts: bool
) -> None:
    """It was cut at the end of a line, so each of its records is whole. A larger file is none."""
    if is_in_parts:
        list_in_parts(project.patch)
    path = project.write_source((f"a {n:04} some words" for n in range(20)), "a.jsonl")
    project.write_source(["other words"], "b.jsonl")
    project.configure().run()
    lines = path.read_bytes().splitlines(keepends=True)
    whole = sum(map(len, lines))
    lost = sum(map(len, lines[15:]))
    path.write_bytes(b"".join(lines[:15]))
    size = f"by {lost:,} of {whole:,} bytes"
    assert f"the conversion: 1 edited (a.jsonl is smaller {size})." in (
        run_ok("check", project.recipe).out
    )
    warning = f"WARNING: a.jsonl has become smaller since the stream was published, {size} ("
    assert warning in project.convert_ok("--dry-run").out
    output = project.convert_ok().out
    assert warning in output
    assert (
        "5 records fewer read than when the stream was published before: 16, which were 21"
    ) in output
    path.write_bytes(b"".join(lines))
    output = project.convert_ok().out
    assert ("smaller" in output, "fewer" in output) == (False, False)
    assert project.manifest.records.read == 21


def test_a_missing_source_file_is_a_warning_and_more_than_a_tenth_an_error(
    project: Project,
) -> None:
    """A moved file is not missing. A file of the size of one that stays was not moved."""
    words = (
        "g/b.jsonl is no longer among its sources: about 5 of the 100 records published, 5.0% of "
        "their bytes"
    )
    remove_published_source(project, remaining=95, removed=5)
    assert words in project.convert_ok("--dry-run").out
    assert f"WARNING: {words}" in project.convert_ok().out
    assert project.manifest.records.read == 95
    assert "no longer" not in project.convert_ok().out
    remove_published_source(project, remaining=9, removed=9)
    with pytest.raises(RecipeError, match=r"about 9 of the 18 records published, 50\.0%"):
        project.run()
    list_in_parts(project.patch)
    remove_published_source(project, remaining=30, removed=300)
    before = project.files
    assert_refused(
        project.convert(),
        2,
        "stream web: g/b.jsonl is no longer among its sources: about 300 of the 330 records "
        "published, 90.9% of their bytes; "
        "bring the missing files back, publish to another place, or pass --reencode to replace "
        f"{project.train} by a stream without these files",
    )
    assert project.files == before
    (project.folder / "b.jsonl").rename(project.folder / "g/c.jsonl")
    outcome = project.run()
    assert outcome.manifest.records.read == 330
    assert not any("no longer" in note for note in outcome.notes)
    (project.folder / "g/c.jsonl").unlink()
    assert project.run(reencode=True).manifest.records.read == 30
