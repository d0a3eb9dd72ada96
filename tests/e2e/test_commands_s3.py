"""Every command at streams in a bucket: it says and writes what it does of the same streams on a disk, and refuses in one sentence. `doctor`
says what a store refuses."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import zstandard

from mdsmix import doctor
from mdsmix.mix.plan.make import PlanOptions, make_plan, resolve_for_plan
from mdsmix.storage import locate, s3_conditions
from tests.converting import (
    Answer,
    chats,
    documents,
    files,
    lying_at,
    mdsmix,
    pairs,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.counting import counted
from tests.faults import IGNORES, Proxy, Rule
from tests.pages import Page


def streams_of(raw: str) -> dict[str, Any]:
    """A stream of each kind, of which some records are in the stream `quiz` too."""
    quiz = documents(f"{raw}/do*.jsonl", layout="document", split="eval")
    return {
        "web": documents(f"{raw}/web.jsonl.zst"),
        "docs": documents(f"{raw}/docs.jsonl", layout="document"),
        "faq": pairs(f"{raw}/faq.jsonl.gz"),
        "chat": chats(f"{raw}/chat.jsonl.zst"),
        "quiz": quiz,
    }


@pytest.fixture
def raw(corpus_folder: Path, bucket: str) -> str:
    """The corpus in the bucket: plain, .gz and .zst."""
    content = {
        "web.jsonl.zst": (corpus_folder / "web.jsonl.zst").read_bytes(),
        "docs.jsonl": (corpus_folder / "docs.jsonl").read_bytes(),
        "faq.jsonl.gz": gzip.compress((corpus_folder / "faq.jsonl").read_bytes(), mtime=0),
        "chat.jsonl.zst": zstandard.compress((corpus_folder / "chat.jsonl").read_bytes()),
    }
    for name, data in content.items():
        locate(f"s3://{bucket}/raw/{name}").write(data)
    return f"s3://{bucket}/raw"


def test_a_bucket_gets_the_bytes_of_a_disk_and_every_command_says_the_same_of_both(
    tmp_path: Path,
    tokenizer_folder: Path,
    bucket: str,
    raw: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows(monkeypatch, 60_000)
    far, near = f"s3://{bucket}/mix", str(tmp_path / "out")
    settings = {"streams": streams_of(raw), "max_seq_len": 64, "compression": "zstd"}
    recipe = write_recipe(tmp_path, tokenizer_folder, local=None, **settings)
    run_recipe(recipe, f"local={near}")
    run_recipe(recipe, f"remote={far}", workers=2)
    assert lying_at(far) == files(tmp_path / "out")
    assert mdsmix("check", recipe, f"remote={far}").code == 0
    before = lying_at(f"s3://{bucket}")

    def both(*arguments: object) -> Answer:
        """What the command says of the bucket, once its bucket is called what the folder is."""
        told = []
        for key, place in (("local", near), ("remote", far)):
            named = [str(each).replace("PLACE", place) for each in arguments]
            override = [f"{key}={place}"] if recipe in arguments else []
            told.append(mdsmix(*named, *override))
        on_disk, answer = told
        assert answer.code == on_disk.code == 0, answer
        assert answer.out.replace(far, near).split() == on_disk.out.split(), arguments
        return answer

    both("convert", recipe, "--dry-run")
    both("inspect", "PLACE/chat", "--sample", "3")
    both("verify", "PLACE/web")
    both("gc", "PLACE/web/train")
    asked_for, places = PlanOptions(nodes=1, gpus=1, batch=4), (f"local={near}", f"remote={far}")
    plans = [make_plan(resolve_for_plan([str(recipe), place]), asked_for) for place in places]
    assert plans[0].epoch.tokens == plans[1].epoch.tokens
    stored = {name: data for name, data in lying_at(far).items() if "quiz/" not in name}
    fetched = [data for name, data in stored.items() if name.endswith((".zstd", "index.json"))]
    assert plans[1].node.run_bytes == sum(map(len, fetched))
    with counted(proxy) as asked:
        leaks = json.loads(both("leaks", recipe, "--json", "-n", 0).out)
    assert leaks["leaks"], "docs and quiz are made of one file"
    both("leaks", recipe, "-n", 1)
    shards = [request.key for request in asked.requests if ".mds" in request.key]
    assert len(shards) == len(set(shards)), "each is fetched once"
    pages = []
    for place in places:
        page = tmp_path / "page.html"
        answer = mdsmix("report", recipe, "--no-preview", "-n", 4, "-o", page, place)
        assert answer.code == 0, answer
        pages.append(Page(page.read_text("utf-8")))
    assert pages[0].figures == pages[1].figures
    assert [s.tokens for s in pages[0].samples] == [s.tokens for s in pages[1].samples]
    assert lying_at(f"s3://{bucket}") == before, "nothing is written by who only looks"


def test_a_mix_in_a_bucket_has_the_bytes_of_one_on_a_disk_and_its_lock_is_held_against_it(
    tmp_path: Path, tokenizer_folder: Path, bucket: str
) -> None:
    """The training node's names of tokenizer and caches change nothing of the lock."""
    root, node = f"s3://{bucket}", str(tmp_path / "node")
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{n} one two three"} for n in range(40)])
    streams = {"a": documents(source), "b": documents(source)}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, local=node)
    assert mdsmix("convert", recipe, f"remote={root}/mix").code == 0
    assert mdsmix("convert", recipe).code == 0
    for out, remote in ((f"{root}/all", [f"remote={root}/mix"]), (tmp_path / "all", [])):
        answer = mdsmix("mix", recipe, "--out", out, "--seed", 3, "mix.a.repeat=1.5", *remote)
        assert answer.code == 0, answer
    assert lying_at(f"{root}/all/train") == lying_at(tmp_path / "all" / "train")
    configs = (tmp_path / "train.yaml", f"{root}/train.yaml")
    for config in configs:
        assert mdsmix("render-yaml", recipe, "-o", config, f"remote={root}/mix").code == 0
    lock = Path(f"{configs[0]}.mix.lock").read_bytes()
    assert locate(f"{configs[1]}.mix.lock").read() == lock
    done = mdsmix("check", "--lock", configs[0])
    assert (done.code, done.err) == (0, "")
    assert re.search(r"train_loader +a +as planned", done.out)
    write_jsonl(source, [{"text": "another one of the others"}] * 40)
    assert mdsmix("convert", recipe, f"remote={root}/mix", "--reencode").code == 0
    done = mdsmix("check", "--lock", configs[0])
    assert (done.code, "error lock-differs [a" in done.out) == (3, True)


