"""An array of jobs publishes the same bytes as one run, on any machines and in any order, even if a
job is killed or runs twice.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from mdsmix.conversion.planning import ArrayPart, parse_part
from mdsmix.conversion.source_cache import PART
from mdsmix.conversion.unit import UnitTask
from mdsmix.errors import RecipeError
from tests.alarm import WAIT_SECONDS
from tests.converting import (
    Answer,
    Project,
    assert_refused,
    chats,
    documents,
    read_files,
    read_public_files,
)
from tests.processes import MDSMIX, SET_UNIT_SIZE

RECORDS = [f"Document {n} tells about {n * n}. " * (n % 5 + 1) for n in range(240)]
TALKS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
    for n in range(60)
]
ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/many-machines.md").read_text("utf-8")
AS_COMMAND = f"{SET_UNIT_SIZE.format(900)}; {MDSMIX[2]}"
"The console script, with the work units of these tests."
DROP = "streams.web.duplicates=drop"


@pytest.fixture
def project(project: Project) -> Project:
    project.set_window_size(900)
    project.write_source([*RECORDS[:120], {"text": 5}, *RECORDS[120:]])
    project.write_source(TALKS, "b.jsonl")
    return project.configure(streams={"web": documents("a.jsonl"), "chat": chats("b.jsonl")})


def assert_finished(project: Project, *options: str) -> Answer:
    """Run `--finish`, and assert that the stream has the bytes of one run and no note remains."""
    answer = project.convert_ok(*options, "--finish")
    assert read_public_files(project.out) == read_public_files(project.convert_into(*options).out)
    assert not [name for name in read_files(project.out) if PART.fullmatch(name.rpartition("/")[2])]
    return answer


@pytest.mark.parametrize("option", ["max_bad=100%", DROP])
def test_parts_in_any_order_one_twice_and_one_missing_are_finished(
    project: Project, option: str
) -> None:
    if option == DROP:
        project.write_source(RECORDS[:60] + RECORDS[:60] + RECORDS[60:90])
    for machine, number in enumerate((4, 2, 1, 2)):
        project.switch_machine(f"machine {machine}")
        assert f"web: part {number}/4: " in project.convert_ok(option, "--part", f"{number}/4").out
        assert not list(project.out.rglob("index.json"))
    project.switch_machine("another")
    dry = project.convert_ok(option, "--finish", "--dry-run").out
    assert "web: 3 parts have finished; the remaining work is done now" in dry
    assert "web: 3 parts have finished" in assert_finished(project, option).err


def test_finish_reads_no_source_if_all_parts_are_done(project: Project) -> None:
    """A damaged note is ignored: a wrong digit in the hash of a source file gives a valid hash too,
    and would be published.
    """
    for number in (1, 2):
        project.convert_ok("--part", f"{number}/2")
    project.switch_machine("another")
    note = project.train / ".mdsmix/part-1-of-2"
    content = note.read_bytes()
    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 1
    note.write_bytes(damaged)
    assert "web: 1 part has finished" in project.convert_ok("--finish", "--dry-run").out
    note.write_bytes(content)
    project.patch.setattr(UnitTask, "do", None)
    project.convert_ok("--finish")


def test_a_file_that_is_renamed_before_the_parts_run_is_published_by_its_new_name(
    project: Project,
) -> None:
    """The next run would otherwise report the file of the old name as lost, and refuse. The file
    has no bad record, since the file of bad records contains the name too.
    """
    project.write_source(RECORDS)
    project.convert_ok()
    for old, new in (("a", "c"), ("c", "a")):
        (project.folder / f"{old}.jsonl").rename(project.folder / f"{new}.jsonl")
        chat = project.folder / "b.jsonl"
        project.configure(streams={"web": documents(f"{new}.jsonl"), "chat": chats(chat)})
        project.convert_ok("--part", "1/1")
        project.convert_ok("--finish")
        assert [source.path for source in project.manifest.sources] == [f"{new}.jsonl"]
        assert "up to date" in project.convert_ok().out
    project.write_source([*RECORDS, "one more"])
    assert project.run().manifest.records.read == len(RECORDS) + 1


def test_a_part_ignores_max_bad_and_may_have_no_unit(project: Project) -> None:
    """The share of bad records is that of all parts: if all units of this part are bad, others may
    lower it.
    """
    project.write_source([{"messages": n} for n in range(300)], "b.jsonl")
    assert "quarantined: 300 " in project.convert_ok("--part", "1/1", "max_bad=0.001").out
    empty = json.loads(project.convert_ok("--part", "99/99", "--json").out)
    assert [stream["units"] for stream in empty["streams"]] == [0, 0]
    assert project.convert("--finish").code == 5


def test_each_unit_is_in_one_part_and_invalid_parts_are_refused(project: Project) -> None:
    """An empty one is invalid too, as of an unset variable: otherwise each job of the array would
    convert everything and publish.
    """
    for count in (1, 4, 500):
        units = list[int]()
        for number in range(1, count + 1):
            units += range(97)[ArrayPart(number, count).units]
        assert sorted(units) == [*range(97)]
    for text in ("0/4", "5/4", "1", "a/b", "1/0", "-1/4", "1/4/2", ""):
        with pytest.raises(RecipeError, match="is not K/N"):
            parse_part(text)
    assert_refused(project.convert("--part", ""), 2, "--part '' is not K/N")
    for option in ("--finish", "--dry-run", "--verify-target", "--limit=5"):
        assert_refused(project.convert("--part", "1/2", option), 2, "publishes nothing")
    assert not project.out.exists()


def test_the_slurm_script_of_the_docs_can_be_killed_and_finished(project: Project) -> None:
    """Two tasks write into one new target at the same time, and one is killed."""
    (script,) = re.findall(r"```sbatch\n(.*?)```", PAGE, re.DOTALL)
    (project.folder / "job.sh").write_text(script)
    command = project.folder / "bin/mdsmix"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{AS_COMMAND}" "$@" --workers 1\n')
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "SLURM_ARRAY_TASK_MAX": "2"}
    start = partial(
        subprocess.Popen, ["bash", "job.sh"], cwd=project.folder, start_new_session=True
    )
    tasks = [start(env=env | {"SLURM_ARRAY_TASK_ID": number}) for number in "12"]
    while not (project.train / ".mdsmix").exists() and tasks[1].poll() is None:
        time.sleep(0.01)
    os.killpg(tasks[1].pid, signal.SIGKILL)
    assert tasks[0].wait(WAIT_SECONDS) == 0
    assert re.search("[12] parts? ha(s|ve) finished", assert_finished(project).err)


def test_the_kubernetes_job_of_the_docs_is_valid() -> None:
    text, _ray = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    job, newest = yaml.safe_load(text), kubernetes_validate.latest_version()
    assert kubernetes_validate.validate(job, newest, strict=True)
    job["spec"]["completionModes"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, newest, strict=True)
