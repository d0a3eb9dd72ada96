"""An array of jobs makes the bytes of one run, whatever the order, the machines, and whoever was killed or came twice."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mdsmix.convert.parts import NOTE, ArrayPart, parse
from mdsmix.convert.unit import UnitTask
from mdsmix.errors import RecipeError
from tests.converting import chats, documents, files, mdsmix, windows, write_jsonl, write_recipe

RECORDS = [{"text": f"Document {n} tells about {n * n}. " * (n % 5 + 1)} for n in range(240)]
TALKS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
    for n in range(60)
]


ROOT = Path(__file__).parent.parent
AS_COMMAND = (
    "import pytest; from tests.converting import windows; windows(pytest.MonkeyPatch(), 900); "
    "from mdsmix.cli.main import run; run()"
)
"The console script, with the work units of these tests."


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    windows(monkeypatch, 900)
    write_jsonl(tmp_path / "a.jsonl", [*RECORDS[:120], {"text": 5}, *RECORDS[120:]])
    write_jsonl(tmp_path / "b.jsonl", TALKS)
    streams = {"web": documents(tmp_path / "a.jsonl"), "chat": chats(tmp_path / "b.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, local=str(tmp_path / "mix"), streams=streams)


def published(folder: Path) -> dict[str, bytes]:
    """All that a reader sees: not the unit records."""
    return {name: data for name, data in files(folder).items() if "/.mdsmix/" not in name}


@pytest.fixture
def expected(recipe: Path, tmp_path: Path) -> dict[str, bytes]:
    assert mdsmix("convert", recipe, f"local={tmp_path / 'one'}").code == 0
    return published(tmp_path / "one")


def on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / f"cache-{random.random()}"))


def test_ten_parts_in_any_order_with_three_missing_and_one_twice_give_the_bytes_of_one_run(
    recipe: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (9, 2, 5, 10, 1, 5, 7, 4):
        on_another_machine(tmp_path, monkeypatch)
        answer = mdsmix("convert", recipe, "--part", f"{number}/10")
        assert answer.code == 0, answer.err
        assert f"web: part {number}/10: " in answer.out
        assert not list((tmp_path / "mix").rglob("index.json"))
    on_another_machine(tmp_path, monkeypatch)
    answer = mdsmix("convert", recipe, "--finish")
    assert answer.code == 0, answer.err
    assert (
        "web: 7 parts have finished, and what is left is done now, of 3/10, 6/10, 8/10"
        in answer.err
    )
    assert published(tmp_path / "mix") == expected
    assert not [name for name in files(tmp_path / "mix") if NOTE.fullmatch(name.rpartition("/")[2])]


def test_what_all_parts_have_done_is_joined_without_reading_a_source(
    recipe: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        assert mdsmix("convert", recipe, "--part", f"{number}/3").code == 0
    on_another_machine(tmp_path, monkeypatch)
    dry = mdsmix("convert", recipe, "--finish", "--dry-run")
    assert "web: 3 parts have finished" in dry.out
    assert "web: 0 of " in dry.out

    def read(*_: Any) -> None:
        raise AssertionError("a work unit was read")

    monkeypatch.setattr(UnitTask, "do", read)
    answer = mdsmix("convert", recipe, "--finish")
    assert answer.code == 0, answer.err
    assert published(tmp_path / "mix") == expected


@pytest.mark.parametrize("count", [1, 4, 500])
def test_parts_have_each_unit_once(count: int) -> None:
    parts = [ArrayPart(number, count) for number in range(1, count + 1)]
    assert sorted(unit for part in parts for unit in range(97)[part.own]) == [*range(97)]


def test_duplicates_are_dropped_over_all_parts(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", RECORDS[:60] + RECORDS[:60] + RECORDS[60:90])
    drop = "streams.web.duplicates=drop"
    assert mdsmix("convert", recipe, drop, f"local={tmp_path / 'one'}").code == 0
    for number in (2, 1):
        on_another_machine(tmp_path, monkeypatch)
        assert mdsmix("convert", recipe, drop, "--part", f"{number}/2").code == 0
    assert mdsmix("convert", recipe, drop, "--finish").code == 0
    assert published(tmp_path / "mix") == published(tmp_path / "one")


def test_more_parts_than_units_and_bad_records_of_a_part(recipe: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", [{"messages": 5}])
    empty = json.loads(mdsmix("convert", recipe, "--part", "99/99", "--json").out)
    assert [stream["units"] for stream in empty["streams"]] == [0, 0]
    answer = mdsmix("convert", recipe, "--part", "1/99")
    assert answer.code == 0
    assert "WARNING: 1 records are bad" in answer.out
    assert mdsmix("convert", recipe, "--finish").code == 5


def test_a_part_judges_no_share_of_bad_records(recipe: Path, tmp_path: Path) -> None:
    """That is one of all parts: where this one's units are all bad, others may bring it down."""
    write_jsonl(tmp_path / "b.jsonl", [{"messages": n} for n in range(300)])
    answer = mdsmix("convert", recipe, "--part", "1/1", "max_bad=0.001")
    assert (answer.code, "300 records are bad" in answer.out) == (0, True), answer.err


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/4", "1/4/2", ""])
def test_what_is_no_part_is_told(text: str) -> None:
    with pytest.raises(RecipeError, match="is no part"):
        parse(text)


