"""A conversion with work begins to open its tokenizer before it imports its own modules. A
conversion without work does not, and nothing else differs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import typer.main

import mdsmix
from mdsmix.cache import keep_in_cache
from mdsmix.cli import main
from mdsmix.cli.commands import make_app
from mdsmix.conversion import early_opening, run, unit
from mdsmix.conversion.source_cache import KnownSources
from mdsmix.encode import fast_model
from mdsmix.engines import local_engine
from mdsmix.errors import RecipeError, Unreachable
from mdsmix.storage import retries
from mdsmix.tokenizer import snapshot
from tests.converting import Answer, Project, assert_refused, chats, documents, read_public_files

TEXTS = [f"Document {n}: the quick brown fox" for n in range(24)]
CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
PRINT_MODULES = """
import sys
from mdsmix.encode import fast_model

open_now = fast_model._open_now
start = fast_model._Opening.start
imported = set()

def note_modules(thread):
    imported.update({"typer", "numpy"} & sys.modules.keys())
    start(thread)

def print_modules(path):
    print("opened", sorted(imported), path, flush=True)
    return open_now(path)

fast_model._Opening.start = note_modules
fast_model._open_now = print_modules

from mdsmix.tokenizer import snapshot

start_describe = snapshot._start_describe

def print_start(question):
    print("described", "typer" in sys.modules, flush=True)
    return start_describe(question)

snapshot._start_describe = print_start
from mdsmix.cli.main import run

sys.argv = ["mdsmix", "convert", *sys.argv[1:]]
run()
"""
"""A program that converts. It prints what was imported when it began to open a file, and when a
process begins to describe the tokenizer.
"""

IMPORT_WHILE_PUBLISHED = """
import sys, threading, time
from mdsmix.cli.main import run as run_command
from mdsmix.conversion import run

publish = run.publish_pretrained

def wait_and_publish(jobs):
    print("before", "numpy" in sys.modules, "tokenizers" in sys.modules)
    for thread in threading.enumerate():
        if thread.name == "mdsmix imports":
            thread.join(60)
    print("after", hasattr(sys.modules["mdsmix.engines.local_engine"], "LocalEngine"))
    print("after", hasattr(sys.modules["tokenizers"], "Tokenizer"))
    publish(jobs)

run.publish_pretrained = wait_and_publish
sys.argv = ["mdsmix", "convert", "-q", sys.argv[1]]
run_command()
"""
"A program that converts. It prints what was imported before the tokenizer was published."


@pytest.fixture
def project(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(unit, "_backends", {})
    monkeypatch.setattr(fast_model, "_backends", WeakValueDictionary())  # not of earlier tests
    project.write_source(TEXTS)
    return project.configure()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets an item for each file that fastokens opens: whether it is opened in a
    thread of fast_model.
    """
    opened = list[bool]()
    open_now = fast_model._open_now

    def record(path: str) -> Any:
        opened.append(isinstance(threading.current_thread(), fast_model._Opening))
        return open_now(path)

    monkeypatch.setattr(fast_model, "_open_now", record)
    return opened


def test_the_tokenizer_is_opened_before_the_modules_are_imported(project: Project) -> None:
    project.convert_ok("--dry-run")  # transformers describes the tokenizer

    def run(*words: object) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PRINT_MODULES, *map(str, words)],
            capture_output=True,
            text=True,
            check=True,
        )
        return [line for line in done.stdout.splitlines() if line.startswith("opened")]

    (line,) = run(project.recipe, "--workers", 1)
    assert line.startswith("opened [] ")
    assert run(project.recipe) == []  # the stream is up to date
    # An option before the recipe, and a new stream next to a published one: Typer must parse first.
    elsewhere = f"local={project.folder / 'elsewhere'}"
    (line,) = run("--workers", 1, project.recipe, elsewhere)
    assert line.startswith("opened ['typer'] ")
    project.configure(streams={"web": documents("*.jsonl"), "more": documents("*.jsonl")})
    (line,) = run(project.recipe, "--workers", 1)
    assert line.startswith("opened ['typer'] ")


def test_words_that_convert_nothing_open_nothing(project: Project, opened: list[bool]) -> None:
    project.convert_ok("--dry-run")  # from now on the tokenizer is known
    project.convert_ok("--dry-run")
    assert project.convert("--help").code == 0
    assert project.convert("tokenizer=nowhere").code != 0
    assert project.convert("--wrong").code == 2
    assert project.convert("--wrong=1").code == 2
    assert opened == []
    # A wrong value is found when the thread has begun.
    assert project.convert("--workers", "many").code == 2
    assert fast_model._openings == {}


