"""`mdsmix doctor` on a disk: what would end a run is a problem with its fix, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from mdsmix import doctor
from mdsmix.errors import Denied, MdsmixError
from tests.converting import documents, files, mdsmix, write_jsonl, write_recipe


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(
        tmp_path, tokenizer_folder, local=str(tmp_path / "new/mix"), streams=streams
    )


def states(*arguments: object) -> tuple[int, dict[str, str]]:
    """The exit code, and the state of each thing that was looked at; of several of one name the worst."""
    answer = mdsmix("doctor", *arguments, "--json")
    found: dict[str, str] = {}
    for one in json.loads(answer.out)["diagnoses"]:
        found[one["what"]] = max(found.get(one["what"], ""), one["state"], key=ORDER.index)
    return answer.code, found


ORDER = ["", "ok", "warning", "problem"]


def test_all_is_well_and_nothing_is_left(recipe: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    code, found = states(recipe)
    assert code == 0
    assert set(found) >= {"versions", "memory", "tokenizer", "source of web", "disk"}
    assert "problem" not in found.values()
    assert files(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_each_thing_that_fails_is_named_and_hides_no_other(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "a.jsonl").unlink()
    code, found = states(recipe, "tokenizer=./nowhere", f"local={tmp_path / 'file' / 'mix'}")
    assert code == 4
    failed = {what for what, state in found.items() if state == "problem"}
    assert failed >= {"tokenizer", "source of web", f"target {tmp_path / 'file' / 'mix'}"}
    said = mdsmix("doctor", recipe, f"local={tmp_path / 'file' / 'mix'}").out
    assert "ok       target" not in said, "what failed is not said to work"


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (Denied("no"), ["may not list (List): no", "cannot write: gone"]),
        (MdsmixError("off"), ["cannot list: off"]),
    ],
)
def test_a_right_that_is_missing_hides_no_other_and_any_other_failure_ends_the_row(
    first: MdsmixError, told: list[str]
) -> None:
    def fail(error: MdsmixError) -> None:
        raise error

    verbs = [("list", "List", partial(fail, first)), ("write", "Put", partial(fail, MdsmixError("gone")))]  # fmt: skip
    assert [found.said for found in doctor.tried("target", "all", *verbs)] == told


def test_credentials_that_are_missing_are_told_and_hide_nothing_on_a_disk(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    other = "streams.old={kind: pretraining, source: {path: s3://bucket/old.jsonl, text: text}}"
    answer = mdsmix("doctor", recipe, "remote=s3://bucket/mix", other)
    said = [line for line in answer.out.splitlines() if line.startswith("problem")]
    assert [line.split(":")[0].split(maxsplit=1)[1] for line in said] == [
        "store",
        "source of old",
        "target s3",
    ]
    assert all("no credentials were found" in line for line in said)
    assert "ok       source of web" in answer.out, "what lies on a disk is looked at"
    assert answer.code == 4


def test_a_stream_that_others_made_has_to_be_there(recipe: Path, tmp_path: Path) -> None:
    there = tmp_path / "theirs"
    there.mkdir()
    wanted = f"streams.old={{local: {there}}}"
    assert states(recipe, wanted) == (4, states(recipe)[1] | {"stream old": "problem"})
    (there / "index.json").write_text("{}")
    assert states(recipe, wanted)[1]["stream old"] == "ok"


@pytest.mark.parametrize(("mebibytes", "state"), [(300, "warning"), (8192, "ok")])
def test_memory(mebibytes: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cpu_count", lambda: 2)
    monkeypatch.setattr(doctor, "default_cap", lambda: mebibytes << 20)
    assert doctor.memory().state == state


def test_a_full_disk(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil._ntuple_diskusage(1 << 40, 1 << 40, 3)  # type: ignore[attr-defined]
    monkeypatch.setattr("mdsmix.doctor.shutil.disk_usage", lambda path: full)
    code, found = states(recipe)
    assert (code, found["disk"]) == (0, "warning")
