"""What LLM-Foundry's own loaders draw of a training YAML, beside a preview's first batches; and
which keys these loaders read.
"""

from __future__ import annotations

import gc
import inspect
import re
from itertools import islice
from typing import Any

import llmfoundry.data.utils
import streaming
import torch
from llmfoundry.data.dataloader import build_dataloader
from llmfoundry.data.finetuning import dataloader as finetuning
from llmfoundry.data.finetuning.tasks import StreamingFinetuningDataset
from llmfoundry.data.text_data import StreamingTextDataset, build_text_dataloader
from llmfoundry.utils.builders import build_tokenizer
from omegaconf import OmegaConf
from streaming import Stream, StreamingDataset
from streaming.base import partition, shuffle

from mdsmix.mix.epoch.draws import Machines
from mdsmix.mix.streams.resolve import resolve_mix
from mdsmix.preview.options import PreviewOptions
from mdsmix.preview.preview import preview

LOADERS = {"text": build_text_dataloader, "finetuning": finetuning.build_finetuning_dataloader}


def previewed(path: str, steps: int) -> dict[str, Any]:
    """The tokens of rows, by both, as lists [step][row] in one order, and Streaming's version."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    section, words = tree["train_loader"], tree["tokenizer"]
    tokenizer = build_tokenizer(words["name"], words["kwargs"])
    loader = build_dataloader(section, tokenizer, 6).dataloader
    theirs = [_rows(batch) for batch in islice(loader, steps)]
    del loader
    gc.collect()
    cluster = Machines(workers=section["num_workers"], batch=6)
    found = preview(
        resolve_mix([path]), PreviewOptions(world=cluster, steps=steps, samples=6)
    ).steps
    ours = [sorted(row.input_ids.tolist() for row in step.shown) for step in found]
    return {"version": streaming.__version__, "theirs": theirs, "ours": ours}


def _rows(batch: Any) -> list[Any]:
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    return sorted(row[here].tolist() for row, here in zip(ids, mask, strict=True))


def signatures() -> dict[str, Any]:
    """The keys that Foundry's loaders read, from their own signatures and source."""
    source = inspect.getsource(llmfoundry.data.utils)
    besides = re.findall(r"dataset_cfg\.(?:get|pop)\(\s*'(\w+)'", source)
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
        "needs": {name: _needs(build) for name, build in LOADERS.items()},
    }


def _needs(build: Any) -> list[str]:
    parameters = inspect.signature(build).parameters.items()
    return [key for key, each in parameters if each.default is inspect.Parameter.empty]


def _keys(*readers: object) -> list[str]:
    return sorted({name for reader in readers for name in inspect.signature(reader).parameters})
