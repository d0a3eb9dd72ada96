"""`mdsmix convert` on bad input: one sentence and its exit code; quietly; and what it imports."""

from __future__ import annotations

import gzip
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from mdsmix.cli import conversion_command, convert
from mdsmix.cli.commands import make_app_for
from mdsmix.storage.urls import STORES
from tests.converting import (
    Answer,
    Project,
    assert_refused,
    chats,
    documents,
    mdsmix,
    pairs,
    set_age,
)

GOOD = [f"good {n}" for n in range(20)]
REFUSED: list[tuple[list[str], int, list[str]]] = [
    (["max_seq_length=64"], 2, ["did you mean max_seq_len?"]),
    (["streams.web.source.path=nothing/*.jsonl"], 2, ["matches no file", "nothing"]),
    (["streams.web.source.path=."], 2, ["is a folder", "*.jsonl"]),
    (["streams.web.source.path=recipe.yaml"], 2, ["recipe.yaml", "no suffix that mdsmix reads"]),
    (["streams.web.source.path=cut.jsonl.gz"], 4, ["cut.jsonl.gz", "is damaged"]),
    (["--only", "wbe"], 2, ["--only wbe", "web"]), (["--memory", ""], 2, []),
    (["--max-bad", ""], 2, []),
    (["--part", "1/2", "--finish"], 2, ["--part only does a part of the work units"]),
    (["--part", "1/2", "--engine", "ray"], 2, ["--part only does a part of the work units"]),
    (["--dry-run", "--verify-target"], 2, ["--dry-run does not read shards"]),
    (["--budget", "some"], 2, ["--budget is 'some', which is not a number of tokens: write for example 2B"]),
    (["--max-bad", "few"], 2, ["--max-bad is 'few', which is not a share of at most 1: write for example 1%"]),
    (["--max-bad", "150%"], 2, ["--max-bad is '150%', which is not a share of at most 1"]),
    (["max_seq_len"], 2, ["max_seq_len", "key=value"]),
    (["local=null"], 2, ["neither remote nor local"]), (["local=taken/below"], 4, ["taken"]),
    (["streams.web.add_bos=true"], 2, ["add_bos", "no BOS"]),
    (["tokenizer.name=nobody/no-such-tokenizer"], 4, ["nobody/no-such", "was not found"]),
    (["max_seq_len=4096"], 5, ["stream web", "gives no sample"]),
    (["max_seq_len=4096", "--limit", "1"], 5, ["fills less than a row of max_seq_len tokens: add text, or set layout: document"]),
]  # fmt: skip


def test_what_cannot_be_converted_is_a_sentence(project: Project) -> None:
    """An option without a value, as of a variable that is not set (`--memory "$CAP"`), is not
    overlooked.
    """
    whole = project.write_source(GOOD).read_bytes() * 50
    (project.folder / "cut.jsonl.gz").write_bytes(gzip.compress(whole)[:-20])
    (project.folder / "taken").write_text("")
    for more, code, words in REFUSED:
        assert_refused(project.convert(*more), code, *words)
        assert not (project.train / "index.json").exists()
    assert_refused(mdsmix("convert", project.folder / "no.yaml"), 2, "no.yaml")
    project.patch.setenv("MDSMIX_CACHE", str(project.recipe / "below"))
    assert_refused(project.convert(), 4, str(project.recipe / "below"), "MDSMIX_CACHE")
    # A folder that cannot even be looked at, as another user's home; its name is too long.
    project.patch.setenv("MDSMIX_CACHE", str(project.folder / ("x" * 300)))
    assert_refused(project.convert(), 4, "x" * 300, "MDSMIX_CACHE")
    project.recipe.write_text("a: [\n")
    assert_refused(project.convert(), 2, "not a readable recipe")


def test_files_of_0_bytes_are_counted_by_every_run(project: Project) -> None:
    project.write_source(GOOD, "data/one.jsonl")
    for name in ("data/two.jsonl", "data/three.csv"):
        (project.folder / name).touch()
    project.configure(streams={"web": documents("data/*")}, max_seq_len=4)
    note = "\n  2 of 3 source files have 0 bytes, so no records: data/three.csv, data/two.jsonl\n"
    for more in (["--dry-run"], ["--part", "1/1"], ["--finish"], []):
        assert note in project.convert_ok(*more).out
    # Only the first run converts, but a copy that was interrupted is refused by every run.
    (project.folder / "data/one.parquet").touch()
    assert_refused(project.convert(), 4, "1 file of 0 bytes", "one.parquet")


