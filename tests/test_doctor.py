"""`mdsmix doctor` on a disk: what would end a run is a problem with its fix, and nothing is left
behind.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mdsmix import doctor
from mdsmix.kinds import open_recipe
from tests.converting import documents, files, mdsmix, write_jsonl, write_recipe


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, local=f"{tmp_path}/new/mix", streams=streams)


def found(recipe: Path, *overrides: str) -> dict[str, tuple[str, str]]:
    """State and sentence of each thing that was looked at; of several of one name the worst."""
    worst = ["ok", "warning", "problem"].index
    diagnoses = doctor.diagnose(open_recipe(recipe, overrides))
    ascending = sorted(diagnoses, key=lambda each: worst(each.state))
    return {each.what: (each.state, each.said) for each in ascending}


def test_all_is_well_and_nothing_is_left(recipe: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    states = found(recipe)
    assert set(states) >= {"versions", "memory", "tokenizer", "source of web", "disk"}
    assert "problem" not in {state for state, _ in states.values()}
    assert files(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_each_thing_that_fails_is_named_and_hides_no_other(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "a.jsonl").unlink()
    target = f"{tmp_path}/file/mix"
    answer = mdsmix("doctor", recipe, "tokenizer=./nowhere", f"local={target}")
    assert answer.code == 4
    problems = [line for line in answer.out.splitlines() if line.startswith("problem")]
    named = {line[9:].partition(": ")[0] for line in problems}
    assert named == {"tokenizer", "source of web", f"target {target}"}
    assert "ok       target" not in answer.out, "what failed is not said to work"
    # A stream that others made has to be there.
    wanted = f"streams.old={{local: {tmp_path / 'theirs'}}}"
    assert found(recipe, wanted)["stream old"][0] == "problem"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/index.json").write_text("{}")
    assert found(recipe, wanted)["stream old"][0] == "ok"


def test_without_credentials(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    other = "streams.old={kind: pretraining, source: {path: s3://bucket/old.jsonl, text: text}}"
    states = found(recipe, "remote=s3://bucket/mix", other)
    problems = {what: said for what, (state, said) in states.items() if state == "problem"}
    assert set(problems) == {"store", "source of old", "target s3://bucket/mix"}
    assert all("no credentials were found" in said for said in problems.values())
    assert states["source of web"][0] == "ok", "what lies on a disk is looked at"


def test_little_memory_or_disk_is_a_warning(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "count_cpus", lambda: 2)
    for mebibytes, free, state in ((300, 3, "warning"), (8192, 1 << 30, "ok")):
        usage = shutil._ntuple_diskusage(1 << 40, 1 << 40, free)
        monkeypatch.setattr(
            doctor, "choose_memory_cap", lambda mebibytes=mebibytes: mebibytes << 20
        )
        monkeypatch.setattr("mdsmix.doctor.shutil.disk_usage", lambda path, usage=usage: usage)
        states = found(recipe)
        assert (states["memory"][0], states["disk"][0]) == (state, state)
