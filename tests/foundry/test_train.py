"""The whole way: raw records, `mdsmix convert`, `mdsmix render-yaml --into`, and the unmodified `llmfoundry train` learns: from folders and
from a bucket, on two ranks with an empty disk, and by the blocks of pages."""

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.converting import done, files, write_recipe
from tests.counting import counted
from tests.docs.homes import Homes
from tests.docs.page import Page
from tests.faults import Proxy
from tests.forked import Standing
from tests.foundry.conftest import ROOT, Foundry
from tests.foundry.steps import LLMFOUNDRY, MDSMIX, converted, demo, fetch_tokenizer, rendered
from tests.minio import free_port

LOSS = re.compile(r"loss/train/total: ([\d.]+)")
METRIC = re.compile(r"metrics/eval/heldout/LanguageCrossEntropy: ([\d.]+)")
LOADER = {"num_workers": 0, "dataset": {"shuffle": True, "shuffle_seed": 17}}


def losses(said: str) -> list[float]:
    return [float(loss) for loss in LOSS.findall(said)]


def trained(programs: Standing, config: Path, *settings: str) -> str:
    """What `llmfoundry train` printed up to its good end: what that script runs, in a process that has imported it."""
    ended = programs.start(LLMFOUNDRY, "train", config, *settings).wait()
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    return ended.stdout + ended.stderr


def test_a_mix_trains_and_is_evaluated_from_folders_and_from_minio(
    programs: Standing, tokenizer_folder: Path, corpus_folder: Path, tmp_path: Path, bucket: str
) -> None:
    listed, mix = demo(corpus_folder), {"web": {"repeat": 0.5}, "chat": {"repeat": 2}}
    settings = {"streams": listed, "mix": mix, "max_seq_len": 128, "train_loader": LOADER}
    local = rendered(converted(tmp_path / "local", tokenizer_folder, **settings))
    store = {"remote": f"s3://{bucket}/mix", "local": str(tmp_path / "cache")}
    minio = rendered(converted(tmp_path / "minio", tokenizer_folder, **settings, **store))
    fetch_tokenizer(minio)
    assert "name: finetuning" in local.read_text()
    assert not list((tmp_path / "cache").rglob("*.mds")), "what trains must come from the store"

    from_folders = trained(programs, local, "eval_interval=8ba")
    from_minio = trained(programs, minio, "max_duration=6ba", "eval_interval=6ba")
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
    programs: Standing,
    tokenizer_folder: Path,
    corpus_folder: Path,
    tmp_path: Path,
    bucket: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training node finds its tokenizer and its streams in the bucket, without a step by hand."""
    loader = {"name": "mdsmix", "num_workers": 0, "dataset": {"eos_token_id": 0}}
    both = {"streams": demo(corpus_folder, "docs chat"), "max_seq_len": 128, "train_loader": loader}
    store = {"remote": f"s3://{bucket}/mix", "local": str(tmp_path / "node/cache")}
    config = rendered(converted(tmp_path / "maker", tokenizer_folder, **both, **store))
    name = yaml.safe_load(config.read_text())["tokenizer"]["name"]
    assert name.startswith(f"s3://{bucket}/mix/tokenizer-")
    (node := tmp_path / "node").mkdir()
    monkeypatch.chdir(node)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MDSMIX_CACHE": str(node / "mdsmix")}
    words = ("train", config, "max_duration=6ba", "device_train_microbatch_size=4")
    with counted(proxy) as asked:
        of_rank = ({"RANK": n, "LOCAL_RANK": n} | common for n in "01")
        running = [programs.start(LLMFOUNDRY, *words, **each) for each in of_rank]
        ended = [each.wait() for each in running]
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr[-3000:]
    assert len(losses(ended[0].stdout + ended[0].stderr)) == 6
    assert asked.at("/tokenizer.json") == {"GET": 1}, "its files come once a node"
    assert asked.at("/mdsmix.tokenizer") == {"GET": 2}


def test_both_environments_write_the_same_bytes_and_the_real_loader_draws_from_them(
    foundry_python: Path,
    programs: Standing,
    corpus_folder: Path,
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    """With the transformers and the Streaming that LLM-Foundry pins."""
    settings = {"streams": demo(corpus_folder), "max_seq_len": 128, "train_loader": LOADER}
    converted(tmp_path / "ours", tokenizer_folder, **settings)
    (tmp_path / "theirs").mkdir()
    recipe = write_recipe(tmp_path / "theirs", tokenizer_folder, **settings)
    # A cache of its own: the tokenizer is to be read by Foundry's transformers, not found in a snapshot.
    environment = {"MDSMIX_CACHE": str(tmp_path / "cache")}
    script = foundry_python.with_name("mdsmix")
    assert "0." in subprocess.run([script, "--version"], capture_output=True, text=True).stdout
    validating = ("render-yaml", recipe, "-o", tmp_path / "o.yaml", "--validate")
    for words in (("convert", recipe), validating):
        ended = programs.start(MDSMIX, *words, **environment).wait()
        assert ended.returncode == 0, ended.stderr
    assert "(2, 128), (2, 128); eval_loader heldout (" in ended.stderr
    lying = (files(tmp_path / side / "out").items() for side in ("ours", "theirs"))
    ours, theirs = ({n: data for n, data in each if n.count("/") == 2} for each in lying)
    assert len([name for name in ours if name.endswith(".mds")]) >= 5
    assert ours == theirs, "shards, index and manifest of every stream"


def test_composers_block_of_the_page_trains(
    foundry: Foundry, tokenizer_folder: Path, corpus_folder: Path, tmp_path: Path
) -> None:
    """Composer's own trainer over `mdsmix.load`, as docs/loading.md has it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/loading.md").read_text("utf-8"), re.S)
    (code,) = (each for each in blocks if "composer" in each)
    both = demo(corpus_folder, "docs chat")
    loader = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    settings = {"mix": {n: {"choose": 16} for n in both}, "max_seq_len": 64, "train_loader": loader}
    recipe = converted(tmp_path, tokenizer_folder, streams=both, **settings)
    done("render-yaml", recipe, "-o", tmp_path / "train.yaml")
    code = code.replace('"train.yaml"', repr(str(tmp_path / "train.yaml")))
    assert foundry("train.run", code=code) == 4


def test_the_tutorial_trains(
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