def test_an_empty_part_is_none_and_not_the_whole(recipe: Path, tmp_path: Path) -> None:
    """As of a variable that is not set: each job of the array would do all and publish."""
    answer = mdsmix("convert", recipe, "--part", "")
    assert (answer.code, "--part '' is no part" in answer.err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_damaged_note_is_none(
    recipe: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digit that turned in the hash of a source file is a hash too, and would be published."""
    mdsmix("convert", recipe, "--only", "web", "--part", "1/1")
    (note,) = (path for path in tmp_path.glob("mix/web/*/.mdsmix/*") if NOTE.fullmatch(path.name))
    said = note.read_bytes()
    place = len(said) // 2
    note.write_bytes(said[:place] + bytes([said[place] ^ 1]) + said[place + 1 :])
    on_another_machine(tmp_path, monkeypatch)
    answer = mdsmix("convert", recipe, "--only", "web", "--finish")
    assert "web: 0 parts have finished" in answer.err
    found = published(tmp_path / "mix/web")
    assert found == {n[4:]: held for n, held in expected.items() if n.startswith("web/")}


def test_what_finishes_says_which_parts_are_missing(recipe: Path, tmp_path: Path) -> None:
    """Parts beyond the last work unit are not missing."""
    mdsmix("convert", recipe, "--only", "chat", "--part", "1/1")
    (units,) = json.loads(mdsmix("convert", recipe, "--only", "chat", "--part", "7/9", "--json").out)["streams"]  # fmt: skip
    assert (units["units"], units["units_in_all"]) == (0, 6)

    def said(*overrides: str) -> str:
        answer = mdsmix("convert", recipe, *overrides, "--only", "chat", "--finish", "--dry-run")
        return next(line for line in answer.out.splitlines() if "part" in line)

    assert said() == "chat: 1 part has finished"
    for number in (1, 2, 3, 4, 6):
        mdsmix("convert", recipe, "--only", "chat", "--part", f"{number}/9")
    assert said().startswith("chat: 6 parts have finished, and what is left is done now, of 5/9")
    (tmp_path / "mix/chat/train/.mdsmix/part-1-of-1").unlink()
    assert said() == "chat: 5 parts have finished, and what is left is done now, of 5/9"
    mdsmix("convert", recipe, "--only", "chat", "--part", "5/9")
    assert said() == "chat: 6 parts have finished"


@pytest.mark.parametrize("option", ["--finish", "--dry-run", "--verify-target", "--limit=5"])
def test_options_of_the_run_that_finishes(recipe: Path, option: str) -> None:
    answer = mdsmix("convert", recipe, "--part", "1/2", option)
    assert answer.code == 2
    assert "publishes nothing" in answer.err


def test_parts_at_once_and_one_that_is_killed(
    recipe: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """As processes: they write into one target that was not there, at the same time."""
    command = [sys.executable, "-c", AS_COMMAND, "convert", str(recipe), "--workers", "1"]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    jobs = [
        subprocess.Popen([*command, "--part", f"{n}/3"], stdout=subprocess.DEVNULL, env=here)
        for n in (1, 2, 3)
    ]
    try:
        while not (tmp_path / "mix/web/train/.mdsmix").exists() and jobs[2].poll() is None:
            time.sleep(0.01)
        jobs[2].kill()
        assert [job.wait() for job in jobs][:2] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
    assert mdsmix("convert", recipe, "--finish").code == 0
    assert published(tmp_path / "mix") == expected


PAGE = (ROOT / "docs/many-machines.md").read_text("utf-8")


def test_the_slurm_script_of_the_docs_as_an_array_runs_it(
    recipe: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    (script,) = re.findall(r"```sbatch\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "job.sh").write_text(script)
    command = tmp_path / "bin/mdsmix"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{AS_COMMAND}" "$@"\n')
    command.chmod(0o755)
    for task in (1, 2):
        array = {"SLURM_ARRAY_TASK_ID": f"{task}", "SLURM_ARRAY_TASK_MAX": "2"}
        where = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=os.environ | array | where, check=True)
    assert "2 parts have finished" in mdsmix("convert", recipe, "--finish").err
    assert published(tmp_path / "mix") == expected


def test_the_kubernetes_job_of_the_docs_is_one() -> None:
    text, _ray = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    job = yaml.safe_load(text)
    assert kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    job["spec"]["completionModes"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
