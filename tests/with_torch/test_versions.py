"""A job that reads a stream from a real store while a rebuild of it is published: in place, and as versions."""

from pathlib import Path
from typing import Any

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

VERSIONED = "publish=versioned"
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


def test_a_checkpoint_of_an_old_version_resumes_on_exactly_its_remaining_samples(
    recipe: Path, split: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a new version shares with the old one is copied inside the store."""
    from botocore.endpoint import Endpoint

    first = publish(recipe, split, "first", 0, VERSIONED)
    rows, stamps = token_rows(first), dict(first.list())
    before = render(recipe, "before.yaml", VERSIONED)
    sent, request = list[tuple[str, str]](), Endpoint.make_request

    def noting(self: Endpoint, operation: Any, asked: dict[str, Any]) -> Any:
        sent.append((operation.name, asked["url_path"].rpartition("/")[2]))
        return request(self, operation, asked)

    with monkeypatch.context() as patch:
        patch.setattr(Endpoint, "make_request", noting)
        second = publish(recipe, split, "second", 2, VERSIONED)
    new = names(second) - names(first)
    assert (len(new), len(names(second) & names(first))) == (2, SHARDS - 2)
    written = {name for what, name in sent if what == "PutObject" and name.endswith(".mds")}
    sides = {side.name for side in manifest_of(second).side_files}
    assert written == new
    assert {name for what, name in sent if what == "CopyObject"} == {*names(second), *sides}
    assert not {name for what, name in sent if what == "GetObject"} & names(first)
    assert dict(first.list()) == stamps
    assert not names(second) & {name for name, _ in split.list()}, "nothing is kept twice"

    dataset = dataset_of(before, local=str(tmp_path / "a"))
    reading = iter(dataset)
    drawn = [tokens(next(reading)) for _ in range(5)]
    state = dataset.state_dict(5, False)
    del reading
    third = publish(recipe, split, "third", 4, VERSIONED)
    assert len(list(versions(split))) == 3
    resumed = dataset_of(before, local=str(tmp_path / "b"))
    resumed.load_state_dict(state)
    assert drawn + [tokens(sample) for sample in resumed] == rows
    answer = mdsmix("gc", split.parent, "--keep", 2, "--older-than", "0s", "--delete")
    assert answer.code == 0, answer.err
    assert list(versions(split)) == sorted([second, third], key=str)
    assert [mdsmix("verify", version).code for version in versions(split)] == [0, 0]
