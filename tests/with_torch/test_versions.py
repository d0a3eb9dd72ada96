"""A job that reads a stream from a real store while a rebuild of it is published: in place, and as versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from mdsmix.shards.index import read_index
from mdsmix.shards.published import current, versions
from mdsmix.storage import Location, locate
from tests.converting import (
    documents,
    manifest_of,
    mdsmix,
    run_recipe,
    token_rows,
    tokens,
    windows,
    write_jsonl,
    write_recipe,
)

LENGTH = 16
SHARDS = 8


def records(version: str, changed: int) -> list[dict[str, str]]:
    """A shard a record: `windows` cuts there. The first `changed` are of this version."""
    heads = [version if n < changed else "first" for n in range(SHARDS)]
    lines = [f"Of the {head:9} version, record {n}. " for n, head in enumerate(heads)]
    return [{"text": line * 6} for line in lines]


@pytest.fixture
def recipe(
    bucket: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    write_jsonl(tmp_path / "a.jsonl", records("first", 0))
    windows(monkeypatch, (tmp_path / "a.jsonl").stat().st_size // SHARDS)
    dataset = {"shuffle": False, "predownload": 1}
    return write_recipe(
        tmp_path,
        tokenizer_folder,
        streams={"web": documents(tmp_path / "a.jsonl", layout="document")},
        max_seq_len=LENGTH,
        remote=f"s3://{bucket}/mix",
        local=str(tmp_path / "training"),
        train_loader={"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "drop_last": False, "dataset": dataset},
    )  # fmt: skip


@pytest.fixture
def split(bucket: str) -> Location:
    return locate(f"s3://{bucket}/mix/web/train")


def publish(recipe: Path, split: Location, version: str, changed: int, *overrides: str) -> Location:
    """Where the stream is read then."""
    write_jsonl(recipe.parent / "a.jsonl", records(version, changed))
    run_recipe(recipe, *overrides)
    found = current(split)
    assert found is not None
    return found


def render(recipe: Path, name: str, *overrides: str) -> Path:
    path = recipe.parent / name
    answer = mdsmix("render-yaml", recipe, *overrides, "-o", path)
    assert answer.code == 0, answer.err
    return path


def dataset_of(rendered: Path, **changes: Any) -> Any:
    """Streaming's own dataset over the streams of a rendered YAML."""
    from streaming import Stream, StreamingDataset

    section = yaml.safe_load(rendered.read_text())["train_loader"]["dataset"]["streams"]
    streams = [Stream(**{**stream, **changes}) for stream in section.values()]
    return StreamingDataset(streams=streams, batch_size=1, shuffle=False, predownload=1)


def names(folder: Location) -> set[str]:
    return {shard.stored.basename for shard in read_index(folder).shards}


def test_a_job_that_reads_a_stream_while_it_is_replaced_finishes_on_the_old_bytes(
    recipe: Path, split: Location, tmp_path: Path
) -> None:
    publish(recipe, split, "first", 0)
    old_rows, old_names = token_rows(split), names(split)
    before = render(recipe, "before.yaml")
    reading = iter(dataset_of(before))
    rows = [tokens(next(reading)) for _ in range(3)]
    publish(recipe, split, "second", SHARDS)
    assert not old_names & names(split)
    assert mdsmix("gc", split, "--delete").code == 0
    cached = {path.name for path in (tmp_path / "training").rglob("*.mds")}
    assert len(old_names - cached) >= 2, "some shards of the old stream are read only now"
    rows += [tokens(sample) for sample in reading]
    assert rows == old_rows
    new_rows = token_rows(split)
    assert not any(row in old_rows for row in new_rows)
    after = dataset_of(render(recipe, "after.yaml"))
    assert [tokens(sample) for sample in after] == new_rows


class Sent(NamedTuple):
    """A request to the store."""

    what: str
    key: str
    size: int


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Sent]]:
    """Gives every request since it was asked last, as it left botocore, in this process or in a worker."""
    from botocore.endpoint import Endpoint

    noted = tmp_path / "sent"
    real = Endpoint.make_request

    def noting(self: Endpoint, operation: Any, request: dict[str, Any]) -> Any:
        size = int(request["headers"].get("Content-Length", 0))
        with noted.open("a") as file:
            file.write(json.dumps([operation.name, request["url_path"], size]) + "\n")
        return real(self, operation, request)

    def since() -> list[Sent]:
        lines = noted.read_text().splitlines()
        noted.unlink()
        return [Sent(*json.loads(line)) for line in lines]

    monkeypatch.setattr(Endpoint, "make_request", noting)
    return since


VERSIONED = "publish=versioned"


def test_two_versions_side_by_side_and_what_is_unchanged_is_copied_inside_the_store(
    recipe: Path, split: Location, sent: Callable[[], list[Sent]]
) -> None:
    first = publish(recipe, split, "first", 0, VERSIONED)
    old_rows, stamps = token_rows(first), dict(first.list())
    sent()
    write_jsonl(recipe.parent / "a.jsonl", records("second", 2))
    (outcome,) = run_recipe(recipe, VERSIONED)
    requests = sent()
    second = current(split)
    assert second is not None
    assert outcome.reused == outcome.units - 2
    new = names(second) - names(first)
    assert (len(new), len(names(second) & names(first))) == (2, SHARDS - 2)
    uploaded = {s.key.rpartition("/")[2] for s in requests if s.what == "PutObject"}
    assert {name for name in uploaded if name.endswith(".mds")} == new
    copied = {s.key.rpartition("/")[2] for s in requests if s.what == "CopyObject"}
    assert copied == {*names(second), *(side.name for side in manifest_of(second).side_files)}
    assert not {"UploadPart", "CreateMultipartUpload"} & {s.what for s in requests}
    downloaded = {s.key.rpartition("/")[2] for s in requests if s.what == "GetObject"}
    assert not downloaded & names(first)
    assert dict(first.list()) == stamps
    assert token_rows(first) == old_rows
    assert token_rows(second)[-1] == old_rows[-1]
    assert token_rows(second)[0] != old_rows[0]
    assert not names(second) & {name for name, _ in split.list()}, "nothing is kept twice"


def test_a_checkpoint_of_an_old_version_resumes_on_exactly_its_remaining_samples(
    recipe: Path, split: Location, tmp_path: Path
) -> None:
    first = publish(recipe, split, "first", 0, VERSIONED)
    rows, before = token_rows(first), render(recipe, "before.yaml", VERSIONED)
    dataset = dataset_of(before, local=str(tmp_path / "a"))
    reading = iter(dataset)
    drawn = [tokens(next(reading)) for _ in range(5)]
    state = dataset.state_dict(5, False)
    del reading

    second = publish(recipe, split, "second", 3, VERSIONED)
    publish(recipe, split, "third", 4, VERSIONED)
    assert len(list(versions(split))) == 3
    resumed = dataset_of(before, local=str(tmp_path / "b"))
    resumed.load_state_dict(state)
    assert drawn + [tokens(sample) for sample in resumed] == rows

    answer = mdsmix("gc", split.parent, "--keep", 2, "--older-than", "0s", "--delete")
    assert answer.code == 0, answer.err
    assert first not in versions(split)
    third = current(split)
    assert list(versions(split)) == sorted([v for v in (second, third) if v], key=str)
    for version in versions(split):
        assert mdsmix("verify", version).code == 0
    assert list(first.list()) == []