def test_everything_that_is_not_read_is_counted(project: Project) -> None:
    """Parts of a field that is entered by a path, and columns that were not looked into."""
    records = [{"meta": {"text": f"text {n}", "note": "x"}, "n": n} for n in range(4)]
    project.write_source(records, "data/a.jsonl")
    parquet.write_table(pa.Table.from_pylist(records), project.folder / "data/b.parquet")
    source = {"path": "data/*", "text": "meta.text"}
    project.configure(streams={"web": {"kind": "pretraining", "source": source}}, max_seq_len=4)
    line = "fields not read: meta.note (8 of 8 not empty), n (4 of 8 not empty, 4 not looked into)"
    assert f"  {line}\n" in project.convert_ok().out


def test_a_path_that_is_named_twice_is_read_once_with_a_note(project: Project) -> None:
    name = project.write_source(GOOD)
    project.configure(streams={"web": documents([name, name])}, max_seq_len=4)
    output = project.convert_ok().out
    assert project.manifest.records.read == len(GOOD)
    assert f"source.path names {name} more than once, but each file is read once; " in output
    assert "twice, set its repeat: 2 under mix\n" in output
    project.configure(streams={"web": documents([name, "*.jsonl"])}, max_seq_len=4)
    assert "more than once" not in project.convert_ok().out


def test_quietly_only_warnings_are_said_and_on_stderr(project: Project) -> None:
    good, bad = (
        project.write_source(GOOD),
        project.write_source(["good", {"no": "text"}], "bad.jsonl"),
    )
    project.configure(streams={"web": documents(good), "odd": documents(bad)}, max_seq_len=4)
    project.convert_ok("--dry-run")  # the tokenizer is known
    warning = "odd: WARNING: 50.0% of the records are quarantined: 1 missing_field, "
    warning += f"in {project.out}/odd/train/quarantine/\n"
    assert project.convert("--quiet") == Answer(0, "", warning)
    assert mdsmix("verify", project.train, "-q") == Answer(0, "", "")
    for shard in project.shards:
        shard.write_bytes(b"")
    assert mdsmix("verify", project.train, "-q").out.startswith("fault ")


def test_quietly_no_step_is_said_that_goes_well(project: Project) -> None:
    """A tokenizer that is looked at for the first time, units read for duplicates, parts that have
    finished, streams without a sample.
    """
    project.patch.setenv("MDSMIX_CACHE", str(project.folder / "cache"))
    source = project.write_source(GOOD)
    held_out = documents(source, split="validation")
    project.configure(
        streams={"web": documents(source, duplicates="drop"), "held": held_out}, max_seq_len=4
    )
    for more in (["--part", "1/1"], ["--finish"], ["--budget", "40"]):
        assert project.convert("-q", *more) == Answer(0, "", "")


COMMANDS = """
import shlex, sys
from mdsmix.cli.main import run
heavy = {"torch", "streaming", "transformers", "tokenizers", "boto3", "numpy", "omegaconf"}
assert not heavy & {name.partition(".")[0] for name in sys.modules}
for command in ("convert --reencode", "check", "render-yaml"):
    sys.argv = ["mdsmix", *shlex.split(command), sys.argv[-1]]
    try:
        run()
    except SystemExit as end:
        assert not end.code, command
"""


