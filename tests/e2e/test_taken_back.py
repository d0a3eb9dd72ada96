"""A machine that goes away says SIGTERM and waits: the run ends in order, and another machine goes on with what it has stored. One that
stands still for a while is overtaken."""

import time
from pathlib import Path

import pytest

from mdsmix.storage import locate
from tests.converting import documents, lying_at, run_recipe, windows, write_jsonl, write_recipe
from tests.doomed import Run, Write
from tests.stalled import stalled_everywhere

WINDOW = 4_000
GRACE = 30
"Seconds that clouds give."
FINISHED = 3
"Work units, at least, before the machine goes away."
LATE = Write("worker", "record", "stall", 30)
"Of 53 units: however late the machine is told to go away, the run is not done by then."


@pytest.mark.parametrize(("place", "group"), [("disk", True), ("store", False)])
def test_a_run_that_is_terminated_ends_in_order_and_another_machine_goes_on(
    place: str,
    group: bool,
    tmp_path: Path,
    tokenizer_folder: Path,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler tells all processes of a job, a container's only the first."""
    windows(monkeypatch, WINDOW)
    texts = [{"text": f"Document {n} is about the number {n}. " * 9} for n in range(600)]
    web = write_jsonl(tmp_path / "a.jsonl", texts)
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"web": documents(web)}, local=None)
    target = f"remote=s3://{bucket}/out" if place == "store" else f"local={tmp_path / 'out'}"
    run = Run([str(recipe), target, "--workers", "2"], WINDOW, tmp_path / "writes.log", LATE)
    # Two workers have begun to write so many records, so at most two of them are not written yet.
    began = run.await_write("worker record", FINISHED + 2)
    code, said = run.terminated(group)
    assert (code, time.monotonic() - began < GRACE) == (143, True), said
    assert said.splitlines()[-1].startswith("interrupted: nothing was half published")
    assert run.left() == []
    left = lying_at(target.partition("=")[2])
    assert not [name for name in left if name.endswith((".tmp", "lease", "index.json"))]

    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "another machine"))
    (outcome,) = run_recipe(recipe, target)
    records = [name for name in left if name.endswith(".unit")]
    assert FINISHED <= len(records) == outcome.reused < outcome.units, sorted(left)
    run_recipe(recipe, f"local={tmp_path / 'one'}")
    assert lying_at(target.partition("=")[2]) == lying_at(tmp_path / "one")


def test_a_run_that_stands_still_at_any_step_publishes_nothing_over_a_newer_one(
    tmp_path: Path, tokenizer_folder: Path, bucket: str
) -> None:
    remote, streams = f"s3://{bucket}/mix", {"web": documents(tmp_path / "a.jsonl")}
    recipe = write_recipe(tmp_path, tokenizer_folder, remote=remote, streams=streams)
    stalled_everywhere(recipe, locate(f"{remote}/web/train"), "replace")