def test_all_options_of_the_command_but_two_are_known() -> None:
    group: Any = typer.main.get_command(make_app(only="convert"))
    parameters = group.commands["convert"].params
    options = {word for parameter in parameters for word in parameter.opts if word[0] == "-"}
    assert options == early_opening.WITH_WORK | {"--dry-run", "--finish"}


def test_a_new_tokenizer_is_opened_while_transformers_describes_it(
    project: Project, tmp_path: Path
) -> None:
    """By a real process, which takes 3 s: it writes the file that is opened. Published bytes are
    those of the second use.
    """
    for name in ("first", "second"):
        project.configure(local=str(project.folder / name))
        done = subprocess.run(
            [sys.executable, "-c", PRINT_MODULES, project.recipe],
            env=os.environ | {"MDSMIX_CACHE": str(tmp_path / "empty cache")},
            capture_output=True,
            text=True,
            check=True,
        )
        lines = done.stdout.splitlines()
        (line,) = (line for line in lines if line.startswith("opened"))
        assert ("/empty cache/" in line) == (name == "second")
        described = [line for line in lines if line.startswith("described")]
        assert described == (["described False"] if name == "first" else [])
    files = [read_public_files(project.folder / name) for name in ("first", "second")]
    assert files[0] == files[1]


@pytest.fixture
def describing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list that gets the process that describes the tokenizer, which is new."""
    started = list[subprocess.Popen[str]]()
    begin_description = snapshot.begin_description

    def record(name: str, kwargs: dict[str, Any]) -> None:
        begin_description(name, kwargs)
        started[:] = [begun.process for begun in snapshot._begun.values()]

    monkeypatch.setattr(early_opening, "begin_description", record)
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "empty cache"))
    yield started
    snapshot.forget_descriptions()


def test_an_error_ends_the_process_that_describes(
    project: Project, describing: list[subprocess.Popen[str]]
) -> None:
    assert_refused(project.convert("--engine", "none"), 2, "none")
    assert [process.returncode for process in describing] == [-signal.SIGKILL]
    assert snapshot._begun == {}


def test_an_error_in_a_program_ends_the_process_that_describes(
    project: Project, describing: list[subprocess.Popen[str]]
) -> None:
    with pytest.raises(RecipeError, match="8XiB"):
        mdsmix.convert(project.recipe, memory="8XiB", progress=False)
    assert [process.returncode for process in describing] == [-signal.SIGKILL]
    assert snapshot._begun == {}


def test_a_conversion_without_work_opens_nothing(project: Project, opened: list[bool]) -> None:
    project.convert_ok("--dry-run")
    assert opened == []
    project.convert_ok("--workers", 2)
    assert opened == [True]
    assert "up to date" in project.convert_ok().out
    assert opened == [True]
    # Another source: the stream has a folder, so only the plan shows that there is work.
    unit._backends.clear()
    project.write_source(TEXTS, "b.jsonl")
    project.convert_ok("--workers", 2)
    assert opened == [True, False]


def test_only_the_chosen_streams_count(project: Project, opened: list[bool]) -> None:
    streams = {"web": documents("*.jsonl"), "more": documents("*.jsonl")}
    project.configure(streams=streams)
    project.convert_ok("--only", "web", "--workers", 2)
    assert opened == [True]
    unit._backends.clear()
    assert "up to date" in project.convert_ok("--only", "web").out
    assert opened == [True]
    project.convert_ok("--workers", 2)
    assert opened == [True, True]


@pytest.mark.parametrize(
    ("options", "opens"), [((), True), (("--part", "1/2"), True), (("--finish",), False)]
)
def test_a_stream_in_a_store_is_new_if_this_machine_has_converted_none_of_it(
    project: Project, opened: list[bool], options: tuple[str, ...], opens: bool
) -> None:
    """Nothing answers there, so the runs fail."""
    project.convert_ok("--dry-run")
    project.patch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    project.patch.setattr(retries, "_FIRST_SECONDS", 0.0)
    remote = f"s3://bucket{project.folder}"  # no other test uses it
    project.configure(remote=remote)
    assert project.convert(*options).code == 4
    assert opened == [True] * opens
    keep_in_cache(KnownSources.empty(f"{remote}/web/train").path, b"")
    assert project.convert(*options).code == 4
    assert opened == [True] * opens


@pytest.mark.parametrize("options", [("--part", "1/2"), ("--limit", "5"), ()])
def test_no_process_is_forked_while_a_thread_opens_or_imports(
    project: Project, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    forked = list[bool]()
    start_worker = local_engine.start_worker
    open_now = fast_model._open_now

    def record(*arguments: Any) -> Any:
        threads = threading.enumerate()
        forked.append(any(isinstance(thread, fast_model._Opening) for thread in threads))
        forked.append(any(thread.name == "mdsmix imports" for thread in threads))
        return start_worker(*arguments)

    def open_slowly(path: str) -> Any:
        time.sleep(0.2)  # longer than the test needs to plan
        return open_now(path)

    monkeypatch.setattr(local_engine, "start_worker", record)
    monkeypatch.setattr(fast_model, "_open_now", open_slowly)
    monkeypatch.setattr(run, "_import_engine", lambda: time.sleep(0.3))
    # Duplicates are found by workers, before the tokenizer is needed.
    project.configure(documents("*.jsonl", duplicates="drop"))
    project.convert_ok("--workers", 2, *options)
    assert forked
    assert not any(forked)


def test_the_engine_is_imported_while_the_tokenizer_is_published(project: Project) -> None:
    project.convert_ok()  # the tokenizer is known
    project.configure(local=str(project.folder / "new"))
    command = [sys.executable, "-c", IMPORT_WHILE_PUBLISHED, str(project.recipe)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = ["before False False", "after True", "after True"]
    assert (done.returncode, done.stdout.splitlines()) == (0, lines), done.stderr[-2000:]


def test_no_import_goes_on_after_an_error(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that the program of the user then forks would wait for the import for ever."""

    def fail(*_: object) -> None:
        raise Unreachable("no disk")

    monkeypatch.setattr(run, "_prepare_target", fail)
    monkeypatch.setattr(run, "_import_engine", lambda: time.sleep(0.5))
    with pytest.raises(Unreachable, match="no disk"):
        mdsmix.convert(project.recipe, progress=False)
    assert all(thread.name != "mdsmix imports" for thread in threading.enumerate())


