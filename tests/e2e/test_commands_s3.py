"""Every command prints and writes the same for streams in a bucket as for those on a disk, and
refuses in one sentence. `doctor` reports what a store refuses. Images in a bucket are not requested
when a run is planned, once when they are converted, and only listed by a second run.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import boto3
import pytest
import zstandard

from mdsmix.conversion import source_cache
from mdsmix.doctor import diagnoses
from mdsmix.errors import Unreachable
from mdsmix.mix.plan.plan import PlanOptions, make_plan, resolve_for_plan
from mdsmix.storage import locate, s3_conditions
from tests.converting import (
    Answer,
    Project,
    chats,
    documents,
    mdsmix,
    pairs,
    read_location,
    read_public_files,
    read_samples,
    run_ok,
)
from tests.counting import count_requests
from tests.faults import IGNORES, Proxy, Rule
from tests.minio import start_own_minio
from tests.pages import Page
from tests.pictures import drawing, record, stream


@pytest.fixture
def streams(corpus_folder: Path, bucket: str) -> dict[str, Any]:
    """A stream of each kind, from plain, .gz and .zst files in the bucket. The stream `quiz` has
    the records of `docs` again, as an evaluation.
    """
    raw, gz, zst = f"s3://{bucket}/raw", gzip.compress, zstandard.compress
    for name, suffix, pack in (("docs", "", bytes), ("faq", ".gz", gz), ("chat", ".zst", zst)):
        content = (corpus_folder / f"{name}.jsonl").read_bytes()
        locate(f"{raw}/{name}.jsonl{suffix}").write(pack(content))
    locate(f"{raw}/web.jsonl.zst").write((corpus_folder / "web.jsonl.zst").read_bytes())
    return {
        "web": documents(f"{raw}/web.jsonl.zst"),
        "docs": documents(f"{raw}/docs.jsonl", layout="document"),
        "faq": pairs(f"{raw}/faq.jsonl.gz"),
        "chat": chats(f"{raw}/chat.jsonl.zst"),
        "quiz": documents(f"{raw}/do*.jsonl", layout="document", split="eval"),
    }


def test_a_bucket_gets_the_same_bytes_as_a_disk_and_every_command_prints_the_same(
    project: Project, bucket: str, streams: Any, proxy: Proxy
) -> None:
    project.set_window_size(60_000)
    far, near = f"s3://{bucket}/mix", str(project.out)
    recipe = project.configure(
        streams=streams, max_seq_len=64, compression="zstd", local=None
    ).recipe
    project.run(f"local={near}")
    project.run(f"remote={far}", workers=2)
    assert read_location(far) == read_location(near)
    run_ok("check", recipe, f"remote={far}")
    before = read_location(f"s3://{bucket}")

    def run_for_both(*arguments: object) -> Answer:
        """Run a command for the folder and for the bucket, whose URL replaces PLACE, and assert
        that the output is the same. Return the answer for the bucket.
        """
        answers = []
        for key, place in (("local", near), ("remote", far)):
            options = [str(argument).replace("PLACE", place) for argument in arguments]
            override = [f"{key}={place}"] if recipe in arguments else []
            answers.append(mdsmix(*options, *override))
        on_disk, answer = answers
        assert answer.code == on_disk.code == 0, answer
        assert answer.out.replace(far, near).split() == on_disk.out.split(), arguments
        return answer

    run_for_both("convert", recipe, "--dry-run")
    run_for_both("inspect", "PLACE/chat", "--sample", "3")
    run_for_both("verify", "PLACE/web")
    run_for_both("gc", "PLACE/web/train")
    options = PlanOptions(nodes=1, gpus=1, batch=4)
    places = (f"local={near}", f"remote={far}")
    plans = [make_plan(resolve_for_plan([str(recipe), place]), options) for place in places]
    assert plans[0].epoch.tokens == plans[1].epoch.tokens
    stored = {name: data for name, data in read_location(far).items() if "quiz/" not in name}
    fetched = [data for name, data in stored.items() if name.endswith((".zstd", "index.json"))]
    assert plans[1].node.run_bytes == sum(map(len, fetched))
    with count_requests(proxy) as requests:
        leaks = json.loads(run_for_both("leaks", recipe, "--json", "-n", 0).out)
    assert leaks["leaks"], "docs and quiz are made from one file"
    run_for_both("leaks", recipe, "-n", 1)
    shards = [request.key for request in requests.requests if ".mds" in request.key]
    assert len(shards) == len(set(shards)), "each shard is fetched once"
    pages = []
    for place in places:
        path = project.folder / "page.html"
        run_ok("report", recipe, "--no-preview", "-n", 4, "-o", path, place)
        pages.append(Page(path.read_text("utf-8")))
    assert pages[0].figures == pages[1].figures
    assert [s.tokens for s in pages[0].samples] == [s.tokens for s in pages[1].samples]
    assert read_location(f"s3://{bucket}") == before, "these commands write nothing"


def test_a_mix_in_a_bucket_has_the_same_bytes_as_on_a_disk_and_is_compared_with_its_lock(
    project: Project, bucket: str
) -> None:
    """The lock does not depend on the training node's paths of tokenizer and caches."""
    root, home = f"s3://{bucket}", project.folder
    remote, local = f"remote={root}/mix", f"local={home}/node"
    source = project.write_source([f"{n} one two three" for n in range(40)])
    recipe = project.configure(streams={name: documents(source) for name in "ab"}).recipe

    for out, place in ((f"{root}/all", [remote]), (home / "all", [])):
        run_ok("convert", recipe, local, *place)
        run_ok("mix", recipe, "--out", out, "--seed", 3, "mix.a.repeat=1.5", local, *place)
    assert read_location(f"{root}/all/train") == read_location(home / "all/train")
    configs = (home / "train.yaml", f"{root}/train.yaml")
    for config in configs:
        run_ok("render-yaml", recipe, "-o", config, local, remote)
    locks = [locate(f"{config}.mix.lock").read() for config in configs]
    assert locks[0] == locks[1]
    check = mdsmix("check", "--lock", configs[0])
    assert (check.code, check.err) == (0, "")
    assert re.search(r"train_loader +a +as planned", check.out)
    project.write_source(["another one of the others"] * 40)
    run_ok("convert", recipe, local, remote, "--reencode")
    check = mdsmix("check", "--lock", configs[0])
    assert (check.code, "error lock-differs [a" in check.out) == (3, True)


