"""The whole way: raw records, `mdsmix convert`, `mdsmix render-yaml --into`, and the unmodified `llmfoundry train` learns: from folders and
from a bucket, on two ranks with an empty disk, and by the blocks of pages."""

import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.converting import chats, documents, files, pairs, write_recipe
from tests.counting import counted
from tests.docs.homes import Homes
from tests.docs.page import Page
from tests.faults import Proxy
from tests.forked import Standing
from tests.foundry.conftest import ROOT, Foundry
from tests.foundry.steps import LLMFOUNDRY, MDSMIX, converted, does, fetch_tokenizer, rendered
from tests.with_torch.test_load_ranks import free_port

LOSS = re.compile(r"loss/train/total: ([\d.]+)")
METRIC = re.compile(r"metrics/eval/heldout/LanguageCrossEntropy: ([\d.]+)")
LOADER = {"num_workers": 0, "dataset": {"shuffle": True, "shuffle_seed": 17}}


def streams(corpus: Path) -> dict[str, Any]:
    """The demo's: two of pretraining, two of finetuning, one held out."""
    held = {"layout": "document", "min_tokens": 8}
    return {
        "web": documents(corpus / "web.jsonl.zst"),
        "docs": documents(corpus / "docs.jsonl", **held),
        "faq": pairs(corpus / "faq.jsonl"),
        "chat": chats(corpus / "chat.jsonl"),
        "heldout": documents(corpus / "heldout.jsonl", **held, split="val"),
    }


def losses(said: str) -> list[float]:
    return [float(loss) for loss in LOSS.findall(said)]


def trained(programs: Standing, config: Path, *settings: str) -> str:
    """What `llmfoundry train` printed up to its good end: what that script runs, in a process that has imported it.

    One run at a time: two that start together may choose one name for Streaming's shared memory, and one of them ends.
    """
    done = programs.start(LLMFOUNDRY, "train", config, *settings).wait()
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def test_a_mix_trains_and_is_evaluated_from_folders_and_from_minio(
    foundry_programs: Standing,
    tokenizer_folder: Path,
    corpus_folder: Path,
    tmp_path: Path,
    bucket: str,
) -> None:
    listed, mix = streams(corpus_folder), {"web": {"repeat": 0.5}, "chat": {"repeat": 2}}
    settings = {"streams": listed, "mix": mix, "max_seq_len": 128, "train_loader": LOADER}
    local = rendered(converted(tmp_path / "local", tokenizer_folder, **settings))
    store = {"remote": f"s3://{bucket}/mix", "local": str(tmp_path / "cache")}
    minio = rendered(converted(tmp_path / "minio", tokenizer_folder, **settings, **store))
    fetch_tokenizer(minio)
    assert "name: finetuning" in local.read_text()
    assert not list((tmp_path / "cache").rglob("*.mds")), "what trains must come from the store"

    from_folders = trained(foundry_programs, local, "eval_interval=8ba")
    from_minio = trained(foundry_programs, minio, "max_duration=6ba", "eval_interval=6ba")
    found = losses(from_folders)
    assert len(found) == 24
    assert sum(found[:4]) / 4 - sum(found[-4:]) / 4 > 1, "means of four, since batches differ"
    assert losses(from_minio) == found[:6]
    metrics = [float(value) for value in METRIC.findall(from_folders)]
    assert len(metrics) == 3
    assert all(late < early for early, late in pairwise(metrics))
    cached = {path.parts[-3].rpartition("-")[0] for path in (tmp_path / "cache").rglob("*.mds")}
    assert cached == set(listed)


