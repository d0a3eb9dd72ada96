"""The first batches of LLM-Foundry's own loader of a training YAML, and what a preview says of them, with its Streaming."""

from __future__ import annotations

import gc
from itertools import islice
from typing import Any

import streaming
from llmfoundry.data.dataloader import build_dataloader
from llmfoundry.utils.builders import build_tokenizer
from omegaconf import OmegaConf

from mdsmix.mix.draws import World as Machines
from mdsmix.mix.resolve import resolve
from mdsmix.preview.asked import Asked
from mdsmix.preview.first_steps import preview
from mdsmix.preview.step_rows import Step

BATCH = 6


def compare(path: str, steps: int) -> dict[str, Any]:
    """Rows of both as lists of [step] of (tokens, trained positions, rows), and Streaming's version."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    tokenizer = build_tokenizer(tree["tokenizer"]["name"], tree["tokenizer"]["kwargs"])
    loader = build_dataloader(tree["train_loader"], tokenizer, BATCH).dataloader
    theirs = [_held(batch) for batch in islice(loader, steps)]
    del loader
    gc.collect()
    workers = tree["train_loader"]["num_workers"]
    cluster = Machines(nodes=1, gpus=1, workers=workers, batch=BATCH)
    found = preview(resolve([path]), Asked(world=cluster, steps=steps, samples=BATCH)).steps
    ours = [_said(step) for step in found]
    return {"version": streaming.__version__, "theirs": theirs, "ours": ours}


def _held(batch: Any) -> dict[str, Any]:
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    return {
        "tokens": int(ids.numel() if mask is None else mask.sum()),
        "slots": ids.numel(),
        "trained": int((batch["labels"][:, 1:] != -100).sum()),
        "rows": sorted(_row(row, None if mask is None else mask[i]) for i, row in enumerate(ids)),
    }


def _row(row: Any, mask: Any) -> list[int]:
    return (row if mask is None else row[mask.bool()]).tolist()


def _said(step: Step) -> dict[str, Any]:
    assert step.counts is not None
    _, tokens, trained = step.counts.sum(axis=0).tolist()
    return {
        "tokens": tokens,
        "slots": step.slots,
        "trained": trained,
        "rows": sorted(row.input_ids.tolist() for row in step.shown),
    }