@pytest.fixture
def recipe(project: Project, bucket: str) -> Path:
    project.write_source(["one"])
    return project.configure(remote=f"s3://{bucket}/mix", local=None).recipe


def run_doctor(recipe: Path) -> tuple[int, list[str]]:
    """Return the exit code of `doctor` and its diagnoses as lines."""
    answer = mdsmix("doctor", recipe, "--json")
    diagnoses = json.loads(answer.out)["diagnoses"]
    return answer.code, [f"{d['state']} {d['what']}: {d['said']}" for d in diagnoses]


RIGHTS = {"GET list": "ListBucket"} | {o: f"{o.title()}Object" for o in ("PUT", "GET", "DELETE")}


def test_a_bucket_that_keeps_versions_locks_and_encrypts_objects_is_as_any_other(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what `gc` deletes there, the bucket keeps a version: its bytes are not free."""
    with start_own_minio(project.folder / "minio") as server:
        for name, value in server.settings.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=server.url)
        client.create_bucket(Bucket="guarded", ObjectLockEnabledForBucket=True)
        client.put_object_lock_configuration(
            Bucket="guarded",
            ObjectLockConfiguration={
                "ObjectLockEnabled": "Enabled",
                "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}},
            },
        )
        client.put_bucket_encryption(
            Bucket="guarded",
            ServerSideEncryptionConfiguration={
                "Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]
            },
        )
        for word in ("first ", "second "):
            project.write_source([word * 99] * 9)
            project.run("remote=s3://guarded/mix")
        target = locate("s3://guarded/mix/web/train")
        deleted = run_ok("gc", target, "--older-than", "0s", "--delete").out
        assert re.search(r"shard .*\.mds", deleted)
        run_ok("verify", target)
        assert not project.run("remote=s3://guarded/mix").done
        published = {
            name: content
            for name, content in read_location(target).items()
            if not name.startswith(".mdsmix/")
        }
        project.run()
        assert published == read_public_files(project.out / "web/train")
        versions = client.list_object_versions(Bucket="guarded")
    kept = {version["Key"] for version in versions["Versions"] if not version["IsLatest"]}
    assert sum(key.endswith(".mds") for key in kept) == 1


def test_doctor_checks_rights_clock_and_conditions_one_by_one(
    recipe: Path, bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines = run_doctor(recipe)
    assert code == 0
    for words in ("credentials from env", "ok target", "ok clock"):
        assert any(words in line for line in lines)
    assert read_location(f"s3://{bucket}") == {}
    for operation, right in RIGHTS.items():
        proxy.rules = [Rule("403 AccessDenied", operation, times=100)]
        code, lines = run_doctor(recipe)
        refused = [line for line in lines if line.startswith("problem")]
        assert (code, any(f"(s3:{right})" in line for line in refused)) == (4, True), lines
        assert all("may not" in line for line in refused)
    proxy.rules = [Rule(IGNORES, "PUT", times=100)]
    monkeypatch.setattr(s3_conditions, "_keeps", {})
    monkeypatch.setattr(diagnoses, "MOST_SKEW", -1)
    code, lines = run_doctor(recipe)
    assert code == 0
    assert any(line.startswith("warning target") and "conditional writes" in line for line in lines)
    assert any(line.startswith("warning clock") for line in lines)


def test_doctor_reports_wrong_keys_and_a_missing_bucket(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = mdsmix("doctor", recipe, "remote=s3://no-such-bucket-here/mix")
    assert (answer.code, "the bucket does not exist" in answer.out) == (4, True)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    answer = mdsmix("doctor", recipe)
    assert (answer.code, answer.out.count("the secret key is wrong")) == (4, 1)


@pytest.fixture
def see(project: Project, seeing: Path) -> Project:
    """A project with a tokenizer that has an image token."""
    project.tokenizer = seeing
    return project


def configure(see: Project, root: str, *records: Any) -> None:
    """Write these records and a recipe. Paths of images are resolved from `root`."""
    see.write_source(records)
    see.configure(stream("a.jsonl", images={"root": root}), max_seq_len=200)


def test_images_in_a_bucket_are_requested_once(bucket: str, proxy: Proxy, see: Project) -> None:
    see.patch.setattr(source_cache, "FEW", 5)
    root = f"s3://{bucket}/pictures"
    names = [f"{number % 3}/{number}.jpg" for number in range(12)]
    for number, name in enumerate(names):
        locate(f"{root}/{name}").write(drawing(seed=number))
    configure(see, root, *map(record, names), record(names[0], "../gone.jpg"))
    with count_requests(proxy) as first:
        see.run()
    assert first.by_operation == {"GET": 13}, str(first)
    expected = [[drawing(seed=n)] for n in range(12)]
    assert [sample["images"] for sample in read_samples(see.train)] == expected
    (bad,) = see.bad
    assert (bad["reason"], bad["detail"]["image"]) == ("image_not_found", "../gone.jpg")
    with count_requests(proxy) as second:
        assert see.run().units == 0
    assert second.by_operation == {"GET list": 1, "HEAD": 1}, str(second)
    locate(f"{root}/0/3.jpg").write(drawing(seed=99))
    see.run()
    assert read_samples(see.train)[3]["images"] == [drawing(seed=99)]
    assert see.manifest.totals.images == 12


def test_a_record_that_names_a_missing_bucket_is_bad(bucket: str, see: Project) -> None:
    locate(f"s3://{bucket}/0.jpg").write(drawing())
    no_path = f"s3://{bucket}/../x.jpg"
    gone = [f"s3://{bucket}-gone/0.jpg", no_path, f"s3://{'B' * 9}/0.jpg"]
    gone += [f"s3://{bucket}/", "x" * 1025, "s3://b/0.jpg"]
    configure(see, f"s3://{bucket}", *map(record, gone), record("0.jpg"))
    see.run()
    assert see.manifest.records.written == 1
    bad = {record["detail"]["image"]: record for record in see.bad}
    assert list(bad) == [path[:300] for path in gone]
    assert bad.pop(no_path)["reason"] == "bad_image_path"
    assert {record["reason"] for record in bad.values()} == {"image_not_found"}
    assert bad[gone[0]]["detail"]["why"].startswith("the bucket does not exist")
    assert see.run().units == 0


def test_a_store_that_does_not_answer_ends_the_run(see: Project) -> None:
    see.patch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    configure(see, "s3://bucket", record("0.jpg"))
    with pytest.raises(Unreachable, match=r"cannot reach s3://bucket/0\.jpg"):
        see.run()
