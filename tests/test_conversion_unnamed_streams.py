"""`gc` of a recipe lists the streams beside its own that it does not name, and deletes one only if
the user names it, no job writes it, and it is a week old. Nothing else in the folder is touched.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest

from mdsmix.conversion.unnamed_streams import find_unnamed_streams
from mdsmix.kinds import open_recipe
from mdsmix.shards.lease import hold_lease
from mdsmix.storage import locate
from tests.converting import (
    Answer,
    Project,
    assert_refused,
    documents,
    mdsmix,
    read_files,
    run_ok,
    set_age,
)
from tests.published import CONCAT, TOKEN_ROW, publish

DELETE = ("--stream", "old", "--delete")


@pytest.fixture
def project(project: Project) -> Project:
    """Publish the streams `web` and `old`, and take `old` out of the recipe."""
    project.write_source([f"Document {n} is about {n}. " * 9 for n in range(40)] + [{"text": 5}])
    streams = {"web": documents("*.jsonl"), "old": documents("*.jsonl", holdout="20%")}
    project.configure(streams=streams).run_all()
    project.configure(streams={"web": streams["web"]})
    set_age(project.out, 8)
    return project


def gc(project: Project, *options: object) -> Answer:
    return mdsmix("gc", project.recipe, *options)


def test_a_stream_is_listed_and_deleted_only_if_it_is_named(project: Project) -> None:
    before = read_files(project.out)
    old = {name for name in before if name.startswith("old/")}
    assert {name.split("/")[1] for name in old} == {"train", "eval"}
    size = sum(len(before[name]) for name in old)
    (line,) = [line for line in gc(project).out.splitlines() if "/old: " in line]
    assert f"{len(old)} files, {size:,} bytes, 8.0 days: " in line
    assert f"`mdsmix gc {project.recipe} --stream old --delete` deletes it" in line
    # None of these deletes a file of it.
    for options in (("--delete",), ("--stream", "old"), ("--stream", "web", "--delete")):
        assert gc(project, *options).code == 0
        assert read_files(project.out) == before
    answer = gc(project, *DELETE)
    assert (
        answer.out
        == f"{project.out}/old: {len(old)} files, {size:,} bytes: deleted, the whole stream\n"
    )
    assert read_files(project.out) == {n: data for n, data in before.items() if n not in old}
    assert not (project.out / "old").exists()
    assert project.run().state == "up to date"
    words = (f"--stream old is neither a stream of {project.recipe} (web)", "its streams (none).")
    assert_refused(gc(project, *DELETE), 2, *words)
    assert_refused(gc(project, "--stream", "wbe"), 2, "did you mean web?")


def test_a_young_stream_a_running_job_and_a_link_keep_it(project: Project) -> None:
    before = read_files(project.out)
    train = project.out / "old/train"
    set_age(train, 6.9, ["index.json"])
    assert_refused(gc(project, *DELETE), 2, "was written 6.9 days ago", "--older-than (7 days)")
    set_age(train, 8)
    with hold_lease(locate(train), lambda _: None), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gc, project, *DELETE).result()
    assert (answer.code, answer.out) == (4, "")
    assert "is being written by process" in answer.err
    assert read_files(project.out) == before
    shutil.move(train / ".mdsmix", project.folder / "state")
    (train / ".mdsmix").symlink_to(project.folder / "state")
    assert_refused(gc(project, *DELETE), 2, "is a link to")
    assert read_files(project.folder / "state")


def test_only_streams_are_listed_and_only_their_own_files_go(project: Project) -> None:
    """Folders of the user, an index.json of something else, tokenizers, and links are no streams.
    In a stream every file stays that neither mdsmix nor the index names.
    """
    out = project.out
    for path in ("notes/a.txt", "notes/train/shard.00000.mds", "site/index.json", "b.mds"):
        (out / path).parent.mkdir(exist_ok=True, parents=True)
        (out / path).write_text("{}")
    publish(project.folder / "outside", CONCAT, [TOKEN_ROW])
    (out / "link").symlink_to(project.folder / "outside")
    publish(out, CONCAT, [TOKEN_ROW], split="bare")  # another tool's, without a split
    publish(out / "other", CONCAT, [TOKEN_ROW], split="val")
    kept = ["old/README.md", "old/train/notes.txt", "old/train/shard.00009.mds", "old/eval/a/b.mds"]
    for path in kept:
        (out / path).parent.mkdir(exist_ok=True)
        (out / path).write_text("mine")
    set_age(out, 8)
    before = read_files(out)
    streams = find_unnamed_streams(open_recipe(project.recipe))
    assert {stream.name: stream.splits for stream in streams} == {
        "bare": (".",),
        "old": ("eval", "train"),
        "other": ("val",),
    }
    lines = [line for line in run_ok("gc", project.recipe).out.splitlines() if "not name" in line]
    assert [line.partition(": ")[0] for line in lines] == [f"{out}/{s.name}" for s in streams]
    assert lines[1].endswith(
        "kept, since they are not mdsmix's: "
        + ", ".join(sorted(kept)[:3]).replace("old/", "")
        + " and 1 more"
    )
    answer = run_ok("gc", project.recipe, *DELETE, "--stream", "bare", "--json")
    assert [tree["deleted"] for tree in json.loads(answer.out)["unnamed"]] == [True, True]
    after = read_files(out)
    assert set(after) == {
        name for name in before if not name.startswith(("old/", "bare/")) or name in kept
    }
    assert (project.folder / "outside").exists()


def test_versions_and_unfinished_conversions_go_too(project: Project) -> None:
    streams = {"web": documents("*.jsonl"), "old": documents("*.jsonl")}
    shutil.rmtree(project.out)
    project.configure(streams=streams, publish="versioned").run_all()
    project.write_source([f"Another {n} about {n}. " * 9 for n in range(40)])
    project.run_all()
    assert len(list((project.out / "old").iterdir())) == 3  # train, and two versions
    shutil.rmtree(project.out / "old/train/.mdsmix")
    # One part of a conversion that is not finished.
    streams["half"] = documents("*.jsonl")
    project.configure(streams=streams, publish="versioned")
    run_ok("convert", project.recipe, "--only", "half", "--part", "1/2", "--workers", 1)
    project.configure(streams={"web": streams["web"]})
    set_age(project.out, 8)
    names = [stream.name for stream in find_unnamed_streams(open_recipe(project.recipe))]
    assert names == ["half", "old"]
    run_ok("gc", project.recipe, *DELETE, "--stream", "half")
    rest = sorted(path.name for path in project.out.iterdir() if path.is_dir())
    assert [name.partition("-")[0] for name in rest] == ["tokenizer", "web"]


def test_a_run_that_lost_the_lease_deletes_nothing_more(project: Project) -> None:
    """It paused for so long that another run took the stream over."""
    from mdsmix.conversion import unnamed_streams

    read_real = unnamed_streams.read_unnamed_stream

    def read_and_lose_lease(*arguments: Any) -> Any:
        stream = read_real(*arguments)
        lease = project.out / "old/train/.mdsmix/lease"
        if lease.exists():
            lease.write_bytes(b'{"host": "another", "pid": 1, "since": "now", "token": "b"}')
            project.patch.setattr("mdsmix.shards.lease.BEAT_SECONDS", 0)
        return stream

    before = read_files(project.out)
    # No beat comes before the loss, and after it no confirmation is recent.
    project.patch.setattr("mdsmix.shards.lease.BEAT_SECONDS", 3600)
    project.patch.setattr(unnamed_streams, "read_unnamed_stream", read_and_lose_lease)
    answer = gc(project, *DELETE)
    assert (answer.code, "was taken over by another run" in answer.err) == (4, True)
    assert read_files(project.out).items() >= before.items()


def test_in_a_bucket(project: Project, bucket: str, minio: str) -> None:
    mix = f"s3://{bucket}/mix"
    streams = {"web": documents("*.jsonl"), "old": documents("*.jsonl")}
    project.configure(streams=streams, local=None, remote=mix).run_all()
    project.configure(streams={"web": streams["web"]}, local=None, remote=mix)
    assert f"{mix}/old: " in run_ok("gc", project.recipe).out
    assert gc(project, *DELETE).code == 2
    run_ok("gc", project.recipe, *DELETE, "--older-than", "0s")
    client = boto3.client("s3", endpoint_url=minio)
    keys = [item["Key"] for item in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert any(key.startswith("mix/web/train/") for key in keys)
    assert not [key for key in keys if key.startswith("mix/old/")]


def test_a_stream_needs_a_recipe(project: Project) -> None:
    assert_refused(mdsmix("gc", project.train, "--stream", "web"), 2, "name the recipe")
