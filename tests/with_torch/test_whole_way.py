"""The whole way with a real store: raw files -> published streams -> check -> YAML -> the batches of a training loop, every token there; while a rebuild is published, too."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mdsmix.errors import Unreachable
from mdsmix.load import MixLoader, build_loader
from mdsmix.shards.index import read_index
from mdsmix.shards.published import current, versions
from mdsmix.storage import Location, locate
from tests.alarm import at_most
from tests.converting import (
    chats,
    documents,
    manifest_of,
    mdsmix,
    pairs,
    run_recipe,
    token_rows,
    tokens,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.with_torch.load_streams import IDS, config, write_tokens

LENGTH = 64


LOADER = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "drop_last": False}  # fmt: skip


def test_every_sample_that_was_published_comes_out_of_the_loader_once(
    tmp_path: Path, corpus_folder: Path, tokenizer_folder: Path, bucket: str
) -> None:
    """Sources in the bucket for one stream, on the disk for the others; published in the bucket."""
    packed = "web.jsonl.zst"
    locate(f"s3://{bucket}/raw/{packed}").write((corpus_folder / packed).read_bytes())
    streams = {
        "web": documents(f"s3://{bucket}/raw/*.zst"),
        "docs": documents(corpus_folder / "docs.jsonl", layout="document", min_tokens=8),
        "faq": pairs(corpus_folder / "faq.jsonl"),
        "chat": chats(corpus_folder / "chat.jsonl"),
    }
    recipe = write_recipe(
        tmp_path,
        tokenizer_folder,
        streams=streams,
        max_seq_len=LENGTH,
        remote=f"s3://{bucket}/mix",
        local=str(tmp_path / "training"),
        train_loader=LOADER | {"dataset": {"shuffle": True, "shuffle_seed": 5}},
    )
    assert mdsmix("convert", recipe).code == 0
    checked = mdsmix("check", recipe)
    assert checked.code == 0, checked.out
    assert "4 streams may be mixed" in checked.out
    rendered = tmp_path / "train.yaml"
    assert mdsmix("render-yaml", recipe, "-o", rendered).code == 0
    assert not (tmp_path / "training").exists(), "a training node's cache is not convert's to write"

    published = {name: token_rows(f"s3://{bucket}/mix/{name}/train") for name in streams}
    for name, rows in published.items():
        totals = manifest_of(f"s3://{bucket}/mix/{name}/train").totals
        assert (totals.samples, totals.tokens) == (len(rows), sum(map(len, rows)))
    everything = [row for rows in published.values() for row in rows]
    assert Counter(map(tuple, _streamed(rendered))) == Counter(map(tuple, everything))
    shutil.rmtree(tmp_path / "training")
    found = Counter(map(_as_collated, _batched(rendered)))
    assert found == Counter(map(_as_collated, everything))


def _as_collated(row: list[int]) -> tuple[int, ...]:
    """The finetuning collator ends a row with EOS (0) where it has none, and cuts one that is too long."""
    row = row[: LENGTH - 1]
    while row and not row[-1]:
        row = row[:-1]
    return tuple(row)


def _streamed(rendered: Path) -> list[list[int]]:
    """What Streaming's own dataset reads, by S3_ENDPOINT_URL."""
    from streaming import Stream, StreamingDataset

    streams = yaml.safe_load(rendered.read_text())["train_loader"]["dataset"]["streams"]
    dataset = StreamingDataset(streams=[Stream(**s) for s in streams.values()], batch_size=4)
    return [tokens(sample) for sample in dataset]


def _batched(rendered: Path) -> list[list[int]]:
    """What a training loop gets, without the padding."""
    from mdsmix.load import build_loader

    rows = []
    for batch in build_loader(str(rendered), batch_size=8):
        masks = batch.get("attention_mask", np.ones(batch["input_ids"].shape))
        for ids, mask in zip(batch["input_ids"], masks, strict=True):
            rows.append([int(token) for token in ids[np.asarray(mask).astype(bool)]])
    return rows


VERSIONED = "publish=versioned"
WIDTH = 16
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
        max_seq_len=WIDTH,
        remote=f"s3://{bucket}/mix",
        local=str(tmp_path / "training"),
        train_loader=LOADER | {"dataset": dataset},
    )


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


pytestmark = pytest.mark.usefixtures("_release_loaders")


@pytest.fixture
def client(minio: str) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=minio)


@pytest.fixture
def published(client: Any, bucket: str, tmp_path: Path) -> str:
    """A bucket that holds 24 rows in eight shards under web/train."""
    for file in write_tokens(tmp_path / "made", 24, shard_bytes=260).iterdir():
        client.upload_file(str(file), bucket, f"web/train/{file.name}")
    return bucket


def loader_of(bucket: str, local: Path, workers: int) -> MixLoader:
    stream = {"remote": f"s3://{bucket}/web", "local": str(local), "split": "train"}
    stream |= {"download_retry": 1}
    return build_loader(config({"web": stream}, "text", num_workers=workers), 2, ids=IDS)


def test_two_workers_fetch_with_a_client_each_and_a_lost_shard_is_named(
    published: str, client: Any, tmp_path: Path
) -> None:
    loader = loader_of(published, tmp_path / "cache", workers=2)
    # Over the one connection that Streaming leaves open it takes 31 s.
    assert loader.dataset.streams[0]._downloader._s3_client is None
    with at_most(20):
        batches = list(loader)
    del loader
    assert sum(len(batch["input_ids"]) for batch in batches) == 24
    client.delete_object(Bucket=published, Key="web/train/shard.00002.mds")
    named = f"shard shard.00002.mds under s3://{published}/web/train is lost"
    with at_most(30), pytest.raises(Unreachable, match=named):
        list(loader_of(published, tmp_path / "other", workers=0))
    with (
        at_most(30),
        pytest.raises(Unreachable, match=r"s3://none-[\w-]+/web/train cannot be used"),
    ):
        loader_of(f"none-{published}", tmp_path / "third", workers=0)
