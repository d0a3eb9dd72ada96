"""Batch by batch, mdsmix.load against LLM-Foundry's own loaders.

A case is a config of one loader, a tokenizer folder, its overrides and a batch size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from llmfoundry.data.finetuning.dataloader import build_finetuning_dataloader
from llmfoundry.data.text_data import build_text_dataloader
from transformers import AutoTokenizer

from mdsmix.load import TokenIds, build_loader

BUILDERS = {"text": build_text_dataloader, "finetuning": build_finetuning_dataloader}
# Only the text loader of mdsmix adds the mask; only LLM-Foundry counts the tokens in the batch.
ADDED = {"attention_mask"}
COUNTS = {"total_tokens", "loss_generating_tokens"}


def foundry_batches(case: dict[str, Any], tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    loader = copy.deepcopy(case["config"]["train_loader"])
    build = BUILDERS[loader.pop("name")]
    spec = build(tokenizer=tokenizer, device_batch_size=case["batch_size"], **loader)
    return list(spec.dataloader)


def compare(case: dict[str, Any]) -> int:
    """The number of batches, all of them equal."""
    tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"], **case["overrides"])
    for name, value in case.get("attributes", {}).items():
        setattr(tokenizer, name, value)
    ids = TokenIds(
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        bos=tokenizer.bos_token_id,
        padding_side=tokenizer.padding_side,
    )
    ours = list(build_loader(case["config"], case["batch_size"], ids=ids))
    theirs = foundry_batches(case, tokenizer)
    assert len(ours) == len(theirs) > 0, (case["name"], len(ours), len(theirs))
    for mine, other in zip(ours, theirs, strict=True):
        is_text = case["config"]["train_loader"]["name"] == "text"
        assert set(mine) - (ADDED if is_text else set()) == set(other) - COUNTS, case["name"]
        for key in set(other) - COUNTS:
            assert torch.equal(mine[key], other[key]), (case["name"], key, mine[key], other[key])
    return len(ours)