def test_two_ranks_train_from_minio_with_an_empty_disk(
    foundry_programs: Standing,
    tokenizer_folder: Path,
    corpus_folder: Path,
    tmp_path: Path,
    bucket: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training node finds its tokenizer and its streams in the bucket, without a step by hand."""
    both = {name: stream for name, stream in streams(corpus_folder).items() if name in ("docs", "chat")}  # fmt: skip
    settings = {
        "streams": both,
        "max_seq_len": 128,
        "train_loader": {"name": "mdsmix", "num_workers": 0, "dataset": {"eos_token_id": 0}},
        "remote": f"s3://{bucket}/mix",
        "local": str(tmp_path / "node/cache"),
    }
    config = rendered(converted(tmp_path / "maker", tokenizer_folder, **settings))
    name = yaml.safe_load(config.read_text())["tokenizer"]["name"]
    assert name.startswith(f"s3://{bucket}/mix/tokenizer-")
    (node := tmp_path / "node").mkdir()
    monkeypatch.chdir(node)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MDSMIX_CACHE": str(node / "mdsmix"),
    }
    words = ("train", config, "max_duration=6ba", "device_train_microbatch_size=4")
    with counted(proxy) as asked:
        running = [
            foundry_programs.start(LLMFOUNDRY, *words, RANK=str(n), LOCAL_RANK=str(n), **common)
            for n in range(2)
        ]
        ended = [each.wait() for each in running]
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr[-3000:]
    assert len(losses(ended[0].stdout + ended[0].stderr)) == 6
    assert asked.at("/tokenizer.json") == {"GET": 1}, "its files come once a node"
    assert asked.at("/mdsmix.tokenizer") == {"GET": 2}


def test_both_environments_write_the_same_bytes_and_the_real_loader_draws_from_them(
    foundry_python: Path,
    foundry_programs: Standing,
    corpus_folder: Path,
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    """With the transformers and the Streaming that LLM-Foundry pins."""
    settings = {"streams": streams(corpus_folder), "max_seq_len": 128, "train_loader": LOADER}
    converted(tmp_path / "ours", tokenizer_folder, **settings)
    (tmp_path / "theirs").mkdir()
    recipe = write_recipe(tmp_path / "theirs", tokenizer_folder, **settings)
    # A cache of its own: the tokenizer is to be read by Foundry's transformers, not found in a snapshot.
    environment = {"MDSMIX_CACHE": str(tmp_path / "cache")}
    script = foundry_python.with_name("mdsmix")
    assert "0." in subprocess.run([script, "--version"], capture_output=True, text=True).stdout
    for words in (("convert", recipe), ("render-yaml", recipe, "-o", tmp_path / "o.yaml", "--validate")):  # fmt: skip
        done = foundry_programs.start(MDSMIX, *words, **environment).wait()
        assert done.returncode == 0, done.stderr
    assert "(2, 128), (2, 128); eval_loader heldout (" in done.stderr
    ours, theirs = (
        {name: data for name, data in files(tmp_path / side / "out").items() if name.count("/") == 2}
        for side in ("ours", "theirs")
    )  # fmt: skip
    assert len([name for name in ours if name.endswith(".mds")]) >= 5
    assert ours == theirs, "shards, index and manifest of every stream"


def test_composers_block_of_the_page_trains(
    foundry: Foundry, tokenizer_folder: Path, corpus_folder: Path, tmp_path: Path
) -> None:
    """Composer's own trainer over `mdsmix.load`, as docs/loading.md has it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/loading.md").read_text("utf-8"), re.S)
    (code,) = (each for each in blocks if "composer" in each)
    both = {name: stream for name, stream in streams(corpus_folder).items() if name in ("docs", "chat")}  # fmt: skip
    mix = {name: {"choose": 16} for name in both}
    loader = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    settings = {"streams": both, "mix": mix, "max_seq_len": 64, "train_loader": loader}
    recipe = converted(tmp_path, tokenizer_folder, **settings)
    does("render-yaml", recipe, "-o", tmp_path / "train.yaml")
    code = code.replace('"train.yaml"', repr(str(tmp_path / "train.yaml")))
    assert foundry("train.run", code=code) == 4


def test_the_yaml_of_the_tutorial_trains(
    foundry: Foundry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/tutorial.md from its first command to the last."""
    monkeypatch.chdir(tmp_path)
    homes = Homes(tmp_path)
    page = Page(ROOT / "docs/tutorial.md", homes)
    page.read()
    assert page.wrong == []
    found = foundry("train.losses", path=str(homes.home / "foundry.yaml"), steps=12)
    assert found[-1] < found[0] - 0.3
