"""What LLM-Foundry's own loaders draw of a training YAML, beside a preview's first batches; and which keys these loaders read."""

import gc
import inspect
import re
from itertools import islice
from typing import Any

import llmfoundry.data.utils
import streaming
from llmfoundry.data.dataloader import build_dataloader
from llmfoundry.data.finetuning import dataloader as finetuning
from llmfoundry.data.finetuning.tasks import StreamingFinetuningDataset
from llmfoundry.data.text_data import StreamingTextDataset, build_text_dataloader
from llmfoundry.utils.builders import build_tokenizer
from omegaconf import OmegaConf
from streaming import Stream, StreamingDataset
from streaming.base import partition, shuffle

from mdsmix.mix.draws import World as Machines
from mdsmix.mix.resolve import resolve
from mdsmix.preview.asked import Asked
from mdsmix.preview.first_steps import preview
from mdsmix.preview.step_rows import Step

LOADERS = {"text": build_text_dataloader, "finetuning": finetuning.build_finetuning_dataloader}


def loader_of(path: str, batch: int) -> tuple[dict[str, Any], Any]:
    """The train_loader of a YAML as a tree, and what Foundry builds of it."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    tokenizer = build_tokenizer(tree["tokenizer"]["name"], tree["tokenizer"]["kwargs"])
    return tree["train_loader"], build_dataloader(tree["train_loader"], tokenizer, batch).dataloader


def previewed(path: str, steps: int) -> dict[str, Any]:
    """Rows of both as lists of [step] of (tokens, trained positions, rows), and Streaming's version."""
    section, loader = loader_of(path, 6)
    theirs = [_held(batch) for batch in islice(loader, steps)]
    del loader
    gc.collect()
    cluster = Machines(nodes=1, gpus=1, workers=section["num_workers"], batch=6)
    found = preview(resolve([path]), Asked(world=cluster, steps=steps, samples=6)).steps
    return {"version": streaming.__version__, "theirs": theirs, "ours": [_said(s) for s in found]}


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


def signatures() -> dict[str, Any]:
    """The keys that Foundry's loaders read, from their own signatures and source."""
    besides = re.findall(
        r"dataset_cfg\.(?:get|pop)\(\s*'(\w+)'", inspect.getsource(llmfoundry.data.utils)
    )
    return {
        "loader": {name: _keys(build) for name, build in LOADERS.items()},
        "dataset": {
            "text": _keys(StreamingTextDataset, StreamingDataset) + besides,
            "finetuning": _keys(StreamingFinetuningDataset, finetuning._validate_config)
            + sorted(finetuning._ALLOWED_DATASET_KEYS),
        },
        "stream": _keys(Stream),
        "shuffle_algo": sorted(shuffle.algos),
        "partition_algo": sorted(partition.algos),
        "needs": {
            name: [
                key
                for key, parameter in inspect.signature(build).parameters.items()
                if parameter.default is inspect.Parameter.empty
            ]
            for name, build in LOADERS.items()
        },
    }


def _keys(*readers: object) -> list[str]:
    return sorted({name for reader in readers for name in inspect.signature(reader).parameters})
