"""`train_loader.name: mdsmix`: the unmodified LLM-Foundry trains on streams that none of its own loaders reads together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.converting import chats, documents, pairs
from tests.foundry.conftest import Foundry
from tests.foundry.steps import converted, rendered

STEPS = 12
LOADER = {"name": "mdsmix", "num_workers": 0, "dataset": {"shuffle": True, "shuffle_seed": 17}}


def mixed(folder: Path, tokenizer: Path, corpus: Path, **settings: Any) -> Path:
    """The training YAML of text in full rows, documents, pairs and chats, with an evaluation of two kinds."""
    streams = {
        "web": documents(corpus / "web.jsonl.zst"),
        "docs": documents(corpus / "docs.jsonl", layout="document", min_tokens=8),
        "faq": pairs(corpus / "faq.jsonl"),
        "chat": chats(corpus / "chat.jsonl"),
        "held": documents(corpus / "heldout.jsonl", split="val"),
        "held-chat": chats(corpus / "chat.jsonl", split="val"),
    }
    mix = {"web": {"repeat": 0.5}, "chat": {"repeat": 2}}
    settings = {
        "streams": streams,
        "mix": mix,
        "max_seq_len": 128,
        "train_loader": LOADER,
    } | settings
    return rendered(converted(folder, tokenizer, **settings))


def test_a_run_that_resumes_in_mid_epoch_has_the_losses_of_one_that_was_not_disturbed(
    foundry: Foundry, tokenizer_folder: Path, corpus_folder: Path, tmp_path: Path
) -> None:
    config = mixed(tmp_path, tokenizer_folder, corpus_folder)
    assert "name: mdsmix" in config.read_text()
    saved = tmp_path / "saved"
    undisturbed = foundry("train.losses", path=str(config), steps=STEPS)
    saving = [f"save_folder={saved}", "save_interval=5ba"]
    before = foundry("train.losses", path=str(config), steps=5, settings=saving)
    resuming = [f"load_path={saved}/ep0-ba5-rank0.pt"]
    after = foundry("train.losses", path=str(config), steps=STEPS, settings=resuming)
    assert before == undisturbed[:5]
    assert after == undisturbed[5:]
    assert undisturbed[-1] < undisturbed[0] - 0.5
