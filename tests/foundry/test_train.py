"""The whole way: raw records of the demo's mix, `mdsmix convert`, `mdsmix render-yaml --into`, and the unmodified `llmfoundry train` learns."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.converting import chats, documents, pairs
from tests.forked import Standing
from tests.foundry.steps import converted, fetch_tokenizer, rendered

LLMFOUNDRY = "from llmfoundry.cli.cli import app; app()"
STEPS = 24
LOSS = re.compile(r"loss/train/total: ([\d.]+)")
METRIC = re.compile(r"metrics/eval/heldout/LanguageCrossEntropy: ([\d.]+)")
EVALUATED = "eval_interval=8ba"
LOADER = {"num_workers": 0, "dataset": {"shuffle": True, "shuffle_seed": 17}}


def streams(corpus: Path) -> dict[str, Any]:
    """The demo's: two of pretraining, two of finetuning, one held out."""
    return {
        "web": documents(corpus / "web.jsonl.zst"),
        "docs": documents(corpus / "docs.jsonl", layout="document", min_tokens=8),
        "faq": pairs(corpus / "faq.jsonl"),
        "chat": chats(corpus / "chat.jsonl"),
        "heldout": documents(
            corpus / "heldout.jsonl", layout="document", min_tokens=8, split="val"
        ),
    }


def trained(programs: Standing, config: Path, *settings: str) -> str:
    """What `llmfoundry train` printed up to its good end: what that script runs, in a process that has imported it.

    One run at a time: two that start together may choose one name for Streaming's shared memory, and one of them ends.
    """
    done = programs.start(LLMFOUNDRY, "train", config, *settings).wait()
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    return said


def losses(said: str) -> list[float]:
    return [float(loss) for loss in LOSS.findall(said)]


def fallen(found: list[float]) -> float:
    """By how much the loss fell in all the steps; means of four, since batches differ."""
    assert len(found) == STEPS
    return sum(found[:4]) / 4 - sum(found[-4:]) / 4


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

    from_folders = trained(foundry_programs, local, EVALUATED)
    from_minio = trained(foundry_programs, minio, EVALUATED)
    assert fallen(losses(from_folders)) > 1
    assert losses(from_minio) == losses(from_folders)
    metrics = [float(value) for value in METRIC.findall(from_folders)]
    assert len(metrics) == 3
    assert all(late < early for early, late in pairwise(metrics))
    cached = {path.parts[-3].rpartition("-")[0] for path in (tmp_path / "cache").rglob("*.mds")}
    assert cached == set(listed)