def test_ctrl_c_before_the_import_has_begun(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        if thread.name == "mdsmix imports":
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupt)
    assert project.convert().code == 130


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_library_is_reported_once(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    answer = project.convert()
    assert answer.code == 1
    assert answer.err.count("import of tokenizers halted") == 1
    assert "Traceback" not in answer.err


def test_published_bytes_are_the_same(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for conversations, whose template is compiled while the thread opens."""
    project.write_source([{"messages": CONVERSATION} for _ in TEXTS], "chats/a.jsonl")
    streams = {"web": documents("*.jsonl"), "chats": chats("chats/*.jsonl")}
    project.configure(streams=streams).convert_ok("--workers", 2)
    early = read_public_files(project.out)
    monkeypatch.setattr(fast_model, "begin_opening", lambda *_: None)
    unit._backends.clear()
    project.configure(streams=streams, local=str(project.folder / "late"))
    project.convert_ok("--workers", 2)
    assert read_public_files(project.folder / "late") == early


def test_what_is_wrong_is_reported_as_before(project: Project) -> None:
    cases = (
        ({"streams": {"web": documents("*.jsonl", kin="x")}}, 2, "kin"),
        ({"streams": {"web": documents("none/*.jsonl")}}, 2, "none"),
        ({"max_seq_len": "many"}, 2, "max_seq_len"),
    )
    for settings, code, word in cases:
        project.configure(**settings)
        assert_refused(project.convert(), code, word)
        assert fast_model._openings == {}


def test_a_recipe_from_a_pipe_is_read_once(project: Project) -> None:
    pipe = project.folder / "pipe"
    os.mkfifo(pipe)
    content = project.recipe.read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=[content])
    writer.start()
    project.recipe = pipe
    project.convert_ok("--workers", 2)
    writer.join()
    assert project.manifest.totals.samples


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_while_a_thread_opens(
    project: Project, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    project.convert_ok("--dry-run")
    open_now = fast_model._open_now

    def interrupt(path: str) -> Any:
        signal.raise_signal(number)  # the main thread handles it
        return open_now(path)

    monkeypatch.setattr(fast_model, "_open_now", interrupt)
    code = {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    answer = project.convert("--quiet")
    assert answer == Answer(code, "", f"{main.KEPT}\n")
    assert fast_model._openings == {}
    monkeypatch.undo()
    project.convert_ok()
