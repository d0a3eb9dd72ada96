"""A training node with an empty disk: `llmfoundry train` on two ranks, its tokenizer and its streams in a bucket, and no step by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.converting import chats, documents
from tests.counting import counted
from tests.faults import Proxy
from tests.forked import Standing
from tests.foundry.steps import converted, rendered
from tests.foundry.test_train import LLMFOUNDRY, losses
from tests.with_torch.test_load_ranks import free_port

LOADER = {"name": "mdsmix", "num_workers": 0, "dataset": {"eos_token_id": 0}}


def test_two_ranks_train_from_minio_with_an_empty_disk(
    foundry_programs: Standing,
    tokenizer_folder: Path,
    corpus_folder: Path,
    tmp_path: Path,
    bucket: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = rendered(
        converted(
            tmp_path / "maker",
            tokenizer_folder,
            streams={
                "docs": documents(corpus_folder / "docs.jsonl", layout="document", min_tokens=8),
                "chat": chats(corpus_folder / "chat.jsonl"),
            },
            max_seq_len=128,
            train_loader=LOADER,
            remote=f"s3://{bucket}/mix",
            local=str(tmp_path / "node/cache"),
        )
    )
    name = yaml.safe_load(config.read_text())["tokenizer"]["name"]
    assert name.startswith(f"s3://{bucket}/mix/tokenizer-")
    node = tmp_path / "node"
    node.mkdir()
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MDSMIX_CACHE": str(node / "mdsmix"),
    }
    monkeypatch.chdir(node)
    with counted(proxy) as asked:
        running = [
            foundry_programs.start(
                LLMFOUNDRY,
                *("train", config, "max_duration=6ba", "device_train_microbatch_size=4"),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                **common,
            )
            for rank in range(2)
        ]
        ended = [each.wait() for each in running]
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr[-3000:]
    assert len(losses(ended[0].stdout + ended[0].stderr)) == 6
    assert asked.at("/tokenizer.json") == {"GET": 1}, "its files come once a node"
    assert asked.at("/mdsmix.tokenizer") == {"GET": 2}