@pytest.fixture
def recipe(bucket: str, tmp_path: Path, tokenizer_folder: Path) -> Path:
    streams = {"web": documents(write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}]))}
    remote = f"s3://{bucket}/mix"
    return write_recipe(tmp_path, tokenizer_folder, remote=remote, local=None, streams=streams)


def said(recipe: Path) -> tuple[int, list[str]]:
    answer = mdsmix("doctor", recipe, "--json")
    found = json.loads(answer.out)["diagnoses"]
    return answer.code, [f"{d['state']} {d['what']}: {d['said']}" for d in found]


def test_rights_clock_and_conditions_are_looked_at_one_by_one(
    recipe: Path, bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = said(recipe)
    assert code == 0
    assert any("credentials from env" in line for line in found)
    assert any(line.startswith("ok target") for line in found)
    assert any(line.startswith("ok clock") for line in found)
    assert lying_at(f"s3://{bucket}") == {}
    for operation, right in (
        ("GET list", "s3:ListBucket"),
        ("PUT", "s3:PutObject"),
        ("GET", "s3:GetObject"),
        ("DELETE", "s3:DeleteObject"),
    ):
        proxy.rules = [Rule("403 AccessDenied", operation, times=100)]
        code, found = said(recipe)
        refused = [line for line in found if line.startswith("problem")]
        assert (code, any(f"({right})" in line for line in refused)) == (4, True), found
        assert all("may not" in line for line in refused)
    proxy.rules = [Rule(IGNORES, "PUT", times=100)]
    monkeypatch.setattr(s3_conditions, "_kept", {})
    monkeypatch.setattr(doctor, "MOST_SKEW", -1)
    code, found = said(recipe)
    assert code == 0
    assert any(line.startswith("warning target") and "If-None-Match" in line for line in found)
    assert any(line.startswith("warning clock") for line in found)


def test_wrong_keys_and_a_missing_bucket(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = mdsmix("doctor", recipe, "remote=s3://no-such-bucket-here/mix")
    assert (answer.code, "the bucket does not exist" in answer.out) == (4, True)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    answer = mdsmix("doctor", recipe)
    assert (answer.code, answer.out.count("the secret key is wrong")) == (4, 1)
