"""`mdsmix doctor` on a disk: each thing that would end a run is a problem with its fix, and no file
is left over.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mdsmix.doctor import diagnoses
from mdsmix.kinds import open_recipe
from tests.converting import documents, mdsmix, read_files, write_jsonl, write_recipe


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, local=f"{tmp_path}/new/mix", streams=streams)


def diagnose(recipe: Path, *overrides: str) -> dict[str, diagnoses.Diagnosis]:
    """Return the diagnosis of each thing; the worst of several with one name."""
    severity = ["ok", "warning", "problem"].index
    unsorted = diagnoses.diagnose(open_recipe(recipe, overrides))
    worst_last = sorted(unsorted, key=lambda diagnosis: severity(diagnosis.state))
    return {diagnosis.what: diagnosis for diagnosis in worst_last}


def test_without_a_problem_no_file_is_left_over(recipe: Path, tmp_path: Path) -> None:
    files_before = read_files(tmp_path)
    diagnoses = diagnose(recipe)
    assert set(diagnoses) >= {"versions", "memory", "tokenizer", "source of web", "disk"}
    assert "problem" not in {diagnosis.state for diagnosis in diagnoses.values()}
    assert read_files(tmp_path) == files_before
    assert not (tmp_path / "new").exists()


def test_each_failure_is_named_and_hides_no_other_failure(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "a.jsonl").unlink()
    target = f"{tmp_path}/file/mix"
    answer = mdsmix("doctor", recipe, "tokenizer=./nowhere", f"local={target}")
    assert answer.code == 4
    problems = [line for line in answer.out.splitlines() if line.startswith("problem")]
    things = {line[9:].partition(": ")[0] for line in problems}
    assert things == {"tokenizer", "source of web", f"target {target}"}
    assert "ok       target" not in answer.out, "a target that failed is not ok"
    # A stream without a source must be published.
    override = f"streams.old={{local: {tmp_path / 'theirs'}}}"
    assert diagnose(recipe, override)["stream old"].state == "problem"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/index.json").write_text("{}")
    assert diagnose(recipe, override)["stream old"].state == "ok"


def test_missing_credentials_are_a_problem_of_everything_in_the_store(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    other = "streams.old={kind: pretraining, source: {path: s3://bucket/old.jsonl, text: text}}"
    diagnoses = diagnose(recipe, "remote=s3://bucket/mix", other)
    problems = {what: each.message for what, each in diagnoses.items() if each.state == "problem"}
    assert set(problems) == {"store", "source of old", "target s3://bucket/mix"}
    assert all("no credentials were found" in message for message in problems.values())
    assert diagnoses["source of web"].state == "ok", "files on the disk can still be read"


def test_a_package_of_a_version_that_transformers_refuses_is_a_problem(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `pip install --pre tokenizers`. The tokenizer was described before, so it opens."""
    assert diagnose(recipe)["versions"].state == "ok"
    card = tmp_path / "packages" / "tokenizers-99.0.dist-info" / "METADATA"
    card.parent.mkdir(parents=True)
    card.write_text("Metadata-Version: 2.1\nName: tokenizers\nVersion: 99.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    answer = mdsmix("doctor", recipe)
    assert answer.code == 4
    (problem,) = [line for line in answer.out.splitlines() if line.startswith("problem")]
    assert problem.startswith("problem  versions: mdsmix ")
    assert "(ImportError: tokenizers" in problem
    assert "but found tokenizers==99.0): install the package or version that it requires" in problem


def test_little_memory_or_disk_is_a_warning(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnoses, "count_cpus", lambda: 2)
    for mebibytes, free, state in ((300, 3, "warning"), (8192, 1 << 30, "ok")):
        usage = shutil._ntuple_diskusage(1 << 40, 1 << 40, free)
        monkeypatch.setattr(
            diagnoses, "choose_memory_cap", lambda mebibytes=mebibytes: mebibytes << 20
        )
        monkeypatch.setattr(
            "mdsmix.doctor.diagnoses.shutil.disk_usage", lambda path, usage=usage: usage
        )
        found = diagnose(recipe)
        assert found["memory"].state == state
        assert found["disk"].state == state
