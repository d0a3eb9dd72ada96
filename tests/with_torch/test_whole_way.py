"""With a real store: a job reads on, or resumes, while and after its stream is published anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.endpoint import Endpoint
from streaming import Stream, StreamingDataset

from mdsmix.shards.index import read_index
from mdsmix.shards.published import find_current, list_versions
from mdsmix.storage import Location, locate
from tests.alarm import fail_after
from tests.converting import Project, documents, manifest_of, read_token_rows, run_ok, tokens
from tests.with_torch.load_streams import first_tokens, loaded, write_tokens

VERSIONED = "publish=versioned"
SHARDS = 8
pytestmark = pytest.mark.usefixtures("_release_loaders")


def written(project: Project, version: str, changed: int) -> Path:
    """A shard a record: `windows` cuts there. The first `changed` are of this version."""
    heads = [version if n < changed else "first" for n in range(SHARDS)]
    lines = [f"Of the {head:9} version, record {n}. " for n, head in enumerate(heads)]
    return project.write_source(line * 6 for line in lines)


@pytest.fixture
def stored(project: Project, bucket: str) -> Project:
    """The stream in a bucket, and `training` as the node's cache."""
    project.set_window_size(written(project, "first", 0).stat().st_size // SHARDS)
    places = {"remote": f"s3://{bucket}/mix", "local": str(project.folder / "training")}
    loader = {"num_workers": 0, "dataset": {"shuffle": False, "predownload": 1}}
    return project.configure(documents("a.jsonl", layout="document"), train_loader=loader, **places)


@pytest.fixture
def split(bucket: str) -> Location:
    return locate(f"s3://{bucket}/mix/web/train")


def publish(
    project: Project, split: Location, version: str, changed: int, *overrides: str
) -> Location:
    """Where the stream is read then."""
    written(project, version, changed)
    project.run(*overrides)
    found = find_current(split)
    assert found is not None
    return found


def rendered(project: Project, name: str, *overrides: str) -> Path:
    run_ok("render-yaml", project.recipe, *overrides, "-o", project.folder / name)
    return project.folder / name


def dataset_of(path: Path, **changes: Any) -> Any:
    """Streaming's own dataset over the streams of a rendered YAML."""
    section = yaml.safe_load(path.read_text())["train_loader"]["dataset"]["streams"]
    streams = [Stream(**{**stream, **changes}) for stream in section.values()]
    return StreamingDataset(streams=streams, batch_size=1, shuffle=False, predownload=1)


def names(folder: Location) -> set[str]:
    return {shard.stored.basename for shard in read_index(folder).shards}


def test_a_job_ends_on_the_old_bytes(stored: Project, split: Location, tmp_path: Path) -> None:
    publish(stored, split, "first", 0)
    old_rows, old_names = read_token_rows(split), names(split)
    before = rendered(stored, "before.yaml")
    assert not (tmp_path / "training").exists(), "a training node's cache is not convert's to write"
    reading = iter(dataset_of(before))
    rows = [tokens(next(reading)) for _ in range(3)]
    publish(stored, split, "second", SHARDS)
    assert not old_names & names(split)
    run_ok("gc", split, "--delete")
    cached = {path.name for path in (tmp_path / "training").rglob("*.mds")}
    assert len(old_names - cached) >= 2, "some shards of the old stream are read only now"
    rows += [tokens(sample) for sample in reading]
    assert rows == old_rows
    new_rows = read_token_rows(split)
    assert not any(row in old_rows for row in new_rows)
    after = dataset_of(rendered(stored, "after.yaml"))
    assert [tokens(sample) for sample in after] == new_rows


def test_a_checkpoint_of_an_old_version_resumes_on_exactly_its_remaining_samples(
    stored: Project, split: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a new version shares with the old one is copied inside the store."""
    first = publish(stored, split, "first", 0, VERSIONED)
    rows, stamps = read_token_rows(first), dict(first.list())
    before = rendered(stored, "before.yaml", VERSIONED)
    sent, request = list[tuple[str, str]](), Endpoint.make_request

    def noting(self: Endpoint, operation: Any, asked: dict[str, Any]) -> Any:
        sent.append((operation.name, asked["url_path"].rpartition("/")[2]))
        return request(self, operation, asked)

    with monkeypatch.context() as patch:
        patch.setattr(Endpoint, "make_request", noting)
        second = publish(stored, split, "second", 2, VERSIONED)
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
    third = publish(stored, split, "third", 4, VERSIONED)
    assert len(list(list_versions(split))) == 3
    resumed = dataset_of(before, local=str(tmp_path / "b"))
    resumed.load_state_dict(state)
    assert drawn + [tokens(sample) for sample in resumed] == rows
    run_ok("gc", split.parent, "--keep", 2, "--older-than", "0s", "--delete")
    assert list(list_versions(split)) == sorted([second, third], key=str)
    for version in list_versions(split):
        run_ok("verify", version)


def test_workers_have_a_client_each(bucket: str, tmp_path: Path) -> None:
    at = {"remote": f"s3://{bucket}/web", "local": str(tmp_path / "cache"), "split": "train"}
    project = locate(f"s3://{bucket}/web/train")
    for file in write_tokens(tmp_path / "made", 24, size_limit=260).iterdir():
        (project / file.name).write(file.read_bytes())
    loader = loaded({"web": at}, num_workers=2)
    # Over the one connection that Streaming leaves open it takes 31 s.
    assert loader.dataset.streams[0]._downloader._s3_client is None
    with fail_after(20):
        assert len(first_tokens(loader)) == 24