def test_converting_checking_rendering_import_nothing_heavy(
    project: Project, corpus_folder: Path
) -> None:
    """Neither the command nor its workers, which list their imports on the same stderr."""
    project.write_source(GOOD)
    project.convert_ok()  # the tokenizer is known
    faq, chat = pairs(corpus_folder / "faq.jsonl"), chats(corpus_folder / "chat.jsonl")
    streams = {"web": documents("a.jsonl", layout="document"), "faq": faq, "chat": chat}
    project.configure(streams=streams, max_seq_len=512)
    command = [sys.executable, "-X", "importtime", "-c", COMMANDS, str(project.recipe)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    imports = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert imports.count("numpy") == 1, "the workers share that of their parent"
    modules = {*imports}
    assert {
        "mdsmix.mix.render.render",
        "mdsmix.mix.check",
        "mdsmix.encode.template_code",
    } <= modules
    packages = {module.partition(".")[0] for module in modules}
    assert not packages & {"torch", "torchvision", "streaming", "transformers", "llmfoundry"}
    assert "urllib.request" not in modules, "images alone are asked for at URLs"
    stores = {f"mdsmix.storage.{store.module}" for store in STORES}
    assert not modules & stores, "a store is imported at its first URL"
    assert "mdsmix.report.shown_samples" not in modules, "these commands show no sample"
    assert "mdsmix.cli.bench" not in modules, "a command imports no other one"


UNCHANGED = """
import sys
from mdsmix.cli.main import run
for command in ("convert", "check", "render-yaml"):
    log = ["--log-file", sys.argv[-1] + ".log"] if command == "convert" else []
    sys.argv = ["mdsmix", command, *log, sys.argv[-1]]
    try:
        run()
    except SystemExit as end:
        assert not end.code, command
print(*sys.modules, file=sys.stderr)
"""


def test_a_run_that_finds_nothing_to_do_imports_what_it_needs(project: Project) -> None:
    """Each of these modules takes 1 to 30 ms to import, of 160 ms for the whole command."""
    project.write_source(GOOD)
    set_age(project.folder, days=1, names=["a.jsonl"])  # a newer file is read again
    project.configure(documents("a.jsonl", layout="document"), max_seq_len=512).convert_ok()
    command = [sys.executable, "-c", UNCHANGED, str(project.recipe)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    modules = {*done.stderr.splitlines()[-1].split()}
    assert {"mdsmix.mix.render.render", "mdsmix.conversion.run"} <= modules
    needless = {"rich", "hashlib", "secrets", "importlib.abc", "omegaconf", "pyarrow"}
    needless |= {"numpy", "random", "tempfile", "socket", "concurrent.futures"}
    needless |= {"mdsmix.conversion.gc"}  # its patterns are needed to delete
    needless |= {"mdsmix.engines.local_engine", "multiprocessing.connection"}  # no workers
    needless |= {
        "mdsmix.encode.template_code",
        "mdsmix.encode.placeholders",
    }  # what a template does is in the cache
    needless |= {"tarfile", "mdsmix.sources.csv_table", "mdsmix.sources.parquet"}  # other formats
    needless |= {"mdsmix.kinds.turn_renderer", "mdsmix.kinds.preferences"}  # other kinds
    needless |= {"mdsmix.encode.word_form", "mdsmix.encode.token_spelling"}  # SentencePiece
    assert sorted(needless & modules) == []


def test_words_without_options_are_parsed_as_typer_parses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do the same, and what they leave out has the same default."""
    recipe = tmp_path / "my recipe.yaml"
    recipe.write_text("{}")
    calls = list[dict[str, Any]]()
    defaults = inspect.signature(conversion_command.run_conversion)

    def record(*args: Any, **kwargs: Any) -> None:
        call = defaults.bind(*args, **kwargs)
        call.apply_defaults()
        call.arguments["overrides"] = list(call.arguments["overrides"] or ())
        calls.append(call.arguments)

    monkeypatch.setattr(conversion_command, "run_conversion", record)
    monkeypatch.setattr(convert, "run_conversion", record)
    for overrides in ([], ["max_seq_len=64"], ["a=", "b", "c=d=e", "\u00fc=-1", "a b", ""]):
        words = ["convert", str(recipe), *overrides]
        assert mdsmix(*words).code == 0
        make_app_for(words)(words, standalone_mode=False)
        direct, parsed = calls[-2:]
        assert direct == parsed
        assert (direct["recipe"], direct["overrides"]) == (recipe, overrides)
    assert len(calls) == 6


def test_what_typer_must_parse_or_refuse_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = conversion_command.parse_without_typer
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{}")
    name = str(recipe)
    assert parse([name, "a=1"]) == (recipe, ["a=1"])
    for words in (
        [],
        ["-"],
        [""],
        [str(tmp_path)],
        [f"{name}x"],
        [name, "-q"],
        [name, "--", "a=1"],
    ):
        assert parse(words) is None
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read every file
    assert parse([name]) is None
    monkeypatch.undo()
    monkeypatch.setenv("_MDSMIX_COMPLETE", "complete_bash")
    assert parse([name]) is None


ENDINGS = """
import sys
from mdsmix.cli.main import run
try:
    run()
finally:
    needless = {"mdsmix.encode.word_form", "mdsmix.kinds.prove_processor"}
    print("typer" in sys.modules, sorted(needless & sys.modules.keys()))
"""


def test_a_conversion_without_options_imports_no_typer(project: Project) -> None:
    """Typer and the options of the command take 15 ms of CPU. No conversion imports what only
    SentencePiece tokenizers and images need.
    """
    project.write_source(GOOD)
    project.configure(documents("a.jsonl", layout="document"), max_seq_len=512)
    for more, ending in (
        ([], "False"),
        (["max_seq_len=256"], "False"),
        (["max_seq_length=256"], "False"),
        (["-q"], "True"),
    ):
        command = [sys.executable, "-c", ENDINGS, "convert", str(project.recipe), *more]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == f"{ending} []", done.stderr
        assert done.returncode == (2 if more == ["max_seq_length=256"] else 0)
