"""The batches of one work unit are encoded by several workers, and the published bytes are those of
one worker: also if assistants are killed, hang, run out of memory or are needed elsewhere.

Batches have 2 KB here. A worker waits for its first assistant, which always gets two batches.
"""

from __future__ import annotations

import gzip
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mdsmix.conversion import shared_batches, unit
from mdsmix.conversion.unit import UnitTask
from mdsmix.encode.backends import Unequal
from mdsmix.engines import hang, local_engine, workers
from mdsmix.engines.assistants import PipeToAssistant
from mdsmix.engines.tasks import Assistant, Attempt, Reporter
from mdsmix.engines.workers import WorkerChannel
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.sources import format, jsonl, record_batches
from tests.alarm import WAIT_SECONDS, fail_after
from tests.converting import Project, RecordingWatcher, chats, documents, pairs, read_files
from tests.formats import write_records
from tests.killed_run import Run

BATCH = 2_000
RECORDS = 160
BAD_LINE = b'{"text": nothing}\n'


@pytest.fixture
def helped(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project whose work units are shared. The file `helped` gets a byte for each batch that an
    assistant has encoded.
    """
    with fail_after(120):
        yield share_units(project, monkeypatch)


def share_units(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(record_batches, "BLOCK_BYTES", BATCH)
    monkeypatch.setattr(format, "BLOCK_BYTES", BATCH)
    monkeypatch.setattr(jsonl, "PIECE_BYTES", BATCH)
    monkeypatch.setattr(local_engine, "LEAST_SHARE", 1)
    monkeypatch.setattr(local_engine, "LEAST_NEW_SHARE", 1)
    encode_batch = unit.encode_batch
    counted = project.folder / "helped"

    def count(*arguments: Any) -> Any:
        encoded = encode_batch(*arguments)
        with counted.open("ab") as file:
            file.write(b".")
        return encoded

    monkeypatch.setattr(unit, "encode_batch", count)
    do = UnitTask.do

    def wait_and_do(task: UnitTask, attempt: Attempt, reporter: Reporter) -> Any:
        """Do a task once it has an assistant. After the death of a worker it gets none."""
        if isinstance(reporter, WorkerChannel) and not attempt.deaths:
            while not reporter.list_assistants():
                reporter._receive()
        return do(task, attempt, reporter)

    monkeypatch.setattr(UnitTask, "do", wait_and_do)
    return project


def count_helped(project: Project) -> int:
    """Return how many batches assistants have encoded since the last call."""
    file = project.folder / "helped"
    count = file.stat().st_size if file.exists() else 0
    file.unlink(missing_ok=True)
    return count


def make_records() -> list[dict[str, Any]]:
    """Return records that every stream below can read. Some are bad, equal to earlier ones, or have
    fields that nothing reads, 80 in all. The later a record is, the longer are its texts.
    """
    draw = random.Random(0)
    records = list[dict[str, Any]]()
    for number in range(RECORDS):
        words = [
            draw.choice(["hens", "lay", "eggs", "in", "nests"]) for _ in range(5 + number // 4)
        ]
        text = f"{number}: " + " ".join(words)
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
        record = {"text": text, "prompt": text, "response": "No.", "messages": turns, "id": number}
        if number % 2:
            record[f"field {number}"] = 1
        if number % 29 == 7:
            record |= {"text": 7, "prompt": 7, "messages": 7}
        records.append(record)
        if number % 13 == 5:
            records.append(record)
    return records


def write_source(project: Project) -> Path:
    """Write the records, with lines that are blank or not JSON between them."""
    path = project.write_source(make_records())
    lines = path.read_bytes().splitlines(keepends=True)
    for place in (150, 90, 89, 20, 0):
        lines[place:place] = [b"\n", BAD_LINE]
    path.write_bytes(b"".join(lines))
    return path


def convert_both_ways(project: Project, **streams: Mapping[str, Any]) -> dict[str, bytes]:
    """Convert without assistants and with them, and return the files, which are the same."""
    project.configure(streams=streams, max_seq_len=64)
    project.run_all(f"local={project.folder / 'alone'}")  # one worker, in this process
    assert count_helped(project) == 0
    project.run_all(f"local={project.folder / 'together'}", workers=2)
    files = read_files(project.folder / "together")
    assert files == read_files(project.folder / "alone")
    return files


def test_any_stream_has_the_same_bytes_with_assistants(helped: Project) -> None:
    path = write_source(helped)
    named = {"source": {"path": str(path), "text": "text", "id": "id"}}
    streams = {
        "joined": documents(path),
        "documents": documents(path, layout="document"),
        "named": {"kind": "pretraining", "layout": "document", **named},
        "sampled": documents(path, sample="50%"),
        "held": documents(path, holdout="20%"),
        "distinct": documents(path, duplicates="drop"),
        "pairs": pairs(path),
        "packed": pairs(path, pack=True),
        "chats": chats(path),
    }
    convert_both_ways(helped, **streams)
    assert count_helped(helped) >= 2 * len(streams)


def test_any_format_has_the_same_bytes_with_assistants(helped: Project) -> None:
    """A packed file is one unit of many windows, which have the same assistants."""
    path = write_source(helped)
    packed = helped.folder / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    helped.set_window_size(20_000)
    records = [{"text": str(record["text"])} for record in make_records()]
    tables = {
        format: documents(write_records(helped.folder, format, records * 3))
        for format in ("parquet", "mds")
    }
    convert_both_ways(helped, packed=documents(packed, duplicates="drop"))
    assert count_helped(helped) > 2
    helped.set_window_size(1 << 20)
    convert_both_ways(helped, **tables)
    assert count_helped(helped) >= 4


def test_records_nested_too_deep_for_an_assistant_change_no_byte(helped: Project) -> None:
    """Python 3.11 can pickle 490 levels. Lines go to assistants all the same. If records are
    decoded before they are in a batch, the worker encodes the batches that contain such a record.
    """
    records = [{key: record[key] for key in ("text", "messages")} for record in make_records()]
    for position in (3, 40, 90):
        records[position] = {"text": "NESTED", "messages": "NESTED"}
    paths = dict[str, Path]()
    # A cell of a csv is a string.
    for form, replaced in (("jsonl", b'"NESTED"'), ("json", b'"NESTED"'), ("csv", b"NESTED")):
        path = write_records(helped.folder, form, records)
        path.write_bytes(path.read_bytes().replace(replaced, b"[" * 600 + b"]" * 600))
        paths[form] = path
    convert_both_ways(
        helped,
        lines=documents(paths["jsonl"], duplicates="drop"),
        array=documents(paths["json"]),
        cells=chats(paths["csv"]),
    )
    assert count_helped(helped) > 6


def act_in_assistant(project: Project, act: Callable[[], None]) -> None:
    """Let the first assistant do something before it encodes its first batch. It creates the file
    `done` then.
    """
    encode_batch = unit.encode_batch
    done = project.folder / "done"

    def encode(*arguments: Any) -> Any:
        if not done.exists():
            done.touch()
            act()
        return encode_batch(*arguments)

    project.patch.setattr(unit, "encode_batch", encode)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory() -> None:
    raise MemoryError


def sleep_forever() -> None:
    time.sleep(1_000)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("act", [kill_self, run_out_of_memory, sleep_forever, stop_self])
def test_an_assistant_that_dies_or_hangs_changes_no_byte(
    helped: Project, act: Callable[[], None]
) -> None:
    """The worker encodes its batches. A hang is shown to the user."""
    helped.patch.setattr(hang, "SILENT_SECONDS", 2.5)
    helped.patch.setattr(hang, "CHECK_SECONDS", 0.05)
    path = write_source(helped)
    act_in_assistant(helped, act)
    sentences = list[str]()
    helped.patch.setattr(RecordingWatcher, "say", lambda _, text: sentences.append(text))
    convert_both_ways(helped, joined=documents(path))
    assert (helped.folder / "done").exists()
    hangs = [sentence for sentence in sentences if "hung" in sentence]
    assert len(hangs) == (act in (sleep_forever, stop_self)), sentences
    assert all("assisted" in sentence for sentence in hangs)


def test_a_worker_that_dies_while_it_has_an_assistant_is_replaced(helped: Project) -> None:
    """The worker that repeats the unit has no assistants."""
    path = write_source(helped)
    done = helped.folder / "done"
    find_free = shared_batches.find_free_assistant

    def die_once(assistants: Sequence[Assistant]) -> Assistant | None:
        assistant = find_free(assistants)
        has_two_batches = assistant is None and assistants
        if has_two_batches and not done.exists():
            done.touch()
            kill_self()
        return assistant

    helped.patch.setattr(shared_batches, "find_free_assistant", die_once)
    convert_both_ways(helped, joined=documents(path))
    assert done.exists()


@pytest.mark.parametrize("kills", [True, False])
def test_a_record_that_ends_an_assistant_is_set_aside(helped: Project, kills: bool) -> None:
    """It ends the worker too, and then two more workers without assistants."""
    helped.patch.setattr(hang, "SILENT_SECONDS", 2.5)
    helped.patch.setattr(hang, "CHECK_SECONDS", 0.05)
    records = make_records()
    records[3]["text"] = f"{records[3]['text']} poison"
    path = helped.write_source(records)
    encode = Pretraining.encode
    ended = helped.folder / "ended"

    def fail(self: Pretraining, documents_: list[Any]) -> Any:
        if any("poison" in text for (text,) in documents_):
            with ended.open("ab") as file:
                file.write(b".")
            kill_self() if kills else sleep_forever()
        return encode(self, documents_)

    helped.patch.setattr(Pretraining, "encode", fail)
    helped.configure(documents(path), max_seq_len=64)
    answer = helped.convert("--quarantine-crashes", "--workers", "2")
    assert answer.code == 0, answer.err
    (crashed,) = [bad for bad in helped.bad if bad["reason"] == "crashed_worker"]
    assert (crashed["line"], "poison" in crashed["raw"]) == (4, True)
    # The assistant; the worker; a worker with a sixteenth of the records; and, alone, two workers.
    assert ended.stat().st_size in (4, 5)


def test_an_error_of_an_assistant_ends_the_task(helped: Project) -> None:
    """Ids that differ from the reference's are found by whoever compares them."""

    def differ() -> None:
        raise Unequal("fastokens 0", "hens")

    path = write_source(helped)
    act_in_assistant(helped, differ)
    helped.configure(documents(path), max_seq_len=64)
    outcome = helped.run(workers=2)
    assert (helped.folder / "done").exists()
    assert "fastokens 0 differs from the reference on 'hens'" in outcome.notes[0]


def test_an_assistant_that_is_needed_elsewhere_leaves(helped: Project) -> None:
    """A worker of another task has died: the assistant does that task."""
    path = write_source(helped)
    pauses = helped.folder / "paused"
    pause = workers.Worker.pause

    def recall(worker: workers.Worker, is_paused: bool) -> None:
        counted = helped.folder / "helped"
        if worker.assists and not worker.current and counted.exists() and not pauses.exists():
            pauses.touch()
            is_paused = True
        pause(worker, is_paused)

    helped.patch.setattr(workers.Worker, "pause", recall)
    convert_both_ways(helped, joined=documents(path))
    assert pauses.exists()


class Moment(NamedTuple):
    """The first call of a function, with an argument that ends so."""

    owner: Any
    function: str
    suffix: str = ""
    is_over: bool = False
    "Whether the function has returned."

    def __str__(self) -> str:
        """Return the moment as a test's name."""
        return f"{'after' if self.is_over else 'in'} {self.function} {self.suffix}".strip()


MOMENTS = [
    Moment(workers, "send_descriptor"),
    Moment(workers, "send_descriptor", is_over=True),  # only one of the two has its end
    Moment(unit, "encode_batch"),
    Moment(PipeToAssistant, "send", is_over=True),
    Moment(PipeToAssistant, "receive"),
    Moment(os, "replace", ".mds"),  # a shard is half written
    Moment(os, "replace", ".unit"),
    Moment(os, "replace", ".unit", is_over=True),
]


def interrupt_run(
    patch: pytest.MonkeyPatch, folder: Path, moment: Moment, number: signal.Signals
) -> None:
    """Let a run get a signal at this moment: SIGINT as from a terminal, which sends it to all
    processes; SIGTERM as from a container, which sends it to the first one. A worker does not go on
    then, so that it is ended at this moment.

    Args:
        folder: it gets the file `interrupted` at this moment.
    """
    function = getattr(moment.owner, moment.function)
    interrupted = folder / "interrupted"
    interrupted.unlink(missing_ok=True)

    def interrupt(*arguments: Any) -> Any:
        if interrupted.exists() or not str(arguments[-1]).endswith(moment.suffix):
            return function(*arguments)
        result = function(*arguments) if moment.is_over else None
        interrupted.touch()
        main_process = os.getpgrp()
        if number == signal.SIGINT:
            os.killpg(0, number)
        else:
            os.kill(main_process, number)
        if os.getpid() != main_process:
            time.sleep(WAIT_SECONDS)
        return result

    patch.setattr(moment.owner, moment.function, interrupt)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_run_that_is_interrupted_while_a_unit_is_shared_continues(
    helped: Project, number: signal.Signals
) -> None:
    path = write_source(helped)
    packed = helped.folder / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    window = 10_000
    helped.set_window_size(window)
    helped.configure(documents(packed), max_seq_len=64)
    helped.run()
    expected = read_files(helped.out)
    for moment in MOMENTS:
        out = helped.folder / str(moment)
        with pytest.MonkeyPatch.context() as patch:
            interrupt_run(patch, helped.folder, moment, number)
            arguments = [str(helped.recipe), f"local={out}", "--workers", "2"]
            run = Run(arguments, window, helped.folder / "writes.log", None)
            code = run.await_end()
        output = (helped.folder / "writes.output").read_text()
        assert code == (130 if number == signal.SIGINT else 143), f"{moment}: {output}"
        assert output.splitlines()[-1].startswith("interrupted: nothing was half published")
        assert not run.has_processes(), moment
        remaining = read_files(out)
        assert not [name for name in remaining if name.endswith((".tmp", "lease", "index.json"))]
        records = [name for name in remaining if name.endswith(".unit")]
        outcome = helped.run(f"local={out}")
        assert len(records) == outcome.reused == (moment == MOMENTS[-1]), moment
        assert read_files(out) == expected, moment
